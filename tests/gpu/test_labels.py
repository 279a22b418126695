"""Labels on a GPU are counted without waiting for it; losses and metrics are those of the CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from tests.gpu.training import ForbidsWaiting
from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import forget_world
from trainer_lib.events import Callback, Run

pytestmark = pytest.mark.gpu

STEPS = 8


def some_ignored(count: int) -> tuple[Tensor, Tensor]:
    inputs, targets = points(count)
    return inputs, targets.masked_fill(torch.arange(count) % 3 == 0, -100)


def losses(use_cpu: bool, **options: Any) -> list[float]:
    """Return the loss of each step; on a GPU no step waits for it."""
    callback = ForbidsWaiting()
    args = arguments(use_cpu=use_cpu, max_steps=STEPS, log_every=1, shuffle=False, learning_rate=1e-2)
    try:
        fit = trainer(args, callbacks=[] if use_cpu else [callback], **options)
        history = fit.fit().history
    finally:
        torch.cuda.set_sync_debug_mode("default")
    fit.accelerator.free_memory()
    forget_world()  # the next fit may be on another device
    assert use_cpu or callback.steps == 5
    return [entry["loss"] for entry in history if "loss" in entry]


def test_ignored_labels_do_not_count() -> None:
    data = some_ignored(8 * STEPS)
    assert losses(False, train_dataset=data) == pytest.approx(losses(True, train_dataset=data), rel=1e-5)


def test_weights_of_classes_count_labels_without_waiting() -> None:
    data = some_ignored(8 * STEPS)
    found = [
        losses(on_cpu, train_dataset=data, loss_fn=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0])))
        for on_cpu in (False, True)
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_model_of_transformers_waits_for_nothing() -> None:
    """The number of items that its loss is divided by is on its device already."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    tokens = torch.randint(16, (8 * STEPS, 6), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row.masked_fill(row < 3, -100)} for row in tokens]
    found: list[list[float]] = []
    for on_cpu in (False, True):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        found.append(losses(on_cpu, model=model, train_dataset=rows, loss_fn=None))
    assert found[0] == pytest.approx(found[1], rel=1e-4)


class CountsKernels(Callback):
    """Counts what a step launches, from the third step to the last but one."""

    def __init__(self) -> None:
        self.profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def on_step_begin(self, run: Run) -> None:
        if run.state.step == 2:
            self.profile.__enter__()

    def on_step_end(self, run: Run) -> None:
        if run.state.step == STEPS - 1:
            self.profile.__exit__(None, None, None)


def launches(recorded: Any) -> float:
    return sum(e.count for e in recorded.key_averages() if e.key.startswith("cudaLaunchKernel")) / (STEPS - 3)


def by_hand() -> float:
    model = network().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    inputs, targets = points(8 * STEPS)
    total = torch.zeros((), device="cuda")
    recorded = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    for step in range(STEPS):
        if step == 2:
            recorded.__enter__()
        rows = slice(8 * step, 8 * step + 8)
        loss = nn.functional.cross_entropy(model(inputs[rows].cuda()), targets[rows].cuda())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
        if step == STEPS - 2:
            recorded.__exit__(None, None, None)
    return launches(recorded)


def test_a_step_launches_few_kernels_beyond_those_of_a_loop_by_hand() -> None:
    """Four watch over NaN and Inf. Counted on the GPU, labels would take a dozen more."""
    counts = CountsKernels()
    args = arguments(use_cpu=False, max_steps=STEPS, log_every="never", shuffle=False, max_grad_norm=1.0)
    trainer(args, train_dataset=points(8 * STEPS), callbacks=[counts]).fit()
    assert launches(counts.profile) <= by_hand() + 5


def test_metrics_are_those_of_the_cpu() -> None:
    data = some_ignored(90)
    found: list[dict[str, float]] = []
    for on_cpu in (False, True):
        args = arguments(use_cpu=on_cpu, per_device_eval_batch_size=16)
        fit = trainer(args, metrics=["accuracy", "f1", "top1_accuracy", "perplexity"])
        found.append(fit.evaluate(data))
        fit.accelerator.free_memory()
        forget_world()
    numbers = [{name: value for name, value in each.items() if "second" not in name} for each in found]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)
