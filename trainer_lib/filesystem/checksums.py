"""Checksums of files, computed while they are written or by reading them; `xxhsum -H2` prints the same."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

# xxh3 is as fast as memory; the checksums of the standard library take longer than the writing.
from xxhash import xxh3_128, xxh3_128_hexdigest

from trainer_lib.filesystem.remote_paths import AnyPath

_BLOCK = 1 << 20  # small enough to be in the cache when it is hashed
_MOST_AT_ONCE = 8
_LARGE = 1 << 20  # bytes from which another thread pays off

_One = TypeVar("_One")
_Result = TypeVar("_Result")


class ChecksummedFile:
    """A file that is written sequentially, and its checksum.

    Args:
        path: The file.
        bypasses_cache: Whether to write past the page cache, where the system allows it.
    """

    def __init__(self, path: AnyPath, bypasses_cache: bool = False) -> None:
        self._file: Any = _opened_directly(path) if bypasses_cache else path.open("wb")
        self._hash = xxh3_128()
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="checksum")
        self._failure: OSError | None = None

    @property
    def checksum(self) -> str:
        """The checksum of the bytes written so far."""
        return self._hash.hexdigest()

    def write(self, data: Any) -> int:
        """Write bytes, and hash them at the same time."""
        hashing = self._hashing(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self._failure = error
            raise
        finally:
            if hashing is not None:
                hashing.result()

    def flush(self) -> None:
        """Flush the bytes written so far to the system."""
        self._file.flush()

    def __enter__(self) -> "ChecksummedFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._beside.shutdown()
        self._file.__exit__(kind, error, trace)
        if isinstance(error, RuntimeError) and self._failure is not None:
            raise self._failure  # torch's writer hides it behind an error of its own

    def _hashing(self, data: Any) -> "Future[None] | None":
        if len(data) >= _LARGE:
            try:
                return self._beside.submit(self._hash.update, data)
            except RuntimeError:  # the interpreter is ending while a background save is still writing
                pass
        self._hash.update(data)
        return None


def _opened_directly(path: AnyPath) -> Any:
    if not isinstance(path, Path) or not hasattr(os, "O_DIRECT"):
        return path.open("wb")
    from trainer_lib.filesystem.direct_files import DirectFile

    return DirectFile(path.open("wb", buffering=0))


def checksum_of_bytes(data: bytes) -> str:
    """Return the checksum of bytes."""
    return xxh3_128_hexdigest(data)


def checksum_of(path: AnyPath) -> str:
    """Read a file and return its checksum.

    It is not memory-mapped: a failing disk would then kill the process (SIGBUS), where reading raises an error.
    """
    checksum = xxh3_128()
    block = bytearray(min(_BLOCK, max(path.stat().st_size, 1)))
    view = memoryview(block)
    file: Any
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            checksum.update(view[:count])
    return checksum.hexdigest()


def for_each_file(work: Callable[[_One], _Result], paths: Iterable[_One]) -> list[_Result]:
    """Return the results of `work` for each file, several in parallel: reading and hashing release the GIL."""
    paths = list(paths)
    at_once = min(len(paths), len(os.sched_getaffinity(0)), _MOST_AT_ONCE)
    if at_once < 2:
        return [work(path) for path in paths]
    with ThreadPoolExecutor(at_once, thread_name_prefix="checksums") as pool:
        return list(pool.map(work, paths))
