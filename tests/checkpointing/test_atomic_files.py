"""Files that are there completely or not at all, after a power failure too."""

import os
from pathlib import Path

import pytest

from trainer_lib.filesystem.atomic_files import replace_file


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note, beside each `fsync`, the path it is for."""
    paths: list[str] = []
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    return paths


def test_bytes_are_on_the_disk_before_the_name_and_the_name_before_the_end(flushed: list[str], tmp_path: Path) -> None:
    replace_file(tmp_path / "state", lambda path: path.write_text("complete"))
    assert flushed == [str(tmp_path / ".state.partial"), str(tmp_path)]
    assert (tmp_path / "state").read_text() == "complete"


def test_what_was_there_stays_if_writing_fails(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("before")

    def fails(path: Path) -> None:
        path.write_text("half")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        replace_file(tmp_path / "state", fails)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert (tmp_path / "state").read_text() == "before"
