"""Forwards that do not count leave no trace: filler batches, skipped batches and updates, the second forward of SAM.

In the model are all kinds of state that a forward changes: running statistics, buffers that it replaces, a generator, a
counter.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.trainer.tasks import arguments, points
from tests.worlds import run_world
from trainer_lib import LossResult, Trainer
from trainer_lib.callbacks import SAM
from trainer_lib.events import Modifier, Run


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)
        self.norm = nn.InstanceNorm1d(2, track_running_stats=True)
        self.generator, self.forwards = torch.Generator().manual_seed(3), 0
        self.register_buffer("samples", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.norm(x.view(len(x), 2, 3))
            self.samples += len(x)  # type: ignore[has-type]
            self.replaced: Tensor = self.replaced + len(x)  # type: ignore[has-type]
            torch.rand(1, generator=self.generator)
            self.forwards += 1
        return self.last(self.first(x).tanh())

    def trace(self) -> list[Tensor]:
        buffers = [buffer.clone() for buffer in self.buffers()]
        return [*buffers, self.generator.get_state(), torch.tensor(self.forwards)]


class Logging(Trainer):
    def compute_loss(self, model: Any, batch: Any) -> Any:
        loss = super().compute_loss(model, batch)
        assert isinstance(loss, LossResult)
        self.log("twice", 2 * loss.mean.detach(), weight=loss.weight)
        return loss


class SkipsSecondBatch(Modifier):
    def on_micro_batch_begin(self, run: Run) -> None:
        run.control.skip_batch = run.state.micro_batches == 1


def trained(count: int, *callbacks: Modifier, bad: int | None = None, **options: Any) -> Any:
    """Train for one pass in batches of 4; return what forwards left in the model, the history and the weights."""
    inputs, sides = points(count)
    if bad is not None:
        inputs[bad] = torch.nan
    args = arguments(
        num_train_epochs=1, per_device_train_batch_size=4, log_every=1, shuffle=False, optimizer="sgd", **options
    )
    model = Stateful()
    trainer = Logging(model, args, train_dataset=(inputs, sides), loss_fn=cross_entropy, callbacks=[*callbacks])
    trainer.fit()
    return model.trace(), trainer.run.state.history, [weight.detach() for weight in model.parameters()]


def states_after(count: int, *batches: int) -> list[Tensor]:
    """Return what forwards of these batches alone leave in the model."""
    model, (inputs, _) = Stateful(), points(count)
    for batch in batches:
        model(inputs[4 * batch : 4 * batch + 4])
    return model.trace()


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_rank_that_only_takes_part_has_the_state_of_no_forward() -> None:
    first, second = run_world(lambda: trained(4)[0], (), 2)
    assert_same(first, states_after(4, 0))
    assert_same(second, states_after(4))


@pytest.mark.parametrize("climbs", [False, True])
def test_a_skipped_batch_leaves_no_trace(climbs: bool) -> None:
    """Of NaN too, also with SAM, which computes each batch twice."""
    callbacks: list[Modifier] = [SkipsSecondBatch(), *([SAM(0.05)] if climbs else [])]
    trace, history, weights = trained(12, *callbacks, bad=5, gradient_accumulation_steps=3)
    assert_same(trace, states_after(12, 0, 2))
    assert len(history) == 1
    assert all(bool(weight.isfinite().all()) for weight in weights)


def test_a_skipped_update_leaves_no_trace() -> None:
    """Except in attributes of the model: a copy of them for each update would cost time in every step."""
    trace, history, _ = trained(12, bad=5, on_nonfinite="skip")
    assert_same(trace[:-1], states_after(12, 0, 2)[:-1])
    assert [entry["step"] for entry in history] == [1, 3]


def test_sam_shows_buffers_and_logs_the_data_once() -> None:
    trace, history, _ = trained(12, SAM(0.05))
    assert_same(trace, states_after(12, 0, 1, 2))
    for entry in history:
        assert entry["twice"] == pytest.approx(2 * entry["loss"], rel=1e-6)
