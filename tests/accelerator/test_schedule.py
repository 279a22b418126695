"""Schedules: a function of updates, whatever the world."""

import logging
from typing import Any

import pytest
import torch

from tests.worlds import run_world
from trainer_lib import Accelerator, GradientAccumulationPlugin, Trainer, TrainingArguments


def _rates(steps: int = 1, batches: int = 6, **options: Any) -> list[float]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, **options)
    network = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, float)
    network, optimizer, schedule = accelerator.prepare(network, optimizer, schedule)
    rates = []
    for _ in range(batches):
        with accelerator.accumulate(network):
            accelerator.backward(network(torch.ones(1, 1)).sum())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        rates.append(schedule.get_last_lr()[0])
    return rates


def test_it_moves_once_an_update() -> None:
    assert _rates() == [1, 2, 3, 4, 5, 6]


def test_it_waits_for_the_window() -> None:
    assert _rates(steps=3) == [0, 0, 1, 1, 1, 2]


def _rates_of_all(options: dict[str, Any]) -> list[float]:
    return _rates(**options)


def test_it_does_not_depend_on_the_number_of_processes() -> None:
    assert run_world(_rates_of_all, ({},), 2, timeout=60) == [[1, 2, 3, 4, 5, 6]] * 2


def test_accelerates_habit_has_a_switch() -> None:
    assert (
        run_world(_rates_of_all, ({"scheduler_steps_per_process": True},), 2, timeout=60) == [[2, 4, 6, 8, 10, 12]] * 2
    )
    split = {"scheduler_steps_per_process": True, "split_batches": True}
    assert run_world(_rates_of_all, (split,), 2, timeout=60) == [[1, 2, 3, 4, 5, 6]] * 2


def _past_its_end() -> int:
    accelerator = Accelerator(cpu=True, scheduler_steps_per_process=True)
    network = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=3)
    network, optimizer, schedule = accelerator.prepare(network, optimizer, schedule)
    for _ in range(2):
        accelerator.backward(network(torch.ones(1, 1)).sum())
        optimizer.step()
        schedule.step()
    return schedule.scheduler.last_epoch


def test_a_schedule_of_fixed_length_stops_at_its_end() -> None:
    assert run_world(_past_its_end, (), 2, timeout=60) == [3, 3]


def test_it_can_be_moved_independently_of_the_optimizer() -> None:
    with pytest.warns(UserWarning, match="before `optimizer.step"):  # torch, for the first two moves
        assert _rates(steps=3, step_scheduler_with_optimizer=False) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("adjust", "count"), [(True, 5), (False, 3)])
def test_skipped_calls_are_counted_on_request(adjust: bool, count: int) -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, adjust_scheduler=adjust)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    network = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    network, optimizer, schedule = accelerator.prepare(network, optimizer, schedule)
    for _ in range(4):
        with accelerator.accumulate(network):
            accelerator.backward(network(torch.ones(1, 1)).sum())
            optimizer.step()
            schedule.step()
    assert schedule.scheduler._step_count == count


def test_a_schedule_can_be_made_from_the_prepared_optimizer() -> None:
    accelerator = Accelerator(cpu=True)
    network = torch.nn.Linear(1, 1)
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=1.0))
    schedule = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda moves: 1 / (1 + moves)))
    accelerator.backward(network(torch.ones(1, 1)).sum())
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_reduce_on_plateau_gets_its_metric() -> None:
    accelerator = Accelerator(cpu=True)
    network = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    optimizer, schedule = accelerator.prepare(optimizer, schedule)
    for loss in (1.0, 2.0):
        schedule.step(loss)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_its_state_is_the_wrapped_ones() -> None:
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 5))
    state = {**schedule.state_dict(), "last_epoch": 4}
    schedule.load_state_dict(state)
    assert schedule.scheduler.last_epoch == schedule.last_epoch == 4


def _warned(options: dict[str, Any]) -> int:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("trainer_lib").addHandler(handler)
    _rates(**options)
    return sum("once per update" in record.getMessage() for record in records)


def test_several_processes_are_told_what_a_step_of_the_schedule_is() -> None:
    assert run_world(_warned, ({},), 2, timeout=60) == [1, 0]
    assert run_world(_warned, ({"scheduler_steps_per_process": True},), 2, timeout=60) == [0, 0]
    assert run_world(_warned, ({"split_batches": True},), 2, timeout=60) == [0, 0]
    assert _warned({}) == 0


def _warned_by_trainer() -> int:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("trainer_lib").addHandler(handler)
    data = torch.randn(8, 4), torch.randint(2, (8,))
    args = TrainingArguments(max_steps=1, use_cpu=True, progress_bar=False)
    Trainer(torch.nn.Linear(4, 2), args, train_dataset=data, loss_fn=torch.nn.functional.cross_entropy).fit()
    return len(records)


def test_a_trainer_says_nothing_about_scripts_for_accelerate() -> None:
    assert run_world(_warned_by_trainer, (), 2, timeout=60) == [0, 0]
