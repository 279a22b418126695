"""Checksums of written files: of all bytes, in order, also at the end of a program."""

import subprocess
import sys
from pathlib import Path

from xxhash import xxh3_128_hexdigest

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


def test_what_is_written_while_the_interpreter_ends_has_its_checksum(tmp_path: Path) -> None:
    file = tmp_path / "late"
    done = subprocess.run(
        [sys.executable, "-c", LATE, str(file)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout.strip(), done.stderr) == (checksum_of(file), "")
    assert file.stat().st_size == 2 << 20
