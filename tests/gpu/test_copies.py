"""Copies between host and GPU: from pinned memory, without waiting, and on streams of their own for saves."""

import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.gpu.training import ROWS, ForbidsWaiting, data, network
from tests.trainer.tasks import arguments, points, trainer
from tests.trainer.tasks import network as small_network
from trainer_lib import Accelerator
from trainer_lib.checkpointing.format.snapshot import Snapshots
from trainer_lib.events import Callback, Run
from trainer_lib.options.data_options import DataLoaderConfiguration
from trainer_lib.tensor_files.file_contents import Tensors

pytestmark = pytest.mark.gpu


@pytest.fixture
def syncs_are_errors() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_batches_are_copied_from_pinned_memory() -> None:
    config = DataLoaderConfiguration(non_blocking=True)
    loader = Accelerator(dataloader_config=config).prepare(DataLoader(data(), batch_size=ROWS, pin_memory=True))
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for inputs, targets in loader:
            assert inputs.is_cuda
            assert targets.is_cuda
        torch.cuda.synchronize()
    copies = {event.key for event in profile.key_averages() if "Memcpy HtoD" in event.key}
    assert copies == {"Memcpy HtoD (Pinned -> Device)"}


def test_a_loop_of_your_own_waits_for_nothing(request: pytest.FixtureRequest) -> None:
    """Batches, forward, backward, clipping and a fused update are only queued."""
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(non_blocking=True), gradient_accumulation_steps=2
    )
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loader = DataLoader(data(), batch_size=ROWS, pin_memory=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    total = torch.zeros((), device=accelerator.device)
    for step, (inputs, targets) in enumerate(loader):
        if step == 2:  # after all states were made
            request.getfixturevalue("syncs_are_errors")
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        total += loss.detach()
    torch.cuda.set_sync_debug_mode("default")
    assert total.isfinite()


def test_a_trainer_waits_for_nothing_between_logs() -> None:
    callback = ForbidsWaiting()
    args = arguments(use_cpu=False, max_steps=8, log_every="never", gradient_accumulation_steps=2, pin_memory=True)
    try:
        trainer(args, train_dataset=points(160), callbacks=[callback]).fit()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert callback.steps == 5


def test_a_snapshot_holds_the_values_of_its_moment() -> None:
    """It is copied on a stream of its own, after the kernels before it and before those after it."""
    tensor = torch.zeros(64 << 20, device="cuda")
    snapshots = Snapshots()
    for value in (1.0, 2.0):
        for _ in range(50):
            tensor.mul_(0.5).add_(value)  # still running when the copy is queued
        expected = value * 2
        tensor.fill_(expected)
        copied: Any = snapshots.take({"model": Tensors({"weight": tensor})})["model"]
        tensor.fill_(-1.0)
        weight: Tensor = copied.tensors["weight"]
        assert weight.is_pinned()
        assert bool((weight == expected).all())


def test_the_host_waits_for_no_copy_that_overlaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are queued; what is launched after `wait` runs after them, and the thread that saves waits."""
    tensor = torch.zeros(256 << 20, device="cuda")
    snapshots = Snapshots()
    snapshots.allocate([tensor])
    torch.cuda.synchronize()
    tensor.fill_(1.0)
    waiting: list[threading.Thread] = []
    # Not "error": the mode holds for the thread that saves, too.
    torch.cuda.set_sync_debug_mode("warn")
    warnings.simplefilter("always")
    monkeypatch.setattr(warnings, "showwarning", lambda *_, **__: waiting.append(threading.current_thread()))
    try:
        copied: Any = snapshots.take({"model": Tensors({"weight": tensor})}, {tensor.data_ptr()})["model"]
        copies = snapshots.copies
        assert copies is not None
        saving = threading.Thread(target=lambda: results.append(copies.run()))
        results: list[bool] = []
        saving.start()
        copies.wait()
        tensor.fill_(-1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    saving.join()
    assert threading.main_thread() not in waiting
    assert results == [True]
    assert bool((copied.tensors["weight"] == 1.0).all())
    torch.cuda.synchronize()
    assert bool((tensor == -1.0).all())


class Watches(Callback):
    """Keeps the weights after each step."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, Tensor]] = {}

    def on_step_end(self, run: Run) -> None:
        self.weights[run.state.step] = {
            name: value.cpu().clone() for name, value in run.modules[""].state_dict().items()
        }


def test_saves_in_the_background_hold_the_weights_of_their_step(tmp_path: Path) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_network()
            self.large = nn.Parameter(torch.zeros(16 << 20))

        def forward(self, inputs: Tensor) -> Tensor:
            return self.inner(inputs) + self.large.mean()

    watches = Watches()
    args = arguments(use_cpu=False, max_steps=6, save_every=2, keep_last=None, output_dir=tmp_path)
    trainer(args, model=Wide(), callbacks=[watches]).fit()
    files = sorted(tmp_path.glob("*/checkpoints/*/model.safetensors"))
    assert len(files) == 3
    for step, file in zip((2, 4, 6), files, strict=True):
        saved = load_file(file)
        for name, value in watches.weights[step].items():
            assert torch.equal(saved[name], value), (step, name)
