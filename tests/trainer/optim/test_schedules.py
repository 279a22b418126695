"""Schedules by name: the rates of transformers and torch, required steps, and restarts."""

import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from tests.trainer.optim import draw_schedules
from tests.trainer.tasks import arguments, points, trainer
from tests.worlds import run_world
from trainer_lib import Accelerator
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.trainer.optim.plateau import PlateauSchedule
from trainer_lib.trainer.optim.schedules import (
    NAMES,
    build_schedule,
    is_metric_driven,
    moves_each_update,
    peak_first_last,
)

TOTAL = 40


def _optimizer(*rates: float) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates or (0.5,)]
    return torch.optim.SGD(groups, lr=0.5)


def _rates(make: Callable[[torch.optim.Optimizer], LRScheduler], steps: int = TOTAL) -> list[float]:
    """Return the rates of `steps` updates, and of the one after them."""
    optimizer = _optimizer()
    schedule = make(optimizer)
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def _schedule_rates(
    name: str, warmup: int = 0, steps: int = TOTAL, total: int | None = TOTAL, **options: Any
) -> list[float]:
    return _rates(
        lambda optimizer: build_schedule(name, optimizer, warmup_steps=warmup, total_steps=total, **options), steps
    )


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize(
    ("name", "options", "reference_name", "reference_options"),
    [
        ("linear", {}, "linear", {}),
        ("cosine", {}, "cosine", {}),
        ("cosine", {"num_cycles": 1.5}, "cosine", {"num_cycles": 1.5}),
        ("cosine", {"min_ratio": 0.25}, "cosine_with_min_lr", {"min_lr_rate": 0.25}),
        ("cosine_with_restarts", {"num_cycles": 3}, "cosine_with_restarts", {"num_cycles": 3}),
        ("polynomial", {}, "polynomial", {}),
        ("polynomial", {"power": 2.0, "lr_end": 0.1}, "polynomial", {"power": 2.0, "lr_end": 0.1}),
        ("constant", {}, "constant_with_warmup", {}),
        ("constant_with_warmup", {}, "constant_with_warmup", {}),
        ("inverse_sqrt", {}, "inverse_sqrt", {}),
        ("inverse_sqrt", {"timescale": 5}, "inverse_sqrt", {"timescale": 5}),
        (
            "wsd",
            {"decay_steps": 12, "decay": "linear"},
            "warmup_stable_decay",
            {"num_decay_steps": 12, "decay_type": "linear"},
        ),
        (
            "wsd",
            {"decay_ratio": 0.3, "decay": "cosine", "min_ratio": 0.2},
            "warmup_stable_decay",
            {"num_decay_steps": 12, "decay_type": "cosine", "min_lr_ratio": 0.2},
        ),
        (
            "wsd",
            {"decay_steps": 12, "decay": "1-sqrt"},
            "warmup_stable_decay",
            {"num_decay_steps": 12, "decay_type": "1-sqrt"},
        ),
    ],
)
def test_the_rates_are_those_of_transformers(
    name: str, options: dict[str, Any], reference_name: str, reference_options: dict[str, Any], warmup: int
) -> None:
    def reference(optimizer: torch.optim.Optimizer) -> Any:
        return transformers.get_scheduler(
            reference_name, optimizer, warmup, TOTAL, scheduler_specific_kwargs=reference_options
        )

    assert _schedule_rates(name, warmup, **options) == pytest.approx(_rates(reference), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(
    ("total", "warmup", "pct_start"),
    [(40, 0, None), (40, 7, None), (36, 0, None), (36, 0, 0.4), (7, 0, 0.0), (7, 7, None), (3, 0, 1.0), (1, 0, None)],
)
def test_one_cycle_equals_that_of_torch(total: int, warmup: int, pct_start: float | None) -> None:
    options: dict[str, Any] = {"div_factor": 10.0, "final_div_factor": 100.0}
    reference = _rates(
        lambda optimizer: OneCycleLR(
            optimizer,
            max_lr=0.5,
            total_steps=total,
            pct_start=warmup / total or (0.3 if pct_start is None else pct_start),
            cycle_momentum=False,
            **options,
        ),
        total - 1,
    )
    given = options if pct_start is None else {**options, "pct_start": pct_start}
    rates = _schedule_rates("one_cycle", warmup, total - 1, total, **given)
    assert rates == pytest.approx(reference, rel=1e-9)
    assert _schedule_rates("one_cycle", warmup, total, total, **given)[-1] == pytest.approx(0.5 / 1000), "after the run"


def test_rates_equal_numbers_computed_by_hand() -> None:
    assert _schedule_rates("linear", 2, 6, 6) == pytest.approx([0, 0.25, 0.5, 0.375, 0.25, 0.125, 0])
    assert _schedule_rates("linear", 0, 4, 4, min_ratio=0.5) == pytest.approx([0.5, 0.4375, 0.375, 0.3125, 0.25])
    assert _schedule_rates("wsd", 1, 10, 10) == pytest.approx([0, *[0.5] * 9, 0])
    assert _schedule_rates("wsd", 0, 4, 4, decay_steps=0) == pytest.approx([0.5] * 4 + [0.0])
    assert _schedule_rates("one_cycle", 0, 10, 10, pct_start=0.5)[4] == 0.5
    assert _schedule_rates("cosine_with_restarts", 0, 4, 4, num_cycles=2, min_ratio=0.2) == pytest.approx(
        [0.5, 0.3, 0.5, 0.3, 0.1]
    )


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"constant", "constant_with_warmup", "inverse_sqrt", "plateau"}))
def test_a_schedule_stays_constant_after_its_end(name: str) -> None:
    rates = _schedule_rates(name, 3, steps=TOTAL + 20)
    assert rates[TOTAL:] == [rates[TOTAL]] * 21


def test_each_group_decays_from_its_own_rate() -> None:
    optimizer = _optimizer(0.5, 0.25)
    schedule = build_schedule("polynomial", optimizer, total_steps=2, lr_end=0.05)
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == pytest.approx([0.275, 0.15])
    assert _schedule_rates("polynomial", lr_end=0.0) == pytest.approx(_schedule_rates("linear"))


def test_each_schedule_depends_on_the_step_alone() -> None:
    for name in sorted(set(NAMES) - {"plateau"}):
        schedule = build_schedule(name, _optimizer(), warmup_steps=5, total_steps=TOTAL)
        assert isinstance(schedule, LambdaLR)
        again = pickle.loads(pickle.dumps(schedule.lr_lambdas[0]))
        backwards = [again(step) for step in reversed(range(TOTAL))]
        assert backwards[::-1] == [schedule.lr_lambdas[0](step) for step in range(TOTAL)]


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_restart_resumes_the_schedule(name: str, tmp_path: Path) -> None:
    def prepared() -> tuple[Accelerator, Any, Any]:
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        schedule = build_schedule(name, optimizer, warmup_steps=3, total_steps=10)
        optimizer, schedule = accelerator.prepare(optimizer, schedule)
        return accelerator, optimizer, schedule

    def rates(optimizer: Any, schedule: Any, steps: int) -> list[float]:
        actual: list[float] = []
        for _ in range(steps):
            actual.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
            if is_metric_driven(schedule):
                schedule.scheduler.step(1.0)
        return actual

    accelerator, optimizer, schedule = prepared()
    rates(optimizer, schedule, 4)
    accelerator.save_state(str(tmp_path))
    expected = rates(optimizer, schedule, 5)
    accelerator.free_memory()
    accelerator, optimizer, schedule = prepared()
    accelerator.load_state(str(tmp_path))
    assert rates(optimizer, schedule, 5) == expected


def test_a_restart_takes_the_settings_of_the_arguments() -> None:
    saved = build_schedule("linear", _optimizer(), total_steps=10)
    longer = build_schedule("linear", optimizer := _optimizer(), total_steps=20)
    for _ in range(5):
        saved.optimizer.step()
        saved.step()
    longer.load_state_dict(saved.state_dict())
    optimizer.step()
    longer.step()
    assert longer.get_last_lr() == [pytest.approx(0.5 * 14 / 20)]


def test_schedules_of_two_ranks_equal_that_of_one() -> None:
    def rates() -> list[float]:
        accelerator = Accelerator(cpu=True)
        optimizer = _optimizer()
        schedule = build_schedule("cosine", optimizer, warmup_steps=2, total_steps=6)
        optimizer, schedule = accelerator.prepare(optimizer, schedule)
        actual: list[float] = []
        for _ in range(6):
            optimizer.step()
            schedule.step()
            actual.append(schedule.get_last_lr()[0])
        return actual

    assert run_world(rates, (), 2, timeout=60) == [_schedule_rates("cosine", 2, 6, 6)[1:]] * 2


# -- required settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["linear", "cosine", "cosine_with_restarts", "polynomial", "wsd", "one_cycle"])
def test_a_schedule_that_needs_the_number_of_steps_says_so(name: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"needs the number of steps, which is unknown: .* Give max_steps or schedule_steps"
    ):
        build_schedule(name, _optimizer())


@pytest.mark.parametrize("name", ["constant", "constant_with_warmup", "inverse_sqrt", "plateau"])
def test_other_schedules_need_no_number_of_steps(name: str) -> None:
    assert _schedule_rates(name, 4, 4, None) == pytest.approx([0, 0.125, 0.25, 0.375, 0.5])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("linaer", {}, r"Unknown lr_scheduler 'linaer'\. Known: constant, .*Did you mean 'linear'\? Or give a dotted"),
        (None, {}, "Unknown lr_scheduler None"),
        ("StepLR", {}, r"'StepLR'\. Give the path of torch's: lr_scheduler=\"torch\.optim\.lr_scheduler\.StepLR\""),
        ("ReduceLROnPlateau", {}, r"'ReduceLROnPlateau'\. Its name here is \"plateau\""),
        (["linear"], {}, "Unknown lr_scheduler"),
        ("cosine_with_min_lr", {}, '"cosine" with min_ratio'),
        ("warmup_stable_decay", {}, '"wsd" with decay_steps'),
        ("linear", {"num_cycle": 1}, r"'linear' has no option 'num_cycle'\. Known: min_ratio"),
        ("constant", {"power": 1}, "It has no options"),
        (
            "wsd",
            {"decay_step": 1},
            r"Known: decay_steps, decay, min_ratio, decay_ratio\. Did you mean 'decay_steps'",
        ),
        ("linear", {"num_warmup_steps": 1}, "the option 'num_warmup_steps' is set by warmup"),
        ("linear", {"warmup_steps": 50}, "warm-up must not be longer than the run .got 50 of 40"),
        ("linear", {"warmup_steps": -1}, "warmup_steps must be"),
        ("linear", {"total_steps": 0}, "total_steps must be"),
        ("cosine", {"min_ratio": 1.5}, r"min_ratio must be between 0 and 1 \(got 1\.5\)"),
        ("cosine", {"num_cycles": 0}, "num_cycles must be a finite number above 0, got 0"),
        ("polynomial", {"lr_end": 0.5}, r"lr_end must be below .* \(got 0\.5, and a group has 0\.5\)"),
        ("polynomial", {"lr_end": -0.5}, "lr_end must be"),
        ("polynomial", {"power": "2"}, "power must be a finite number above 0, got '2'"),
        ("inverse_sqrt", {"timescale": 0}, "timescale must be"),
        ("wsd", {"decay": "square"}, "Unknown decay 'square'. Known: 1-sqrt, cosine, linear"),
        ("wsd", {"decay_steps": 3, "decay_ratio": 0.1}, "Give one of them"),
        ("wsd", {"decay_steps": 38, "warmup_steps": 3}, "must not be more than all 40 steps"),
        ("wsd", {"decay_ratio": 1.1}, r"decay_ratio must be between 0 and 1 \(got 1\.1\)"),
        ("one_cycle", {"pct_start": 0.1, "warmup_steps": 3}, "Give one of them"),
        ("plateau", {"mode": "less"}, "Unknown mode 'less'"),
        ("plateau", {"factor": 1.5}, r"factor must be at least 0 and below 1 \(got 1\.5\)"),
        ("plateau", {"patience": -1}, "patience must be"),
        ("plateau", {"patince": 1}, "Did you mean 'patience'"),
    ],
)
def test_invalid_settings_are_refused(name: Any, options: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"total_steps": TOTAL, **options}
    with pytest.raises(ConfigurationError, match=message):
        build_schedule(name, _optimizer(), **settings)


# -- dotted paths ----------------------------------------------------------------------------------------------------


def halving(optimizer: torch.optim.Optimizer, warmup_steps: int, total_steps: int, times: int = 1) -> LambdaLR:
    """Return a custom schedule."""
    return LambdaLR(optimizer, lambda step: 0.5 ** (times * (step >= warmup_steps)) if step < total_steps else 0.0)


def no_schedule(optimizer: torch.optim.Optimizer) -> None:
    """Return no schedule."""


def test_dotted_paths_load_custom_schedules() -> None:
    rates = _schedule_rates(f"{__name__}.halving", 2, 4, 4, times=2)
    assert rates == [0.5, 0.5, 0.125, 0.125, 0.0]
    assert _schedule_rates("torch.optim.lr_scheduler.StepLR", 0, 2, None, step_size=1) == pytest.approx(
        [0.5, 0.05, 0.005]
    )
    of_transformers = _schedule_rates("transformers.get_linear_schedule_with_warmup", 2, 6, 6)
    assert of_transformers == pytest.approx(_schedule_rates("linear", 2, 6, 6))


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("torch.optim.lr_scheduler.StpLR", {}, "has no class or function 'StpLR'. Did you mean 'StepLR'"),
        ("torch.optim.lr_scheduler.StepLR", {"step_size": 1, "warmup_steps": 3}, "takes no warm-up"),
        ("torch.optim.lr_scheduler.StepLR", {"step": 1}, "has no option 'step'"),
        ("torch.optim.lr_scheduler.StepLR", {}, "cannot be created: .*step_size"),
        (f"{__name__}.halving", {"warmup_steps": 1}, "needs total_steps, which is unknown"),
        (f"{__name__}.no_schedule", {}, r"must return a torch LRScheduler \(got NoneType\)"),
    ],
)
def test_invalid_paths_are_refused(path: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build_schedule(path, _optimizer(), **options)


# -- plateau ---------------------------------------------------------------------------------------------------------

METRICS = [5.0, 4.0, 4.0, 3.9999, 3.5, 3.5, 3.5, 3.5, 3.5, 3.5, math.nan, 3.4, 3.4, 3.4, 3.4, 3.4, 3.4, 3.4]


@pytest.mark.parametrize(
    "options",
    [
        {"patience": 1, "factor": 0.5},
        {"patience": 0, "cooldown": 2, "factor": 0.5},
        {"patience": 1, "threshold": 0.6, "threshold_mode": "abs", "factor": 0.5},
        {"patience": 0, "factor": 0.1, "min_lr": 0.02},
        {"patience": 1, "mode": "max", "factor": 0.5},
        {"patience": 1, "mode": "max", "threshold_mode": "abs", "threshold": 0.2, "factor": 0.5},
    ],
)
def test_plateau_equals_that_of_torch(options: dict[str, Any]) -> None:
    optimizer, torch_optimizer = _optimizer(0.5, 0.01), _optimizer(0.5, 0.01)
    schedule, reference = build_schedule("plateau", optimizer, **options), ReduceLROnPlateau(torch_optimizer, **options)
    lowered = False
    for metric in METRICS:
        schedule.step(metric)  # pyright: ignore[reportArgumentType]
        reference.step(metric)
        for actual, expected in zip(optimizer.param_groups, torch_optimizer.param_groups, strict=True):
            assert actual["lr"] == pytest.approx(expected["lr"], rel=1e-12)
        assert schedule.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
        lowered |= optimizer.param_groups[0]["lr"] < 0.5
    assert lowered


def test_plateau_warms_up_and_restores_its_state() -> None:
    optimizer = _optimizer()
    schedule = PlateauSchedule(optimizer, 4, patience=0, factor=0.5)
    rates: list[float] = []
    for metric in (1.0, 1.0, 0.5, 0.5):
        optimizer.step()
        schedule.step()
        schedule.step(metric)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.125, 0.125, 0.1875, 0.125])
    again = PlateauSchedule(_optimizer(), 4, patience=0, factor=0.1)
    again.load_state_dict(schedule.state_dict())
    again.step(0.5)
    assert again.get_last_lr() == [pytest.approx(0.5 * 0.25 * 0.1)]


def test_a_relative_threshold_works_for_negative_metrics() -> None:
    schedule = PlateauSchedule(_optimizer(), patience=0, factor=0.5, threshold=0.1)
    for metric in (-10.0, -12.0, -12.5):
        schedule.step(metric)
    assert schedule.get_last_lr() == [0.25]


@pytest.mark.parametrize("given", ["function", "path", "name"])
def test_a_plateau_without_evaluations_is_warned_of_once(given: str, caplog: pytest.LogCaptureFixture) -> None:
    args: dict[str, Any] = {"path": {"lr_scheduler": "torch.optim.lr_scheduler.ReduceLROnPlateau"}}.get(given, {})
    if given == "name":
        args = {"lr_scheduler": "plateau", "eval_every": "never"}
    options: dict[str, Any] = {"function": {"scheduler": ReduceLROnPlateau}, "name": {"eval_dataset": points()}}
    trainer(arguments(max_steps=3, **args), **options.get(given, {})).fit()
    assert caplog.text.count("lowers the learning rate by the metric of evaluations, and there are none") == 1
    caplog.clear()
    trainer(arguments(max_steps=3), scheduler=ReduceLROnPlateau, eval_dataset=points()).fit()
    assert "lowers the learning rate" not in caplog.text


def test_only_plateau_schedules_need_the_metric() -> None:
    calls = {}
    for name in NAMES:
        schedule = build_schedule(name, _optimizer(), total_steps=TOTAL)
        calls[name] = (is_metric_driven(schedule), moves_each_update(schedule))
    assert calls == {name: (name == "plateau", True) for name in NAMES}
    foreign = Accelerator(cpu=True).prepare(ReduceLROnPlateau(_optimizer()))
    assert (is_metric_driven(foreign), moves_each_update(foreign)) == (True, False)


# -- the banner ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "rates"),
    [
        ("linear", {"warmup_steps": 8}, (0.0, 0.5, 0.5 / 32)),
        ("cosine", {}, (0.5, 0.5, 0.25 * (1 + math.cos(math.pi * 39 / 40)))),
        ("one_cycle", {}, (0.02, 0.5, None)),
        ("constant", {"total_steps": None, "warmup_steps": 3}, (0.0, 0.5, None)),
        ("inverse_sqrt", {"total_steps": None}, (0.5, 0.5, None)),
        ("plateau", {"warmup_steps": 3}, (0.0, 0.5, None)),
        ("torch.optim.lr_scheduler.StepLR", {"step_size": 3}, (0.5, None, None)),
        ("transformers.get_linear_schedule_with_warmup", {"warmup_steps": 8}, (0.0, 0.5, 0.5 / 32)),
    ],
)
def test_peak_first_last(name: str, options: dict[str, Any], rates: tuple[float, float | None, float | None]) -> None:
    settings: dict[str, Any] = {"total_steps": TOTAL, **options}
    schedule = build_schedule(name, _optimizer(), **settings)
    before = str(schedule.state_dict())
    actual = peak_first_last(schedule)
    if name == "one_cycle":
        assert actual.last is not None
        assert 0 < actual.last < 0.01
        actual = actual._replace(last=None)
    for rate, expected in zip(actual, rates, strict=True):
        assert rate == (expected if expected is None else pytest.approx(expected, rel=1e-9))
    assert str(schedule.state_dict()) == before
    assert peak_first_last(Accelerator(cpu=True).prepare(schedule))[:2] == actual[:2]


def test_the_peak_of_a_long_run_is_found() -> None:
    schedule = build_schedule("wsd", _optimizer(), warmup_steps=12_345, total_steps=10_000_000, decay_ratio=0.99)
    first, peak, last = peak_first_last(schedule)
    assert (first, peak) == (0.0, 0.5)
    assert last == pytest.approx(0.5 / 9_900_000)
    assert peak_first_last(schedule, total_steps=12_346).last == pytest.approx(0.5)
    assert (
        peak_first_last(build_schedule("one_cycle", _optimizer(), warmup_steps=12_345, total_steps=900_000)).peak == 0.5
    )


def test_the_picture_of_the_documentation_shows_the_rates_of_all_schedules() -> None:
    assert set(draw_schedules.SCHEDULES) == set(NAMES) - {"constant_with_warmup"}  # which is "constant"
    picture = draw_schedules.svg()
    assert draw_schedules.PICTURE.read_text() == picture, "run python -m tests.trainer.optim.draw_schedules"
    assert all(f">{name}</text>" in picture for name in draw_schedules.SCHEDULES)
