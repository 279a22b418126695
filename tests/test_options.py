"""Options: their defaults, what differs from them, and every value that is refused."""

from datetime import timedelta
from typing import Any

import pytest

from trainer_lib import (
    AutocastKwargs,
    ConfigurationError,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
)
from trainer_lib.options.accumulation_options import accumulation_plugin
from trainer_lib.options.enums import PrecisionType, RNGType

OPTIONS = [
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
]

BAD_VALUES: list[tuple[Any, dict[str, Any], str]] = [
    (AutocastKwargs, {"enabled": "yes"}, "enabled must be True or False, got 'yes'."),
    (AutocastKwargs, {"cache_enabled": "x"}, "Unknown cache_enabled 'x'. Known: False, None, True."),
    (GradScalerKwargs, {"init_scale": 0}, "init_scale must be a finite number above 0, got 0."),
    (GradScalerKwargs, {"init_scale": float("inf")}, "init_scale must be a finite number above 0, got inf."),
    (GradScalerKwargs, {"init_scale": float("nan")}, "init_scale must be a finite number above 0, got nan."),
    (GradScalerKwargs, {"init_scale": True}, "init_scale must be a finite number above 0, got True."),
    (GradScalerKwargs, {"growth_factor": 1.0}, "growth_factor must be above 1, got 1.0."),
    (GradScalerKwargs, {"growth_factor": "2"}, "growth_factor must be a finite number above 0, got '2'."),
    (GradScalerKwargs, {"backoff_factor": 1.0}, "backoff_factor must be below 1, got 1.0."),
    (GradScalerKwargs, {"backoff_factor": -1}, "backoff_factor must be a finite number above 0, got -1."),
    (GradScalerKwargs, {"growth_interval": 0}, "growth_interval must be a whole number of at least 1, got 0."),
    (GradScalerKwargs, {"growth_interval": 1.5}, "growth_interval must be a whole number of at least 1, got 1.5."),
    (GradScalerKwargs, {"enabled": 1}, "enabled must be True or False, got 1."),
    (DataLoaderConfiguration, {"split_batches": None}, "split_batches must be True or False, got None."),
    (DataLoaderConfiguration, {"dispatch_batches": "x"}, "Unknown dispatch_batches 'x'. Known: False, None, True."),
    (DataLoaderConfiguration, {"even_batches": 1}, "even_batches must be True or False, got 1."),
    (DataLoaderConfiguration, {"use_seedable_sampler": "x"}, "use_seedable_sampler must be True or False, got 'x'."),
    (DataLoaderConfiguration, {"data_seed": -1}, "data_seed must be a whole number of at least 0, got -1."),
    (DataLoaderConfiguration, {"data_seed": "7"}, "data_seed must be a whole number of at least 0, got '7'."),
    (DataLoaderConfiguration, {"non_blocking": 1}, "non_blocking must be True or False, got 1."),
    (
        DataLoaderConfiguration,
        {"use_stateful_dataloader": 1},
        "use_stateful_dataloader must be True or False, got 1.",
    ),
    (DataLoaderConfiguration, {"seed_each_sample": 1}, "seed_each_sample must be True or False, got 1."),
    (GradientAccumulationPlugin, {"num_steps": 0}, "num_steps must be a whole number of at least 1, got 0."),
    (GradientAccumulationPlugin, {"num_steps": True}, "num_steps must be a whole number of at least 1, got True."),
    (GradientAccumulationPlugin, {"adjust_scheduler": 1}, "adjust_scheduler must be True or False, got 1."),
    (GradientAccumulationPlugin, {"sync_with_dataloader": 1}, "sync_with_dataloader must be True or False, got 1."),
    (GradientAccumulationPlugin, {"sync_each_batch": 1}, "sync_each_batch must be True or False, got 1."),
    (InitProcessGroupKwargs, {"timeout": 90}, "timeout must be a datetime.timedelta above 0, got 90. For 90 seconds:"),
    (InitProcessGroupKwargs, {"timeout": timedelta(0)}, "timeout must be a datetime.timedelta above 0, got datetime"),
    (DistributedDataParallelKwargs, {"bucket_cap_mb": 0}, "bucket_cap_mb must be a finite number above 0, got 0."),
    (DistributedDataParallelKwargs, {"static_graph": 1}, "static_graph must be True or False, got 1."),
    (DistributedDataParallelKwargs, {"comm_hook": "zip"}, "Unknown comm_hook 'zip'. Known: batched_power_sgd, bf16,"),
]


@pytest.mark.parametrize(("options", "settings", "message"), BAD_VALUES, ids=lambda value: str(value)[:40])
def test_bad_values_are_named_with_what_is_allowed(options: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        options(**settings)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("options", OPTIONS)
def test_defaults_are_good_and_nothing_differs_from_them(options: Any) -> None:
    assert options().to_kwargs() == {}


def test_what_differs_from_the_defaults_is_told() -> None:
    assert GradScalerKwargs(growth_interval=10, enabled=True).to_kwargs() == {"growth_interval": 10}
    options = DistributedDataParallelKwargs()
    options.to_dict()["comm_state_option"]["a"] = 1
    assert options.comm_state_option == {}, "a copy is handed out"


def test_accumulation_steps_come_from_one_place() -> None:
    assert accumulation_plugin(4, None).num_steps == 4
    assert accumulation_plugin(1, GradientAccumulationPlugin(num_steps=4)).num_steps == 4
    assert accumulation_plugin(4, GradientAccumulationPlugin(sync_each_batch=True)) == GradientAccumulationPlugin(
        num_steps=4, sync_each_batch=True
    )
    with pytest.raises(ConfigurationError, match=r"gradient_accumulation_steps=2 and .*\(num_steps=4\) contradict"):
        accumulation_plugin(2, GradientAccumulationPlugin(num_steps=4))
    with pytest.raises(ConfigurationError, match="gradient_accumulation_steps must be a whole number of at least 1"):
        accumulation_plugin(0, None)


def test_kinds_are_their_text() -> None:
    assert DistributedType.MULTI_GPU == "MULTI_GPU" == str(DistributedType.MULTI_GPU)
    assert "bf16" in PrecisionType
    assert "bf61" not in PrecisionType
    assert RNGType.list()[:2] == ["torch", "cuda"]
    assert PrecisionType.read("precision", "BF16") is PrecisionType.BF16
    with pytest.raises(
        ConfigurationError, match=r"Unknown precision 'bf61'. Known: bf16, bf16-true, fp16, fp8, no. Did you mean"
    ):
        PrecisionType.read("precision", "bf61")


def test_kinds_of_worlds_go_by_device() -> None:
    assert DistributedType.of_device("cpu") is DistributedType.MULTI_CPU
    assert DistributedType.of_device("cuda") is DistributedType.MULTI_GPU
    assert DistributedType.of_device("xpu") is DistributedType.MULTI_XPU
    assert DistributedType.of_device("brand new") is DistributedType.MULTI_GPU


def test_tpu_is_another_name_of_xla() -> None:
    from trainer_lib import DistributedType

    assert DistributedType.TPU is DistributedType.XLA
    assert "TPU" not in DistributedType.list()
