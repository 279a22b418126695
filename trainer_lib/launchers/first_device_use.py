"""What initialized the accelerator of a notebook: an import, or a line of a cell."""

import importlib
import re
import site
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from trainer_lib.foundation.notebook_tracebacks import notebook_shell
from trainer_lib.launchers import device_count

_TIMEOUT = 60  # seconds to import the packages of a notebook again
_FOUND = "initializes the accelerator: "
_USES = re.compile(
    r"\.cuda\(|torch\.cuda\.|['\"](?:cuda|xpu|npu)\b|device_map\s*=|\b(?:Accelerator|PartialState|AcceleratorState)\("
)


def describe_first_use() -> str:
    """Return a sentence, and a space, about what used the accelerator first; empty if nothing is found."""
    package = first_import(_installed_packages())
    if package is not None:
        return f"`import {package}` initializes it. "
    line = first_line(_cells())
    return "" if line is None else f"The first line that may have used it is {line}. "


def first_import(packages: Sequence[str]) -> str | None:
    """Return the first of some packages whose import initializes the accelerator, found by a fresh process.

    Args:
        packages: The packages, in the order in which they were imported.
    """
    command = [sys.executable, "-m", __name__, *packages]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith(_FOUND)]
    return lines[0].removeprefix(_FOUND) if lines else None


def first_line(cells: Iterable[tuple[int, str]]) -> str | None:
    r"""Return the first line of a notebook that mentions the accelerator, with its place.

    Args:
        cells: The number and the text of each cell that ran, in order.

    Example:
        >>> first_line([(1, "import torch"), (2, "x = torch.ones(2)\nx = x.cuda()")])
        'line 2 of cell 2: `x = x.cuda()`'
    """
    for number, text in cells:
        for place, line in enumerate(text.splitlines(), start=1):
            if _USES.search(line.partition("#")[0]):
                return f"line {place} of cell {number}: `{line.strip()}`"
    return None


def _installed_packages() -> list[str]:
    """Return the packages that this process has imported from installed distributions, the earliest first."""
    folders = [Path(folder).resolve() for folder in (*site.getsitepackages(), site.getusersitepackages())]
    packages: list[str] = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is None or "." in name or name.startswith("_"):
            continue
        if any(folder in Path(file).resolve().parents for folder in folders):
            packages.append(name)
    return packages


def _cells() -> list[tuple[int, str]]:
    """Return the cells that ran in this notebook; none outside of one."""
    shell = notebook_shell()
    history = [] if shell is None else shell.history_manager.input_hist_raw
    return [(number, text) for number, text in enumerate(history) if text]


def _probe(packages: Sequence[str]) -> None:
    for package in packages:
        try:
            importlib.import_module(package)
        except Exception:  # noqa: BLE001 - it may need what only the notebook has
            continue
        if device_count.forks_are_poisoned():
            print(f"{_FOUND}{package}", flush=True)  # noqa: T201 - read by the other process
            return


if __name__ == "__main__":
    _probe(sys.argv[1:])
