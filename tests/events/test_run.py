"""The `Run` that a callback gets."""

from dataclasses import dataclass
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from trainer_lib import Accelerator
from trainer_lib.events import Best, Run, RunState
from trainer_lib.events.run_state import Status
from trainer_lib.foundation.errors import ConfigurationError


@pytest.mark.parametrize("weight", [4.0, 4, torch.tensor(4.0), torch.tensor(4)])
def test_the_loss_is_the_mean_of_its_sum(weight: float | Tensor) -> None:
    loss = Run(loss_sum=torch.tensor(6.0), weight=weight).loss
    assert loss is not None
    assert loss.item() == 1.5


@pytest.mark.parametrize("weight", [0.0, 0, torch.tensor(0.0)])
def test_the_loss_of_nothing_is_nothing(weight: float | Tensor) -> None:
    loss = Run(loss_sum=torch.tensor(0.0), weight=weight).loss
    assert loss is not None
    assert loss.item() == 0.0
    assert Run(weight=weight).loss is None


def test_a_single_optimizer_needs_no_name() -> None:
    first, second = object(), object()
    run = Run(optimizers={"default": first}, schedulers={})  # type: ignore[dict-item]
    assert run.optimizer is first
    assert run.scheduler is None
    run = Run(optimizers={"g": first, "d": second}, schedulers={"g": first, "d": second})  # type: ignore[dict-item]
    with pytest.raises(
        ConfigurationError, match=r"exactly one optimizer, and this run has 2 \(g, d\). Use run.optimizers\[name\]"
    ):
        _ = run.optimizer
    with pytest.raises(ConfigurationError, match=r"exactly one scheduler, and this run has 2 \(g, d\)"):
        _ = run.scheduler
    with pytest.raises(ConfigurationError, match=r"exactly one optimizer, and this run has 0 \(none\)"):
        _ = Run().optimizer


def test_trained_parameters_are_those_of_all_optimizers() -> None:
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    groups: list[dict[str, Any]] = [{"params": [first.weight]}, {"params": [first.bias]}]
    run = Run(optimizers={"g": torch.optim.SGD(groups, 0.1), "d": torch.optim.SGD([second.weight], 0.1)})  # type: ignore[dict-item]
    assert [id(parameter) for parameter in run.trained_parameters] == [
        id(parameter) for parameter in (first.weight, first.bias, second.weight)
    ]


def test_the_process_that_prints_is_the_main_one() -> None:
    assert Run().is_main_process
    assert Run(accelerator=Accelerator(cpu=True)).is_main_process


def test_log_is_that_of_the_trainer() -> None:
    @dataclass
    class Trainer:
        logged: tuple[Any, ...] = ()

        def log(self, *logged: Any) -> None:
            self.logged = logged

    trainer = Trainer()
    Run(trainer=trainer).log("entropy", 0.5, weight=3)
    assert trainer.logged == ("entropy", 0.5, 3)


def test_the_state_survives_a_restart_and_limits_are_those_of_now() -> None:
    before = RunState(run_id="a", step=7, micro_batches=14, samples=56, epoch=1, steps_in_epoch=2, steps_per_epoch=5)
    before.max_steps, before.seconds, before.status, before.reason = 10, 2.5, "interrupted", "Ctrl-C"
    before.best = Best("eval_loss", 0.5, 5)
    before.history.append({"step": 5, "epoch": 1.0, "loss": 1.0})
    before.checkpoints.append({"path": "somewhere", "step": 5, "metrics": {}})
    state = before.state_dict()
    after = RunState(max_steps=20, steps_per_epoch=4)
    after.load_state_dict(state)
    assert (after.max_steps, after.steps_per_epoch) == (20, 4)
    after.max_steps, after.steps_per_epoch = 10, 5
    assert after == before
    after.history[0]["loss"] = 2.0
    after.checkpoints[0]["step"] = 6
    assert state == before.state_dict()


def test_no_best_so_far_stays_none() -> None:
    after = RunState(best=Best("eval_loss", 0.5, 5))
    after.load_state_dict(RunState().state_dict())
    assert after.best is None


def test_epochs_count_the_part_of_the_pass_under_way() -> None:
    assert RunState(epoch=2, steps_in_epoch=3, steps_per_epoch=4).epochs == 2.75
    assert RunState(epoch=2, steps_in_epoch=3).epochs == 2.0
    assert RunState(epoch=2, steps_per_epoch=4).epochs == 2.0


def test_a_run_has_ended_even_if_its_last_checkpoint_is_missing_but_not_if_it_was_interrupted() -> None:
    statuses: tuple[Status, ...] = get_args(Status)
    ended = [status for status in statuses if RunState(status=status).has_ended]
    assert ended == ["finished", "stopped", "unsaved"]


@pytest.mark.parametrize(
    ("limit", "reached"), [("max_steps", "step"), ("max_epochs", "epoch"), ("max_tokens", "tokens")]
)
def test_a_limit_is_reached_at_its_value(limit: str, reached: str) -> None:
    for value, is_reached in ((2, False), (3, True), (4, True)):
        assert RunState(**{limit: 3, reached: value}).has_reached_limit is is_reached  # type: ignore[arg-type]
    assert not RunState(step=9, epoch=9, tokens=9).has_reached_limit
    assert not RunState(max_tokens=3).has_reached_limit  # no tokens were counted


def test_a_state_that_was_read_shares_no_entries_with_where_it_came_from() -> None:
    state = RunState(history=[{"step": 1}], checkpoints=[{"step": 1}], best=Best("eval_loss", 0.5, 1)).state_dict()
    read = RunState.of(state)
    assert read.best == Best("eval_loss", 0.5, 1)
    state["history"][0]["step"] = state["checkpoints"][0]["step"] = 2
    assert (read.history, read.checkpoints) == ([{"step": 1}], [{"step": 1}])
