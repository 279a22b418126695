"""What Accelerate takes and ignores is taken here too, with one warning; names of its earlier versions work."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.accelerator import toy
from tests.worlds import run_world
from trainer_lib import (
    Accelerator,
    ConfigurationError,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
)
from trainer_lib.logging import get_logger
from trainer_lib.state import AcceleratorState
from trainer_lib.tracking import GeneralTracker


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Accelerator(kwargs_handlers=[GradScalerKwargs(init_scale=2.0)]), "only 'fp16' scales the loss"),
        (
            lambda: Accelerator(mixed_precision="bf16", kwargs_handlers=[GradScalerKwargs(init_scale=2.0)]),
            r"only 'fp16' scales the loss \(mixed_precision is 'bf16'\)",
        ),
        (
            lambda: Accelerator(
                fsdp_plugin=FullyShardedDataParallelPlugin(),
                kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
            ),
            "DistributedDataParallelKwargs are ignored: FSDP shards the models",
        ),
        (
            lambda: Accelerator(log_with=["clearml"], project_dir="logs"),
            r"clearml, which is not installed\. Install it",
        ),
        (lambda: Accelerator(log_with=["jsonl", "jsonl"], project_dir="logs"), "names the tracker jsonl twice"),
    ],
)
def test_options_without_an_effect_are_a_warning(
    make: Callable[[], Accelerator], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = make()
    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.WARNING
    assert re.search(says, caplog.text)
    model, optimizer = accelerator.prepare(plain := toy.model(), torch.optim.SGD(plain.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, 8)).sum())
    optimizer.step()
    accelerator.init_trackers("project", init_kwargs={"clearml": {}})
    accelerator.log({"loss": 0.5}, step=1)
    accelerator.end_training()


def test_a_tracker_made_by_hand_logs_without_being_started(tmp_path: Path) -> None:
    from trainer_lib.tracking.adapters.jsonl_file import JsonlTracker

    tracker = JsonlTracker("run", logging_dir=tmp_path)
    tracker.log({"loss": 0.5}, step=2)
    tracker.finish()
    (file,) = tmp_path.rglob("*.jsonl")
    assert '"loss": 0.5' in file.read_text()
    assert isinstance(tracker, GeneralTracker)


@pytest.mark.parametrize("name", ["ACCELERATE_MIXED_PRECISION", "MIXED_PRECISION"])
def test_the_precision_comes_from_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "bf16")
    assert Accelerator().mixed_precision == "bf16"


def test_accelerates_variable_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert Accelerator().mixed_precision == "no"


@pytest.mark.parametrize(
    ("variables", "level"),
    [
        ({"ACCELERATE_LOG_LEVEL": "ERROR"}, logging.ERROR),
        ({"LOG_LEVEL": "debug"}, logging.DEBUG),
        ({"LOG_LEVEL": "debug", "ACCELERATE_LOG_LEVEL": "ERROR"}, logging.ERROR),
        ({"LOG_LEVEL": "loud"}, logging.NOTSET),  # of another program
    ],
)
def test_the_log_level_comes_from_the_environment(
    variables: dict[str, str], level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert get_logger(f"tolerance.{level}").logger.level == level


def test_an_unknown_level_of_accelerates_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "loud")
    with pytest.raises(ConfigurationError, match="Unknown log level 'loud'"):
        get_logger("tolerance")


def test_names_of_earlier_versions() -> None:
    assert get_logger("tolerance.older", accelerate_log_level="DEBUG").logger.level == logging.DEBUG
    state = AcceleratorState(dynamo_backend="eager")
    assert state.dynamo_plugin.backend == "EAGER"
    accelerator = Accelerator()
    assert accelerator.on_process(lambda: "ran", process_idx=0)() == "ran"
    assert accelerator.on_process(lambda: "ran", process_idx=1)() is None


def test_no_sync_without_a_model_is_of_all_models() -> None:
    def body() -> list[float]:
        accelerator, first, second = Accelerator(), nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        models = accelerator.prepare(first, second)
        gradients: list[Any] = []
        with accelerator.no_sync():
            for model in models:
                accelerator.backward(model(torch.full((1, 1), accelerator.process_index + 1.0)).sum())
        gradients += [float(toy.gradients(plain)[0]) for plain in (first, second)]
        accelerator.backward(models[0](torch.zeros(1, 1)).sum())
        return [*gradients, float(toy.gradients(first)[0])]

    assert run_world(body) == [[1.0, 1.0, 1.5], [2.0, 2.0, 1.5]]


def test_a_maximum_and_a_minimum_over_processes() -> None:
    def body() -> list[float]:
        accelerator = Accelerator()
        rank = torch.tensor(float(accelerator.process_index))
        return [float(accelerator.reduce(rank, reduction=reduction)) for reduction in ("max", "min", "mean")]

    assert run_world(body) == [[1.0, 0.0, 0.5]] * 2


def test_arguments_are_taken_by_position() -> None:
    accelerator = Accelerator(True, False, "bf16", 2, True)
    assert accelerator.device_placement
    assert not accelerator.split_batches
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("bf16", 2)
    assert accelerator.device == torch.device("cpu")


def test_values_before_the_trackers_start_are_dropped_without_an_error(tmp_path: Path) -> None:
    accelerator = Accelerator(log_with="jsonl", project_dir=tmp_path)
    accelerator.log({"loss": 0.5}, step=1)
    accelerator.init_trackers("project")
    accelerator.log({"loss": 0.25}, step=2)
    accelerator.end_training()
    (file,) = tmp_path.rglob("*.jsonl")
    assert '"loss": 0.25' in file.read_text()
    assert '"loss": 0.5' not in file.read_text()


@pytest.mark.parametrize(("precision", "kind"), [("bf16", torch.float32), ("bf16-true", torch.bfloat16)])
def test_weights_are_saved_in_the_type_that_is_trained(precision: str, kind: torch.dtype, tmp_path: Path) -> None:
    accelerator = Accelerator(mixed_precision=precision)
    accelerator.save_model(accelerator.prepare(nn.Linear(2, 2)), tmp_path)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {kind}
