"""The faults: damage to files, failing disks, and kills during a save."""

import contextlib
import os
import random
import resource
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

# -- what can happen to a file ---------------------------------------------------------------------------------------


def spoil(path: Path) -> None:
    """Change the last byte."""
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")


def _flip(path: Path, chance: random.Random, others: list[Path]) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def _overwrite(path: Path, chance: random.Random, others: list[Path]) -> None:
    content = bytearray(path.read_bytes())
    at = chance.randrange(len(content))
    content[at] = (content[at] + chance.randrange(1, 256)) % 256
    path.write_bytes(content)


def _truncate(path: Path, chance: random.Random, others: list[Path]) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def _delete(path: Path, chance: random.Random, others: list[Path]) -> None:
    path.unlink()


def _append(path: Path, chance: random.Random, others: list[Path]) -> None:
    with path.open("ab") as file:
        file.write(chance.choice([b"\0", b"\n", b" ", chance.randbytes(30)]))


def _swap(path: Path, chance: random.Random, others: list[Path]) -> None:
    before = path.read_bytes()
    other = chance.choice([other for other in others if other.read_bytes() != before])
    path.write_bytes(other.read_bytes())
    other.write_bytes(before)


def _zero(path: Path, chance: random.Random, others: list[Path]) -> None:
    path.write_bytes(bytes(path.stat().st_size))


_DAMAGE = {
    "bits flipped": _flip,
    "bytes overwritten": _overwrite,
    "files cut short": _truncate,
    "files deleted": _delete,
    "bytes appended": _append,
    "files swapped": _swap,
    "files of zeros": _zero,
}
_KINDS = ["bits flipped"] * 3 + list(_DAMAGE)[1:]


def damages(folder: Path, count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Damage a state time and again, each time whole before; yield what was done, and to which file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    content = {path: path.read_bytes() for path in files}
    chance = random.Random(seed)
    for _ in range(count):
        path, kind = chance.choice(files), chance.choice(_KINDS)
        _DAMAGE[kind](path, chance, files)
        yield kind, path.relative_to(folder).as_posix()
        for file in files:
            if not file.exists() or file.read_bytes() != content[file]:
                file.write_bytes(content[file])


# -- disks -----------------------------------------------------------------------------------------------------------


def full_disk(project: Path) -> None:
    """Have files of this process grow no further than this."""
    # (The signal that comes with it is one that Python ignores.)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, resource.RLIM_INFINITY))


def unlimited() -> None:
    """Let them grow again."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@contextlib.contextmanager
def files_limited_to(size: int) -> Generator[None]:
    """Let no file of this process grow beyond so many bytes, as on a disk that is full for a while."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def failing_disk(project: Path) -> None:
    """Have the disk fail this process."""

    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    os.fsync = fail  # type: ignore[assignment]


# -- kills inside a save ---------------------------------------------------------------------------------------------

# What changes the disk or waits for it. Between two of these nothing changes there, but for bytes of files that are
# not part of a state yet.
STEPS = ("fsync", "mkdir", "rename", "rmdir", "unlink", "link", "replace")


def killed_after(steps: int) -> list[str]:
    """Have this process killed at its `steps`-th step from now, and return the names of those it has made."""
    made: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def step(*arguments: Any, **options: Any) -> Any:
            if len(made) == steps:
                os.kill(os.getpid(), signal.SIGKILL)
            made.append(name)
            return real(*arguments, **options)

        return step

    for name in STEPS:
        setattr(os, name, counted(name))
    return made


def killed(save: Callable[[], Any], steps: int) -> None:
    """Run a save in a fork that is killed at one of its steps."""
    child = os.fork()
    if child == 0:
        try:
            killed_after(steps)
            save()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def steps_of(save: Callable[[], Any]) -> list[str]:
    """Return the steps of a whole save."""
    with pytest.MonkeyPatch.context() as patch:
        for name in STEPS:
            patch.setattr(os, name, getattr(os, name))  # to be undone
        made = killed_after(10**6)
        save()
    return made


def to_try(steps: list[str]) -> list[int]:
    """Return the steps to be killed at: all but those that come between two of the same kind."""
    ends = {0, len(steps) - 1}
    same = {at for at in range(1, len(steps) - 1) if steps[at - 1] == steps[at] == steps[at + 1]}
    return sorted((set(range(len(steps))) - same) | ends)
