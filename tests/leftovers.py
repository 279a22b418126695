"""A check at the end of a test session: no process, listening port, temporary file or shared memory is left behind.

Each session has a temporary folder of its own, and its processes carry its name in their environment, so that another
session on the same machine is not blamed on this one.
"""

import contextlib
import gc
import getpass
import os
import re
import shutil
import subprocess
import sys
import tempfile
from multiprocessing import resource_tracker, util
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.worlds import close_worlds

_ROOT = Path(__file__).parent.parent
_MEMORY = Path("/dev/shm")
_ROOM = 4 << 30  # bytes that have to be free there
_SESSION = "PYTEST_SESSION_FOLDER"  # in the environment of all processes of a session
_SHARED_MEMORY = re.compile(r"torch_(\d+)_")  # with the process that made it
# The folder of tmp_path, which pytest looks after; what this very process removes when it exits; and what ranks that a
# test kills cannot remove: the folders of multiprocessing and of wandb.
_EXPECTED = re.compile(r"pytest-of-|trainer_lib[-_]|pymp-|tmp\w+wandb-")
_HELPERS = "multiprocessing.resource_tracker"  # ends with its parent
_PATIENCE = 2.0  # seconds for processes that are ending


def watch_leftovers(config: pytest.Config, in_memory: bool) -> None:
    """Give the session a temporary folder, and fail it if something is left when it ends."""
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(_OfWorker(config))
    else:
        config.pluginmanager.register(_OfSession(_make_folder(in_memory)))


def _make_folder(in_memory: bool) -> Path:
    """Return a new folder, in memory where there is room: tests wait for the disk more than for anything else."""
    usable = in_memory and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ROOM
    usable = usable and not os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC
    compiled = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))  # where torch has it without us, for later sessions
    folder = Path(tempfile.mkdtemp(prefix="trainer_lib-tests-", dir=_MEMORY if usable else None))
    os.environ.update({"TMPDIR": str(folder), _SESSION: str(folder)})
    tempfile.tempdir = None  # look again
    return folder


class _OfWorker:
    """What a pytest worker leaves behind, reported while it still lives."""

    def __init__(self, config: pytest.Config) -> None:
        self._output: dict[str, Any] = config.workeroutput  # type: ignore[attr-defined]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        self._output["leftovers"] = _of_this_process()


class _OfSession:
    """What the session leaves behind, collected from its workers and looked for once they have ended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._untracked = _untracked()
        self._found: list[str] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._found += getattr(node, "workeroutput", {}).get("leftovers", [])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._found += [] if session.config.getoption("numprocesses", None) else _of_this_process()
        self._found += [f"process {pid}: {command}" for pid, command in _processes(self._folder)]
        self._found += [f"file {path}" for path in self._folder.iterdir() if not _EXPECTED.match(path.name)]
        self._found += [f"shared memory {name}" for name in _shared_memory()]
        self._found += [f"file in the repository: {path}" for path in sorted(_untracked() - self._untracked)]
        if self._found and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._found:
            terminalreporter.section("left behind by the tests", red=True)
            terminalreporter.write_line("\n".join(self._found))

    def pytest_unconfigure(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _stop_fork_server() -> None:
    """End the fork server of data workers and its tracker, which end with this process, and remove their folder."""
    if (module := sys.modules.get("multiprocessing.forkserver")) is not None:
        module._forkserver._stop()  # type: ignore[attr-defined]
        resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
        util._run_finalizers(-100)  # type: ignore[attr-defined]


def _of_this_process() -> list[str]:
    """Return the children and the listening ports of this process, once the worlds that wait for tests are closed."""
    close_worlds()
    _stop_fork_server()
    gc.unfreeze()
    gc.collect()  # a group of a test that is only referred to in a cycle
    gc.freeze()  # pytest collects several times more
    commands = [(child.pid, " ".join(_command(child))) for child in psutil.Process().children()]
    children = [f"child process {pid}: {command}" for pid, command in commands if _HELPERS not in command]
    connections = psutil.Process().net_connections()
    return children + [
        f"port {connection.laddr.port}" for connection in connections if connection.status == psutil.CONN_LISTEN
    ]


def _processes(folder: Path) -> list[tuple[int, str]]:
    """Return other processes of the session, by its name in their environment; those that are ending may end."""
    children = [process for process in psutil.process_iter() if process.pid != os.getpid() and _is_of(process, folder)]
    _, alive = psutil.wait_procs(children, timeout=_PATIENCE)
    return [(process.pid, " ".join(_command(process))) for process in alive]


def _is_of(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.environ().get(_SESSION) == str(folder)
    except psutil.Error:  # it has ended, or is someone else's
        return False


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return ["(ended)"]


def _shared_memory() -> list[str]:
    """Return the shared memory of processes that are gone.

    Files without content do not count: torch leaves one where a process is killed between making and unlinking it.
    """
    files = list(_MEMORY.iterdir()) if _MEMORY.is_dir() else []
    made = [(file, match) for file in files if (match := _SHARED_MEMORY.match(file.name))]
    ownerless = [file for file, match in made if not psutil.pid_exists(int(match[1]))]
    for file in ownerless:
        with contextlib.suppress(OSError):
            if not file.stat().st_size:
                file.unlink()
    return [file.name for file in ownerless if file.exists()]


def _untracked() -> set[str]:
    """Return the files of the repository that git neither tracks nor ignores."""
    command = ["git", "-C", str(_ROOT), "ls-files", "--others", "--exclude-standard"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return set(done.stdout.splitlines())
