"""Files that are there completely or not at all, after a power failure too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.faults.injuries import files_limited_to
from tests.faults.trainings import one_run
from trainer_lib import Accelerator
from trainer_lib.checkpointing.format.layout import is_committed, partial_beside
from trainer_lib.filesystem.atomic_files import append_text, replace_file, sync


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


def test_a_new_file_that_the_disk_does_not_take_is_empty(tmp_path: Path) -> None:
    with files_limited_to(4), pytest.raises(OSError, match="File too large"):
        append_text(tmp_path / "lines", "a line that is longer\n")
    assert (tmp_path / "lines").read_bytes() == b""


def test_no_file_stays_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(3):
        sync(tmp_path)
        replace_file(tmp_path / "state", lambda path: path.write_text("complete"))
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_all_files_of_a_checkpoint_are_on_the_disk_before_it_is_there(
    flushed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(300, 1000)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rename = Path.rename

    def noting(path: Path, target: Path) -> Path:
        flushed.append("renamed")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", noting)
    accelerator.save_state(tmp_path / "state")
    partial = str(partial_beside(tmp_path / "state"))
    before = flushed[: flushed.index("renamed")]
    files = [path.name for path in (tmp_path / "state").iterdir()]
    assert sorted(path for path in before if path.startswith(f"{partial}/")) == sorted(
        f"{partial}/{name}" for name in files
    )
    assert before[-2:] == [f"{partial}/manifest.json", partial]
    assert flushed[-1] == str(tmp_path)


AT_EXIT = """
import atexit, os, sys, torch
from trainer_lib import Accelerator

fsync = os.fsync

def noting(descriptor):
    print(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
    fsync(descriptor)

os.fsync = noting
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(2, 2))
atexit.register(accelerator.save_state, sys.argv[1])
"""


@pytest.mark.launch
def test_a_program_may_save_while_it_ends(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT, str(folder)], capture_output=True, text=True, check=False, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert is_committed(folder)
    assert {path.name for path in folder.iterdir()} <= set(done.stdout.splitlines())  # they are on the disk


def test_new_folders_above_a_checkpoint_are_on_the_disk(flushed: list[str], tmp_path: Path) -> None:
    above = [tmp_path, tmp_path / "new", tmp_path / "new" / "states"]
    Accelerator(cpu=True).save_state(above[-1] / "one")
    assert set(map(str, above)) <= set(flushed)
    flushed.clear()
    one_run(tmp_path / "runs" / "mine", max_steps=2)
    (checkpoints,) = tmp_path.glob("runs/mine/*/checkpoints")
    assert set(map(str, [tmp_path, tmp_path / "runs", *checkpoints.parents[:2], checkpoints])) <= set(flushed)
