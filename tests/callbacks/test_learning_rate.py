"""Tests of the learning rate in the log."""

from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer

from trainer_lib import Accelerator
from trainer_lib.callbacks import JsonlLog, LearningRateMonitor, Printer, ProgressBar, Throughput
from trainer_lib.events import Callback, Run


def weights(*settings: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"params": [torch.nn.Parameter(torch.zeros(1))], **options} for options in settings]


def logged(monitor: LearningRateMonitor, **optimizers: Optimizer) -> dict[str, float]:
    values: dict[str, float] = {}
    monitor.on_log(Run(optimizers=optimizers), values)  # type: ignore[arg-type]  # as prepared ones
    return values


def test_a_single_rate_has_a_plain_name() -> None:
    prepared = Accelerator(cpu=True).prepare(SGD(weights({}, {}), lr=0.1))
    assert logged(LearningRateMonitor(), default=prepared) == {"learning_rate": 0.1}
    pair = {"generator": SGD(weights({}), lr=0.1), "critic": SGD(weights({}), lr=0.1)}
    assert logged(LearningRateMonitor(), **pair) == {"learning_rate": 0.1}
    assert logged(LearningRateMonitor()) == {}


def test_different_rates_have_separate_names() -> None:
    generator = SGD(weights({"lr": 0.1}, {"lr": 0.2, "name": "head"}))
    critic = SGD(weights({}, {}), lr=0.3)
    assert logged(LearningRateMonitor(), generator=generator, critic=critic) == {
        "learning_rate/generator/0": 0.1,
        "learning_rate/generator/head": 0.2,
        "learning_rate/critic": 0.3,
    }


def test_rates_that_once_differed_keep_separate_names() -> None:
    monitor = LearningRateMonitor()
    optimizer = SGD(weights({"lr": 0.0}, {"lr": 0.0}))
    assert logged(monitor, default=optimizer) == {"learning_rate": 0.0}
    optimizer.param_groups[0]["lr"] = 0.1
    assert logged(monitor, default=optimizer) == {"learning_rate/default/0": 0.1, "learning_rate/default/1": 0.0}
    optimizer.param_groups[0]["lr"] = 0.0
    assert logged(monitor, default=optimizer) == {"learning_rate/default/0": 0.0, "learning_rate/default/1": 0.0}
    resumed = LearningRateMonitor()
    assert resumed.state_dict() == {}
    resumed.load_state_dict(monitor.state_dict())
    assert logged(resumed, default=optimizer) == {"learning_rate/default/0": 0.0, "learning_rate/default/1": 0.0}


def test_a_rate_that_is_a_tensor_is_a_number() -> None:
    optimizer = AdamW(weights({}), lr=torch.tensor(0.25), foreach=False)
    value = logged(LearningRateMonitor(), default=optimizer)["learning_rate"]
    assert type(value) is float
    assert value == 0.25


def test_momentum_comes_on_request() -> None:
    adam, sgd = AdamW(weights({}), lr=0.1, betas=(0.8, 0.99)), SGD(weights({}), lr=0.1, momentum=0.9)
    assert logged(LearningRateMonitor(momentum=True), default=adam) == {"learning_rate": 0.1, "momentum": 0.8}
    assert logged(LearningRateMonitor(momentum=True), a=adam, b=sgd) == {
        "learning_rate": 0.1,
        "momentum/a": 0.8,
        "momentum/b": 0.9,
    }


@pytest.mark.parametrize("shows", [JsonlLog, Printer, ProgressBar])
def test_added_values_reach_the_display_callbacks(shows: type[Callback]) -> None:
    assert LearningRateMonitor.order < Callback.order < shows.order
    assert Throughput.order < Callback.order


def test_a_rate_that_the_optimizer_computes_itself_is_left_out() -> None:
    optimizer = SGD(weights({"lr": 0.1}, {"lr": 0.2}))
    optimizer.param_groups[1]["lr"] = None  # as Adafactor of transformers with relative_step
    assert logged(LearningRateMonitor(), default=optimizer) == {"learning_rate": 0.1}
