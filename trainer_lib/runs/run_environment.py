"""This file is what a run is trained with: the machine and the libraries, and the process that does it."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_PATIENCE = 2.0  # seconds for git
_PACKAGES = ("numpy", "transformers", "datasets", "accelerate", "peft", "safetensors")


def describe_environment() -> dict[str, Any]:
    """Return the machine and the libraries, by names for people."""
    import psutil

    facts: dict[str, Any] = {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory": psutil.virtual_memory().total,
        **_devices(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    if torch.version.cuda is not None:
        facts["cuda"] = torch.version.cuda
    # Only what the program uses: nothing is imported to ask for its version.
    facts.update({name: importlib.metadata.version(name) for name in _PACKAGES if name in sys.modules})
    script = sys.argv[0] if sys.argv else ""
    if (commit := _commit(Path(script).resolve().parent)) is not None:
        facts["commit"] = commit
    return {**facts, "script": script, "folder": str(Path.cwd())}


def describe_process() -> dict[str, Any]:
    """Return by what `is_alive` knows this process."""
    import psutil

    return {"pid": os.getpid(), "host": platform.node(), "began": psutil.Process().create_time()}


def is_alive(process: Mapping[str, Any]) -> bool | None:
    """Whether a process that was described still runs; `None` where it cannot be known, as of another machine."""
    import psutil

    if process.get("host") != platform.node():
        return None
    try:
        known = psutil.Process(int(process["pid"]))
        # A number is given away again: it is the same process if it began at the same time.
        is_same = abs(known.create_time() - float(process["began"])) < 1
        return is_same and known.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.AccessDenied:
        return None
    except (psutil.Error, KeyError, TypeError, ValueError, OverflowError):
        return False


def memory_in_use(device_type: str) -> dict[str, int]:
    """Return the memory of this process in bytes: what it holds on the host, and at most held on a device."""
    import psutil

    used = {"host_memory": psutil.Process().memory_info().rss}
    if device_type != "cpu" and torch.accelerator.is_available() and torch.accelerator.memory_stats():
        used["device_memory_peak"] = torch.accelerator.max_memory_allocated()
    return used


def _commit(folder: Path) -> str | None:
    """Return the commit of the repository that a folder is in, and whether files differ from it."""
    git = shutil.which("git")
    if git is None or not folder.is_dir():
        return None
    try:
        commit = _output([git, "-C", str(folder), "rev-parse", "HEAD"])
        changed = _output([git, "-C", str(folder), "status", "--porcelain", "--untracked-files=no"])
    except (OSError, subprocess.SubprocessError):  # no repository, or one that is too large to look through
        return None
    return f"{commit} (with changes)" if changed else commit


def _output(command: list[str]) -> str:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=True, env=environment)
    return done.stdout.strip()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        return platform.processor()
    return platform.processor()


def _devices() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {}
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    counts = {name: names.count(name) for name in names}
    return {"devices": ", ".join(name if count == 1 else f"{count} × {name}" for name, count in counts.items())}
