"""Training in pipelines, and its comparison with one process."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.functional import cross_entropy

from tests.strategies.split import LENGTH, VOCABULARY, model_of
from tests.worlds import run_world
from trainer_lib import Accelerator, ParallelismConfig
from trainer_lib.accelerator.weighted_backward import WeightedLoss
from trainer_lib.state import PartialState
from trainer_lib.utils import TorchPipelineParallelConfig


def window_batches(step: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return micro-batches with unlike numbers of ignored targets, in every third step one of them shorter."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randint(VOCABULARY - 1, (count, 2, LENGTH), generator=generator)
    targets = inputs.roll(1)
    targets[torch.rand(targets.shape, generator=generator) < 0.3] = -100
    batches = list(zip(inputs, targets, strict=True))
    if step % 3 == 2:
        batches[-1] = (batches[-1][0][:1], batches[-1][1][:1])
    return batches


def train_windows(
    kind: Callable[[], nn.Module], schedule: str, tp_size: int = 1, steps: int = 4, example: Any = None
) -> Any:
    """Train in a schedule, and return losses, norms, weights, and the sizes of the windows that ran in it."""
    size = max(PartialState(cpu=True).num_processes // tp_size, 1)
    handler = TorchPipelineParallelConfig(schedule=schedule, example_inputs=example)
    config = ParallelismConfig(pp_size=size, tp_size=1 if size == 1 else tp_size, pp_handler=handler)
    accelerator = Accelerator(cpu=True, parallelism_config=config, gradient_accumulation_steps=steps)
    model = model_of(kind)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    def loss_of(batch: Any) -> WeightedLoss:
        outputs = model(batch[0])
        logits = getattr(outputs, "logits", outputs)
        loss = cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum")
        return WeightedLoss(loss, float((batch[1] != -100).sum()))

    def train_window(step: int) -> list[WeightedLoss]:
        batches, sums = window_batches(step, steps), list[WeightedLoss]()
        for number in range(steps):
            with accelerator.accumulate(model):
                if not accelerator.takes_windows(model):
                    part = loss_of(batches[number])
                    accelerator.backward(part.loss, weight=part.weight)
                    sums.append(part._replace(loss=part.loss.detach()))
                elif number == steps - 1:
                    sums = accelerator.backward_window(model, loss_of, batches)
        return sums

    losses, norms = [], []
    with counted_steps(get_schedule_class(schedule)) as runs:
        for step in range(4):  # the third has a shorter batch
            sums = train_window(step)
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(sum(part.loss for part in sums) / sum(part.weight for part in sums)))
    return losses, norms, accelerator.get_state_dict(model), runs


@contextmanager
def counted_steps(kind: Any) -> Generator[list[int]]:
    """Note how many micro-batches each step of a schedule runs."""
    counts: list[int] = []
    step = kind.step

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts.append(len(kwargs["index"]))
        return step(self, *args, **kwargs)

    with patch.object(kind, "step", counted):
        yield counts


def assert_windows_are_one_process(
    kind: Callable[[], nn.Module], schedule: str, ranks: int, tp_size: int = 1, steps: int = 4, example: Any = None
) -> None:
    """Compare windows in a schedule with the same on one process."""
    ((losses, norms, state, _),) = run_world(train_windows, (kind, schedule, 1, steps), 1, timeout=90)
    options = (kind, schedule, tp_size, steps, example)
    for rank, actual in enumerate(run_world(train_windows, options, ranks, timeout=90)):
        assert actual[0] == pytest.approx(losses, rel=1e-6)
        assert actual[1] == pytest.approx(norms, rel=1e-6)
        assert max(actual[3]) == steps, "whole windows ran in the schedule"
        if rank == 0:
            torch.testing.assert_close(actual[2], state, rtol=1e-5, atol=1e-6)
