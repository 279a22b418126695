"""Tests of CUDA memory snapshots: when and where they are written. Calls that need a GPU are checked by signature."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.callbacks.loops import folder_of
from tests.trainer.tasks import arguments, network, trainer
from trainer_lib.callbacks import MemorySnapshot, memory_snapshot
from trainer_lib.foundation.errors import ConfigurationError, NoExecutableBatchSizeError


class RunsOut(nn.Module):
    """Has memory for so many rows, from some forward on."""

    def __init__(self, rows: int, after: int = 2) -> None:
        super().__init__()
        self.inner, self.rows, self.left = network(), rows, after

    def forward(self, inputs: Tensor) -> Any:
        self.left -= 1
        if self.left < 0 and len(inputs) > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.inner(inputs)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stand in for what needs a GPU, and note what is asked of it."""
    made: list[Any] = []
    record = inspect.signature(inspect.unwrap(torch.cuda.memory._record_memory_history))
    dump = inspect.signature(torch.cuda.memory._dump_snapshot)

    def recorded(**options: Any) -> None:
        record.bind(**options)
        made.append(options)

    def dumped(path: str) -> None:
        dump.bind(path)
        Path(path).write_text("snapshot")

    monkeypatch.setattr(memory_snapshot, "_is_on_cuda", lambda run: True)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", recorded)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dumped)
    return made


def written(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder_of(folder) / "memory").glob("*"))


RECORDING = [{"max_entries": 50, "stacks": "python"}, {"enabled": None}]


def test_a_run_out_of_memory_leaves_a_snapshot_and_says_where(calls: list[Any], tmp_path: Path) -> None:
    model_trainer = trainer(
        arguments(output_dir=tmp_path), model=RunsOut(4), callbacks=[MemorySnapshot(max_entries=50)]
    )
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model_trainer.fit()
    assert written(tmp_path) == ["process-0-step-3-out-of-memory.pickle"]
    path = folder_of(tmp_path) / "memory" / "process-0-step-3-out-of-memory.pickle"
    assert f"A snapshot of the memory is in {path}" in caught.value.__notes__[-1]
    assert calls == RECORDING, "what was begun is ended"


def test_a_split_batch_and_an_unsplittable_one_leave_a_snapshot(calls: list[Any], tmp_path: Path) -> None:
    options = arguments(output_dir=tmp_path / "split", per_device_train_batch_size="auto", global_batch_size=8)
    trainer(options, model=RunsOut(4), callbacks=[MemorySnapshot()]).fit()
    assert written(tmp_path / "split") == ["process-0-step-3-out-of-memory.pickle"]
    options = arguments(output_dir=tmp_path / "not", per_device_train_batch_size="auto", global_batch_size=8)
    with pytest.raises(NoExecutableBatchSizeError) as caught:
        trainer(options, model=RunsOut(0), callbacks=[MemorySnapshot()]).fit()
    assert "A snapshot of the memory is in" in caught.value.__notes__[-1]
    assert len(calls) == 4


def test_a_chosen_step_leaves_a_snapshot_and_other_errors_do_not(calls: list[Any], tmp_path: Path) -> None:
    class Breaks(RunsOut):
        def forward(self, inputs: Tensor) -> Any:
            self.left -= 1
            if self.left < 0:
                raise ArithmeticError
            return self.inner(inputs)

    callbacks = [MemorySnapshot(step=2, folder=tmp_path / "own")]
    with pytest.raises(ArithmeticError):
        trainer(arguments(output_dir=tmp_path / "runs"), model=Breaks(0, after=4), callbacks=callbacks).fit()
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["process-0-step-2.pickle"]
    assert '"memory_snapshot"' in (folder_of(tmp_path / "runs") / "history.jsonl").read_text()
    assert len(calls) == 2


def test_without_a_cuda_device_it_warns_and_writes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        trainer(arguments(output_dir=tmp_path), model=RunsOut(4), callbacks=[MemorySnapshot(step=1)]).fit()
    messages = [line for line in caplog.messages if "MemorySnapshot" in line]
    assert messages == ["MemorySnapshot records the memory of CUDA devices, and this run is on cpu: it writes nothing."]
    assert written(tmp_path) == []


@pytest.mark.parametrize("wrong", [{"step": 0}, {"step": True}, {"max_entries": None}, {"max_entries": 1.5}])
def test_bad_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigurationError, match=r"^MemorySnapshot\((step|max_entries)\) must be a whole number of at least 1 \(got "
    ):
        MemorySnapshot(**wrong)
    with pytest.raises(ConfigurationError, match="MemorySnapshot has no folder for its files"):
        trainer(callbacks=[MemorySnapshot()]).fit()
