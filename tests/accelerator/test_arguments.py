"""The arguments of the engine: older names, what is refused, and how it is said."""

import inspect
from datetime import timedelta
from typing import Any

import pytest

from trainer_lib import (
    Accelerator,
    AutocastKwargs,
    ConfigurationError,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
)
from trainer_lib.options.precision_options import GradScalerKwargs


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"mixed_precison": "bf16"}, ConfigurationError, "Did you mean 'mixed_precision'"),
        ({"cpu": "yes"}, ConfigurationError, "cpu must be True or False"),
        (
            {"step_scheduler_with_optimizer": 1},
            ConfigurationError,
            "step_scheduler_with_optimizer must be True or False",
        ),
        ({"scheduler_steps_per_process": 2}, ConfigurationError, "scheduler_steps_per_process must be True or False"),
        (
            {"rng_types": "torch"},
            ConfigurationError,
            r"rng_types must be a list of generator kinds \(got 'torch'\). Example:",
        ),
        ({"rng_types": 3}, ConfigurationError, r"rng_types must be a list of generator kinds \(got 3\)"),
        ({"rng_types": ["troch"]}, ConfigurationError, "Unknown kind of generator in rng_types 'troch'.*mean 'torch'"),
        ({"kwargs_handlers": 5}, ConfigurationError, r"kwargs_handlers must be a list of option objects \(got int\)"),
        ({"kwargs_handlers": 0}, ConfigurationError, r"kwargs_handlers must be a list of option objects \(got int\)"),
        ({"kwargs_handlers": AutocastKwargs()}, ConfigurationError, r"must be a list of option objects \(got Autocast"),
        (
            {"kwargs_handlers": ["fp16"]},
            ConfigurationError,
            "Unknown kwargs handler 'str'. Known: AORecipeKwargs, Autocast",
        ),
        ({"log_with": "wandbb"}, ConfigurationError, "Unknown tracker 'wandbb'.*Did you mean 'wandb'"),
        ({"log_with": "tensorboard"}, ConfigurationError, "tensorboard writes files and needs a folder"),
        ({"fsdp_plugin": object()}, ConfigurationError, "fsdp_plugin must be a FullyShardedDataParallelPlugin"),
        ({"deepspeed_plugin": object()}, ConfigurationError, "must be a DeepSpeedPlugin or a dict of them by name"),
        (
            {"kwargs_handlers": [object()]},
            ConfigurationError,
            "Known: AORecipeKwargs, AutocastKwargs, DistributedDataParallel",
        ),
        (
            {"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]},
            ConfigurationError,
            "kwargs_handlers has two AutocastKwargs",
        ),
        ({"fp16": True, "mixed_precision": "bf16"}, ConfigurationError, "contradict"),
        (
            {"even_batches": False, "dataloader_config": DataLoaderConfiguration()},
            ConfigurationError,
            "Put even_batches into dataloader_config",
        ),
    ],
)
def test_what_cannot_be_done_is_said(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Accelerator(**arguments)


def test_arguments_left_at_none_are_no_requests() -> None:
    Accelerator(cpu=True, log_with=None, fsdp_plugin=None, dynamo_backend=None, project_dir=None)


@pytest.mark.parametrize("older", [{"split_batches": True}, {"dispatch_batches": True}, {"even_batches": False}])
def test_older_names_of_data_options_are_taken(older: dict[str, Any]) -> None:
    accelerator = Accelerator(cpu=True, **older)
    for name, value in older.items():
        assert getattr(accelerator, name) is value
        assert getattr(accelerator.dataloader_config, name) is value


def test_the_older_fp16_is_taken() -> None:
    assert Accelerator(cpu=True, fp16=True).mixed_precision == "fp16"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GradScalerKwargs(growth_factor=0.5), "growth_factor must be above 1"),
        (lambda: GradScalerKwargs(backoff_factor=2.0), "backoff_factor must be below 1"),
        (lambda: GradScalerKwargs(init_scale=0), "init_scale must be a finite number above 0"),
        (lambda: GradScalerKwargs(growth_interval=0), "growth_interval must be a whole number"),
        (lambda: InitProcessGroupKwargs(timeout=30), r"timedelta\(seconds=90\)"),  # type: ignore[arg-type]
        (lambda: InitProcessGroupKwargs(timeout=timedelta(0)), "above 0"),
        (lambda: DistributedDataParallelKwargs(bucket_cap_mb=-1), "bucket_cap_mb"),
        (lambda: DataLoaderConfiguration(split_batches="yes"), "split_batches must be True or False"),  # type: ignore[arg-type]
        (lambda: DataLoaderConfiguration(data_seed=-1), "data_seed"),
    ],
)
def test_options_check_their_values(make: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make()


def test_options_tell_what_differs_from_the_defaults() -> None:
    assert DistributedDataParallelKwargs(bucket_cap_mb=5).to_kwargs() == {"bucket_cap_mb": 5}


def test_the_process_group_learns_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match="does not work on the CPU"):
        Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="nccl")])


def test_the_order_of_arguments_is_accelerates() -> None:
    names = [
        "device_placement",
        "split_batches",
        "mixed_precision",
        "gradient_accumulation_steps",
        "cpu",
        "dataloader_config",
        "deepspeed_plugin",
        "fsdp_plugin",
        "torch_tp_plugin",
        "megatron_lm_plugin",
        "rng_types",
        "log_with",
        "project_dir",
        "project_config",
        "gradient_accumulation_plugin",
        "step_scheduler_with_optimizer",
        "kwargs_handlers",
        "dynamo_backend",
        "dynamo_plugin",
        "deepspeed_plugins",
        "parallelism_config",
    ]
    assert list(inspect.signature(Accelerator).parameters)[: len(names)] == names
