"""Verified loads read each file once: tensors are hashed while they are read."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from tests.faults.trainings import digest, train, trained
from tests.trainer.tasks import arguments, points, trainer
from trainer_lib import CheckpointError
from trainer_lib.checkpointing.load import local_files


class Reads:
    """Counts the bytes that are read into tensors, and the files that are hashed by themselves."""

    def __init__(self) -> None:
        self.bytes, self.hashed = 0, list[str]()
        self.preadv, self.checksum_of = os.preadv, local_files.checksum_of

    def read(self, *arguments: Any) -> int:
        count = self.preadv(*arguments)
        self.bytes += count
        return count

    def hash(self, path: Path) -> str:
        self.hashed.append(path.name)
        return self.checksum_of(path)

    def check(self, folder: Path, times: int = 1) -> None:
        files = list(folder.glob("*.safetensors"))
        with_headers = sum(file.stat().st_size for file in files)
        headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in files)
        assert self.bytes == with_headers - headers
        hashed = [name for name in self.hashed if name.endswith(".safetensors")]
        assert sorted(hashed) == (sorted(file.name for file in files) if times == 2 else [])


@pytest.fixture
def reads() -> Iterator[Reads]:
    counted = Reads()
    with mock.patch.object(os, "preadv", counted.read), mock.patch.object(local_files, "checksum_of", counted.hash):
        yield counted


@pytest.mark.parametrize("is_memory_short", [False, True])
def test_a_load_reads_each_tensor_once_if_memory_allows_it(
    is_memory_short: bool, tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, model, optimizer = trained(tmp_path)
    folder = Path(accelerator.save_state(tmp_path / "state"))
    saved = digest(accelerator)
    train(accelerator, model, optimizer)
    if is_memory_short:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: mock.Mock(available=1000))
    accelerator.load_state(folder)
    assert digest(accelerator) == saved
    reads.check(folder, times=2 if is_memory_short else 1)


def test_a_resume_reads_each_tensor_once(tmp_path: Path, reads: Reads) -> None:
    args = arguments(output_dir=tmp_path, max_steps=2, save_every=1)
    trainer(args, train_dataset=points(32)).fit()
    (folder,) = tmp_path.glob("*/checkpoints/checkpoint-00000001")
    resumed = trainer(args, train_dataset=points(32))
    resumed.fit(resume=str(folder))
    assert resumed.state.step == 2
    reads.check(folder)


def test_tensors_of_a_checkpoint_that_is_not_loaded_are_dropped(tmp_path: Path) -> None:
    args = arguments(output_dir=tmp_path, max_steps=2, save_every=1)
    trainer(args, train_dataset=points(32)).fit()
    (folder,) = tmp_path.glob("*/checkpoints/checkpoint-00000001")
    failing = trainer(args, train_dataset=points(32))
    with (
        mock.patch.object(failing.accelerator, "load_state", side_effect=CheckpointError("no")),
        pytest.raises(CheckpointError),
    ):
        failing.fit(resume=str(folder))
    assert not local_files._checked
