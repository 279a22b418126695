"""Memory of a GPU: batches that do not fit, snapshots of the allocator, expandable segments, counters."""

import contextlib
import pickle
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.gpu.ranks import run_on_gpus
from tests.gpu.training import train
from tests.trainer.tasks import arguments, points, trainer
from trainer_lib.callbacks import MemorySnapshot
from trainer_lib.events import Callback, Run
from trainer_lib.memory import PeakMemory, clear_device_cache, find_executable_batch_size, get_max_memory

pytestmark = pytest.mark.gpu

WIDTH = 1 << 19  # 64 rows of activations take 128 MiB
BUDGET = 480 << 20  # about what 32 rows need


class Wide(nn.Module):
    """Has large activations and small weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(inputs)))


@contextlib.contextmanager
def limited_memory(extra: int) -> Generator[None]:
    """Let this process allocate so many bytes more than it has now."""
    clear_device_cache(garbage_collection=True)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + extra) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


class Sizes(Callback):
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def on_batch_size_reduced(self, run: Run, batch_size: int) -> None:
        del run
        self.sizes.append(batch_size)


def fitted(**options: Any) -> tuple[list[float], list[int]]:
    sizes = Sizes()
    args = arguments(use_cpu=False, max_steps=3, log_every=1, learning_rate=1e-3, **options)
    fit = trainer(args, model=Wide(), train_dataset=points(192), callbacks=[sizes])
    history = fit.fit().history
    fit.accelerator.free_memory()
    return [entry["loss"] for entry in history if "loss" in entry], sizes.sizes


def test_a_batch_that_does_not_fit_is_computed_in_parts_with_the_same_numbers() -> None:
    expected, _ = fitted(per_device_train_batch_size=64)
    with limited_memory(BUDGET):
        actual, sizes = fitted(per_device_train_batch_size="auto")
    assert sizes
    assert actual == pytest.approx(expected, rel=1e-4)


class Scores(nn.Module):
    """Has outputs that are large beside all else, as those of a language model with a large vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 1 << 16)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.last(torch.tanh(self.first(inputs)))
        return {"loss": cross_entropy(scores, labels), "scores": scores}


class PeakOfSteps(Callback):
    """The most that tensors take in steps after the first two."""

    peak = 0

    def on_step_begin(self, run: Run) -> None:
        if run.state.step == 2:
            torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, run: Run) -> None:
        if run.state.step == 5:
            self.peak = torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_fit_takes_the_memory_of_a_loop_by_hand(precision: str) -> None:
    inputs, labels = points(256)
    rows = [{"inputs": row, "labels": label} for row, label in zip(inputs, labels, strict=True)]
    clear_device_cache(garbage_collection=True)
    before = torch.cuda.memory_allocated()
    callback = PeakOfSteps()
    args = arguments(use_cpu=False, max_steps=6, per_device_train_batch_size=256, mixed_precision=precision)
    fit = trainer(args, model=Scores(), train_dataset=rows, loss_fn=None, callbacks=[callback])
    fit.fit()
    taken = callback.peak - before
    fit.accelerator.free_memory()
    del fit
    clear_device_cache(garbage_collection=True)

    before = torch.cuda.memory_allocated()
    model = Scores().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs, labels = inputs.cuda(), labels.cuda()
    for step in range(4):
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            loss = model(inputs, labels)["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert taken <= 1.01 * (torch.cuda.max_memory_allocated() - before)


def test_an_out_of_memory_error_leaves_a_snapshot_with_the_lines_that_allocated(tmp_path: Path) -> None:
    args = arguments(use_cpu=False, max_steps=3, output_dir=tmp_path, per_device_train_batch_size=64)
    fit = trainer(args, model=Wide(), train_dataset=points(192), callbacks=[MemorySnapshot()])
    with limited_memory(BUDGET), pytest.raises(torch.OutOfMemoryError) as caught:
        fit.fit()
    (path,) = tmp_path.glob("*/memory/process-0-step-*-out-of-memory.pickle")
    assert any(str(path) in note for note in caught.value.__notes__)
    snapshot: Any = pickle.loads(path.read_bytes())
    entries: list[Any] = [entry for trace in snapshot["device_traces"] for entry in trace]
    assert "oom" in {entry["action"] for entry in entries}
    files = {frame["filename"] for entry in entries for frame in entry.get("frames", ())}
    assert any(file.endswith("test_memory.py") for file in files)


def test_a_batch_size_that_fits_is_found() -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=64)
    def allocate(batch_size: int) -> int:
        tried.append(batch_size)
        return torch.zeros(batch_size << 20, dtype=torch.uint8, device="cuda").numel()

    with limited_memory(24 << 20):
        assert allocate() <= 24 << 20  # pyright: ignore[reportCallIssue]
    assert len(tried) > 1


def test_memory_is_counted_and_released() -> None:
    with PeakMemory() as peak:
        tensor = torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")
        del tensor
    assert peak.use.device_growth >= 128 << 20
    reserved = torch.cuda.memory_reserved()
    clear_device_cache(garbage_collection=True)
    assert torch.cuda.memory_reserved() <= reserved - (128 << 20)
    free, _ = torch.cuda.mem_get_info(0)
    assert get_max_memory()[0] == pytest.approx(free, rel=0.1)


def _expandable() -> tuple[list[float], set[bool]]:
    report = train()
    tensor = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    segments: Any = torch.cuda.memory_snapshot()
    kinds = {segment["is_expandable"] for segment in segments if segment["total_size"] >= tensor.nbytes}
    return report.losses, kinds


@pytest.mark.parametrize("is_on", [False, True])
def test_segments_of_memory_can_be_expandable(is_on: bool, tmp_path: Path) -> None:
    variables = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if is_on else {}
    ((losses, kinds),) = run_on_gpus(_expandable, tmp_path, variables=variables)
    assert kinds == {is_on}
    assert losses == pytest.approx(train().losses, rel=1e-6)
