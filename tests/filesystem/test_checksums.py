"""Checksums of written files: of all bytes, in order, also at the end of a program."""

import errno
import fcntl
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_128_hexdigest

from trainer_lib.filesystem import direct_files
from trainer_lib.filesystem.checksums import ChecksummedFile, checksum_of

ROOT = Path(__file__).parents[2]
LATE = """
import sys, threading
from pathlib import Path
from trainer_lib.filesystem.checksums import ChecksummedFile

def write():
    threading.main_thread().join()
    with ChecksummedFile(Path(sys.argv[1])) as file:
        file.write(bytes(range(256)) * 8192)
    print(file.checksum)

threading.Thread(target=write).start()
"""


def test_pieces_large_and_small_are_hashed_in_their_order() -> None:
    pieces = [bytes(64 << 20), b"small", bytes([7]) * (3 << 20), b"", b"end"]
    with ChecksummedFile(Path("/dev/null")) as file:  # which takes them faster than they are hashed
        for piece in pieces:
            assert file.write(piece) == len(piece)
            assert file.checksum
    assert file.checksum == xxh3_128_hexdigest(b"".join(pieces))


@pytest.mark.parametrize("refuses", [False, True])
def test_whole_blocks_are_written_directly_and_the_end_through_the_cache(
    refuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_files, "_BLOCK", 8192)
    written: list[tuple[int, bool]] = []

    class Disk(io.FileIO):
        def write(self, data: Any) -> int:
            is_direct = bool(fcntl.fcntl(self, fcntl.F_GETFL) & os.O_DIRECT)
            if is_direct and refuses:
                raise OSError(errno.EINVAL, "Invalid argument")
            written.append((len(data), is_direct))
            return super().write(data)

    pieces = [os.urandom(size) for size in (8000, 400, 30000, 0, 1)]
    with direct_files.DirectFile(Disk(tmp_path / "file", "w")) as file:
        assert [file.write(piece) for piece in pieces] == [8000, 400, 30000, 0, 1]
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)
    assert [size for size, _ in written] == [8192] * 4 + [5633]
    assert {is_direct for _, is_direct in written[:-1]} <= {not refuses, False}  # some file systems have none
    assert not written[-1][1]


def test_what_is_written_while_the_interpreter_ends_has_its_checksum(tmp_path: Path) -> None:
    file = tmp_path / "late"
    done = subprocess.run(
        [sys.executable, "-c", LATE, str(file)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout.strip(), done.stderr) == (checksum_of(file), "")
    assert file.stat().st_size == 2 << 20
