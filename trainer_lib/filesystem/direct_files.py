"""Files whose large writes bypass the page cache, where the file system allows it.

To write 1 GB into new pages of the cache takes more than a second of CPU time, which training beside a background save
needs. Where nothing runs beside a save, the cache is faster.
"""

import errno
import fcntl
import mmap
import os
from types import TracebackType
from typing import Any

import numpy as np

_BLOCK = 16 << 20  # bytes that are written at a time: a multiple of every disk's sector


class DirectFile:
    """A file that is written sequentially: whole blocks directly to the disk, and its end through the cache.

    Args:
        file: The open file, without a buffer of its own.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._memory = mmap.mmap(-1, _BLOCK)  # aligned to a page, as direct writes need it
        self._block = np.frombuffer(self._memory, np.uint8)
        self._filled = 0
        self._direct_flag = os.O_DIRECT  # 0: the file system refused
        self._is_direct = False

    def write(self, data: Any) -> int:
        """Write bytes, some of them later."""
        source = np.frombuffer(data, np.uint8)
        size = len(source)
        while len(source):
            part = source[: _BLOCK - self._filled]
            np.copyto(self._block[self._filled : self._filled + len(part)], part)  # releases the GIL
            self._filled += len(part)
            source = source[len(part) :]
            if self._filled == _BLOCK:
                self._write_block()
        return size

    def flush(self) -> None:
        """Write all bytes; what follows is no longer aligned, and goes through the cache."""
        if self._filled:
            self._direct_flag = 0
            self._write_block()

    def __enter__(self) -> "DirectFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.flush()
        finally:
            self._file.close()

    def _write_block(self) -> None:
        self._switch(on=bool(self._direct_flag))
        rest = memoryview(self._memory)[: self._filled]
        while len(rest):
            try:
                rest = rest[self._file.write(rest) :]
            except OSError as error:
                if not (self._is_direct and error.errno == errno.EINVAL):
                    raise
                self._direct_flag = 0  # the file system takes the flag, and not the write
            if len(rest):
                self._switch(on=False)  # after a part of a block, the rest is not aligned
        self._filled = 0

    def _switch(self, on: bool) -> None:
        if on == self._is_direct:
            return
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
            self._is_direct = on
        except OSError:
            self._direct_flag = 0
