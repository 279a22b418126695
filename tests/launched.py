"""Scripts as jobs: on ranks that `trainer-lib launch` starts, or in this process."""

import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
INTERPRETERS = ROOT / "tests" / "interpreters"  # with what each of them runs first
PYTHON_PATH = os.pathsep.join([str(ROOT), str(INTERPRETERS)])  # of interpreters that are to find the library


def run_as_script(command: Sequence[str]) -> None:
    """Run a script by its path, with its arguments, from the project's folder in this process."""
    os.chdir(ROOT)
    sys.argv = list(command)
    runpy.run_path(command[0], run_name="__main__")


def run_launched(
    script: str,
    folder: Path,
    *arguments: str,
    num_processes: int = 2,
    options: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run a script on CPU ranks and return how the launcher ended, which is after its last rank closed its output.

    Args:
        script: Its text, which may import from `tests`.
        folder: Where its file is written.
        arguments: What follows the file on the command line.
        num_processes: The ranks.
        options: More options of the launcher.
        variables: More environment variables.
        timeout: The seconds after which the test fails.
    """
    file = folder / "script.py"
    file.write_text(script)
    launcher = [sys.executable, "-m", "trainer_lib.commands.main", "launch"]
    launcher += ["--cpu", "--num_processes", str(num_processes), *options]
    paths = filter(None, [PYTHON_PATH, os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(variables or {})}
    return subprocess.run(
        [*launcher, str(file), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
