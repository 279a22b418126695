"""Functions that run on the ranks of `trainer-lib launch`, in new interpreters with one GPU each."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle

from tests.launched import ROOT


def launch_on_gpus(
    function: Callable[..., Any],
    folder: Path,
    *args: Any,
    num_processes: int = 1,
    timeout: float = 300,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `function(*args)` on ranks and return how the launcher ended; `folder` gets what each rank returned."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "call.pickle").write_bytes(cloudpickle.dumps((function, args)))
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    launcher = [sys.executable, "-m", "trainer_lib.commands.main", "launch", "--num_processes", str(num_processes)]
    return subprocess.run(
        [*launcher, "-m", "tests.gpu.ranks", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **(variables or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_on_gpus(
    function: Callable[..., Any],
    folder: Path,
    *args: Any,
    num_processes: int = 1,
    variables: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run `function(*args)` on ranks and return what each returned; it must be on the CPU."""
    done = launch_on_gpus(function, folder, *args, num_processes=num_processes, variables=variables)
    assert done.returncode == 0, done.stderr
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(num_processes)]


def _main() -> None:
    folder = Path(sys.argv[1])
    function, args = cloudpickle.loads((folder / "call.pickle").read_bytes())
    result = function(*args)
    (folder / f"{os.environ.get('RANK', '0')}.pickle").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    _main()
