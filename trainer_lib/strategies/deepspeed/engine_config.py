"""The config that DeepSpeed's engine gets: what it shards and offloads, without what this library does itself."""

import copy
from collections.abc import Iterator
from typing import Any, cast

from torch import nn

from trainer_lib.foundation.errors import UnsupportedError
from trainer_lib.options.deepspeed.auto_values import fill_auto_values, training_values
from trainer_lib.options.deepspeed.deepspeed_config_file import HfDeepSpeedConfig
from trainer_lib.options.deepspeed.deepspeed_plugin import DeepSpeedPlugin

# The accumulation window, clipping, precision, optimizer and schedule are the Accelerator's.
OURS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "fp16",
    "bf16",
    "amp",
    "torch_autocast",
    "steps_per_print",
    "wall_clock_breakdown",
)
REFUSED = {
    "zero_optimization.zero_hpz_partition_size": "secondary shards (hpZ)",
    "zero_optimization.zero_quantized_gradients": "quantized gradients",
    "zenflow": "ZenFlow",
    "curriculum_learning": "curriculum learning; order the data in your own sampler",
    "data_efficiency": "data efficiency; order the data in your own sampler",
    "progressive_layer_drop": "progressive layer drop",
    "sparse_gradients": "sparse gradients",
    "compression_training": "compression",
    "elasticity": "elasticity; `trainer-lib launch` restarts with other worlds",
}
# Tried with DeepSpeed 0.19.8 alone: it trains, with numbers that are not those of offloading to the CPU.
_NVME = {
    "offload_optimizer": "DeepSpeed reads back wrong gradients, without an error, for large weights that do not begin "
    "at a multiple of 512 bytes in their shard",
    "offload_param": "weights are trained in fp32 here, and on a CPU DeepSpeed swaps them in bf16; GPUs were not tried",
}


def engine_config(plugin: DeepSpeedPlugin, model: nn.Module) -> dict[str, Any]:
    """Return the config for `deepspeed.initialize`.

    The engine sees windows of one micro-batch and is told where a window ends: gradients are accumulated until the
    optimizer steps, and no loss is divided.

    Args:
        plugin: The plugin, whose config stays unchanged.
        model: The model, whose hidden size fills the sizes of buckets that are "auto".

    Raises:
        ConfigurationError: If an "auto" has no value.
        UnsupportedError: If the config asks for what does not work with this library's accumulation window.
    """
    config = HfDeepSpeedConfig(plugin.hf_ds_config)
    refuse_unsupported(config)
    for key in OURS:
        config.del_config_sub_tree(key)
    if config.get_value("zero_optimization.stage") == 1:
        # Gradients are reduced when the optimizer steps: there is nothing to overlap, and DeepSpeed refuses it.
        config.del_config_sub_tree("zero_optimization.overlap_comm")
    fill_auto_values(config, training_values(hidden_size=_hidden_size(model)))
    values = copy.deepcopy(config.config)
    return {
        "zero_force_ds_cpu_optimizer": False,  # any optimizer of torch updates what is offloaded
        **values,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,  # DeepSpeed's default is 1
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
    }


def refuse_unsupported(config: HfDeepSpeedConfig) -> None:
    """Raise for what does not work with this library's accumulation window.

    Raises:
        UnsupportedError: With the key and what to do instead.
    """
    for key, feature in REFUSED.items():
        if _is_on(config.get_value(key)):
            raise UnsupportedError(f"The DeepSpeed config sets {key}, which this version does not support: {feature}.")
    for kind, reason in _NVME.items():
        if config.get_value(f"zero_optimization.{kind}.device") == "nvme":
            raise UnsupportedError(
                f"The DeepSpeed config offloads to NVMe ({kind}), which this version does not support: {reason}. "
                "Offload to 'cpu'."
            )


def _is_on(value: Any) -> bool:
    """Whether a section or a value of the config switches a feature on."""
    if isinstance(value, dict):
        return bool(value) and bool(cast(dict[str, Any], value).get("enabled", True))
    return value is True or (isinstance(value, int) and value > 1)


def _hidden_size(model: nn.Module) -> int | None:
    sizes = list(_hidden_sizes(getattr(model, "config", None)))
    return max(sizes, default=None)


def _hidden_sizes(config: Any) -> Iterator[int]:
    for part in (config, getattr(config, "text_config", None)):
        if isinstance(size := getattr(part, "hidden_size", None), int):
            yield size
        yield from (size for size in getattr(part, "hidden_sizes", None) or () if isinstance(size, int))
