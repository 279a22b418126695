"""The same training on one process, on two and on four: losses, gradients, metrics, and when it stops."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trainer.tasks import arguments, points, trainer
from tests.worlds import run_world
from trainer_lib.callbacks import EarlyStopping


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))


def accuracy_of_rows(predictions: Tensor, labels: Tensor) -> Tensor:
    return (predictions.argmax(dim=1) == labels).float()


Outcome = tuple[list[dict[str, Any]], int, str, str | None, dict[str, Tensor]]


def run(processes: int) -> Outcome:
    """Train with batches of 16 samples over all processes, in a shuffled order; 77 samples fill no last batch."""
    args = arguments(
        num_train_epochs=40,
        per_device_train_batch_size=16 // processes,
        per_device_eval_batch_size=7,
        learning_rate=0.3,
        lr_scheduler="constant",
        optimizer="sgd",
        log_every=1,
        eval_every=4,
        metric_for_best="far_hits",
        greater_is_better=True,
    )
    trained = model()
    result = trainer(
        args,
        model=trained,
        train_dataset=points(77),
        eval_dataset={"near": points(30), "far": points(53)},
        metrics={"near": {"hits": accuracy_of_rows}, "far": {"hits": accuracy_of_rows}},
        callbacks=[EarlyStopping("eval_far_hits", patience=3, greater_is_better=True)],
    ).fit()
    timeless = [
        {name: value for name, value in entry.items() if not name.endswith(("_per_second", "data_wait"))}
        for entry in result.history
    ]
    return timeless, result.state.step, result.status, result.state.reason, trained.state_dict()


@functools.cache
def alone() -> Outcome:
    return run(1)


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_world_makes_no_difference(processes: int) -> None:
    history, step, status, reason, weights = alone()
    assert status == "stopped"
    for other in run_world(functools.partial(run, processes), (), processes, timeout=120):
        assert (other[1], other[2], other[3]) == (step, status, reason)
        assert len(other[0]) == len(history)
        for mine, theirs in zip(other[0], history, strict=True):
            assert mine.keys() == theirs.keys()
            for name, value in mine.items():
                assert value == pytest.approx(theirs[name], rel=2e-5, abs=1e-7), (name, mine["step"])
        torch.testing.assert_close(other[4], weights, rtol=1e-4, atol=1e-6)
