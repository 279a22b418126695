"""Fixtures of the fault tests: the number of trials, the ledger of outcomes, and small disks."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

for module in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"):
    import_module(module)  # here, so that not each forked process imports it

Trials = Callable[[int, int], int]


@pytest.fixture(scope="session")
def trials(request: pytest.FixtureRequest) -> Trials:
    """Return what chooses between the number of trials of each day and that of a long run."""
    is_long = bool(request.config.getoption("--soak"))
    return lambda few, many: many if is_long else few


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let what is in this folder be chosen together with the tests of faults that are elsewhere."""
    folder = Path(__file__).parent
    for item in items:
        if folder in item.path.parents:
            item.add_marker("fault")


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """Return a folder in memory, which is on another file system than folders on a disk are."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        pytest.skip("there is no /dev/shm to write to")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


class SmallDisk:
    """A file system of its own, which can be filled up.

    Args:
        folder: Where it is mounted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self, leave: int = 0) -> None:
        """Take all of it but so many bytes."""
        self.empty()
        size = shutil.disk_usage(self.folder).free - leave
        self._ballast.write_bytes(bytes(size))

    def empty(self) -> None:
        """Give back what was taken."""
        self._ballast.unlink(missing_ok=True)

    def make_read_only(self) -> None:
        """Let nobody write to it any more."""
        subprocess.run(["mount", "-o", "remount,ro", str(self.folder)], check=True, timeout=30)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """Return a disk of 4 MB, where this process may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False, timeout=30)
        reason = done.stderr.strip()
    except OSError as error:
        reason = str(error)
    if not os.path.ismount(folder):
        pytest.skip(f"no file system can be mounted here: {reason}")
    yield SmallDisk(folder)
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=30)
