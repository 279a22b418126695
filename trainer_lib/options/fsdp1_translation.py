"""Translation of FSDP1's options into those of FSDP2, with errors for those that have no equivalent.

Values may be texts, numbers or objects of `torch.distributed.fsdp`. Objects are recognized by their class names, so
that the check does not import that package (0.7 s).
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, unknown

_STRATEGIES = {1: "FULL_SHARD", 2: "SHARD_GRAD_OP", 3: "NO_SHARD", 4: "HYBRID_SHARD", 5: "_HYBRID_SHARD_ZERO2"}
_STATE_DICT_TYPES = {1: "FULL_STATE_DICT", 2: "LOCAL_STATE_DICT", 3: "SHARDED_STATE_DICT"}
_PREFETCHES = {1: "BACKWARD_PRE", 2: "BACKWARD_POST", 3: "NO_PREFETCH"}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_POLICIES = ("transformer_based_wrap", "size_based_wrap", "no_wrap")
_TEXT_FLAGS = {"true": True, "false": False}


class Strategy(NamedTuple):
    """A sharding strategy: FSDP1's name and FSDP2's `reshard_after_forward`."""

    name: str
    reshard_after_forward: bool | int

    @property
    def is_hybrid(self) -> bool:
        """Whether weights are sharded within a machine and replicated across machines."""
        return "HYBRID" in self.name


class Offload(NamedTuple):
    """Whether shards are kept in CPU memory, and whether it is pinned."""

    to_cpu: bool = False
    pin_memory: bool = True


def check_unsupported_options(plugin: Any) -> None:
    """Raise for options of FSDP1 that FSDP2 does not support."""
    if plugin.fsdp_version not in (None, 2):
        raise ConfigurationError(
            f"fsdp_version={plugin.fsdp_version!r} is not supported: this library shards with FSDP2, whose options are "
            "nearly the same. Leave it out, or set FSDP_VERSION=2 in the launcher."
        )
    if plugin.use_orig_params not in (None, True):
        raise ConfigurationError(
            f"use_orig_params={plugin.use_orig_params!r} is not supported: FSDP2 always keeps the model's own "
            "parameters. Leave it out."
        )
    if plugin.limit_all_gathers is not True:
        raise ConfigurationError(
            f"limit_all_gathers={plugin.limit_all_gathers!r} is not supported: FSDP2 has no such limit. Leave it out."
        )
    if plugin.backward_prefetch is not None:
        prefetch = _word("backward_prefetch", plugin.backward_prefetch, _PREFETCHES)
        if prefetch != "BACKWARD_PRE":
            raise ConfigurationError(
                f"backward_prefetch={prefetch!r} is not supported: FSDP2 gathers the next block's weights "
                "before each backward (BACKWARD_PRE). Leave it out."
            )
        plugin.backward_prefetch = prefetch
    _check_state_configs(plugin)


def strategy(sharding_strategy: Any, reshard_after_forward: Any) -> Strategy:
    """Return the strategy from FSDP1's option, FSDP2's option or both."""
    reshard = _reshard(reshard_after_forward)
    if isinstance(reshard, Strategy):
        if sharding_strategy is not None and _strategy_named(sharding_strategy) != reshard:
            raise _contradiction(sharding_strategy, reshard_after_forward)
        return reshard
    if sharding_strategy is None:
        return Strategy("SHARD_GRAD_OP" if reshard is False else "FULL_SHARD", True if reshard is None else reshard)
    named = _strategy_named(sharding_strategy)
    if reshard is not None and bool(reshard) != bool(named.reshard_after_forward):
        raise _contradiction(sharding_strategy, reshard_after_forward)
    return named if reshard is None else Strategy(named.name, reshard)


def offload(value: Any) -> Offload:
    """Return whether shards are kept in CPU memory."""
    if value is None or isinstance(value, bool):
        return Offload(bool(value))
    kind = type(value).__name__
    if kind == "CPUOffload":  # of FSDP1
        return Offload(bool(value.offload_params))
    if kind == "CPUOffloadPolicy":
        return Offload(True, bool(value.pin_memory))
    if kind == "OffloadPolicy":
        return Offload()
    raise ConfigurationError(f"cpu_offload must be True, False or a CPUOffloadPolicy, got {shown(value)}.")


def state_dict_type(value: Any) -> Any:
    """Return "FULL_STATE_DICT" or "SHARDED_STATE_DICT"."""
    if value is None:
        return "SHARDED_STATE_DICT"
    name = _word("state_dict_type", value, _STATE_DICT_TYPES)
    if name == "LOCAL_STATE_DICT":
        raise ConfigurationError(
            "state_dict_type='LOCAL_STATE_DICT' has no equivalent in FSDP2. Known: FULL_STATE_DICT, SHARDED_STATE_DICT."
        )
    return name


def mixed_precision(value: Any) -> Any:
    """Return a `MixedPrecisionPolicy` from any accepted form."""
    kind = type(value).__name__
    if kind == "MixedPrecisionPolicy":
        return value
    fields: dict[str, Any]
    if kind == "MixedPrecision":
        fields = _fields_of_fsdp1(value)
    elif isinstance(value, dict):
        fields = {name: _dtype(name, dtype) for name, dtype in value.items()}
    elif isinstance(value, (str, torch.dtype)):
        # Sums of gradients over many ranks are too inexact in 16 bits.
        fields = {"param_dtype": _dtype("mixed_precision_policy", value), "reduce_dtype": torch.float32}
    else:
        raise ConfigurationError(
            f"mixed_precision_policy must be a MixedPrecisionPolicy, its fields in a dict, or a name (bf16, fp16, "
            f"fp32), got {shown(value)}."
        )
    from torch.distributed.fsdp import MixedPrecisionPolicy

    for name in fields:
        if name not in MixedPrecisionPolicy.__dataclass_fields__:
            raise ConfigurationError(unknown("field of mixed_precision_policy", name, _policy_fields()))
    return MixedPrecisionPolicy(**fields)


def wrap_policy(value: Any) -> Any:
    """Return a name of `auto_wrap_policy`, a function, or the classes (or their names) in a list."""
    if value is None or isinstance(value, type):
        return None if value is None else [value]
    function = value.func if isinstance(value, functools.partial) else value
    if getattr(function, "__name__", "") == "transformer_auto_wrap_policy" and function is value:
        return "transformer_based_wrap"  # without its arguments, the function names no classes
    if isinstance(value, str):
        if value.lower() not in _POLICIES:
            raise ConfigurationError(
                unknown("auto_wrap_policy", value, _POLICIES) + " To name classes, give a list of their names."
            )
        return value.lower()
    if callable(value):
        return value
    if isinstance(value, Iterable) and all(isinstance(item, (str, type)) for item in value):
        return list(value)
    raise ConfigurationError(
        f"auto_wrap_policy must be one of {', '.join(_POLICIES)}, classes or their names, or a function of "
        f"(module, recurse, nonwrapped_numel), got {shown(value)}."
    )


def _strategy_named(value: Any) -> Strategy:
    name = _word("sharding_strategy", value, _STRATEGIES)
    if name == "NO_SHARD":
        raise ConfigurationError(
            "sharding_strategy='NO_SHARD' is not supported: it is the same as DDP. Leave the plugin out "
            "to train with DDP."
        )
    return Strategy(name, name in ("FULL_SHARD", "HYBRID_SHARD"))


def _reshard(value: Any) -> Strategy | bool | int | None:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if value < 2:
            raise ConfigurationError(
                f"reshard_after_forward must be True, False or a number of ranks of at least 2, got {shown(value)}."
            )
        return value
    if isinstance(value, str) and value.lower() in _TEXT_FLAGS:
        return _TEXT_FLAGS[value.lower()]
    return _strategy_named(value)


def _contradiction(sharding_strategy: Any, reshard_after_forward: Any) -> ConfigurationError:
    return ConfigurationError(
        f"sharding_strategy={sharding_strategy!s} and reshard_after_forward={reshard_after_forward!s} contradict each "
        "other. Give reshard_after_forward only."
    )


def _word(option: str, value: Any, numbered: dict[int, str]) -> str:
    """Return the name of an enum's member, given as the member, its name or its number."""
    text = str(getattr(value, "name", value)).upper()
    if text.isdigit() and not isinstance(value, bool):
        text = numbered.get(int(text), text)
    if text not in numbered.values():
        raise ConfigurationError(unknown(option, value, numbered.values()))
    return text


def _dtype(name: str, value: Any) -> Any:
    if name == "cast_forward_inputs" or value is None or isinstance(value, torch.dtype):
        return value
    if str(value).lower() not in _DTYPES:
        raise ConfigurationError(unknown(name, value, _DTYPES))
    return _DTYPES[str(value).lower()]


def _policy_fields() -> list[str]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return [field.name for field in dataclasses.fields(MixedPrecisionPolicy)]


def _fields_of_fsdp1(policy: Any) -> dict[str, Any]:
    if policy.buffer_dtype is not None and policy.buffer_dtype != torch.float32:
        raise ConfigurationError(
            f"MixedPrecision(buffer_dtype={policy.buffer_dtype}): FSDP2 leaves buffers in their own type. Convert them "
            "yourself, and leave buffer_dtype out."
        )
    if policy.keep_low_precision_grads:
        raise ConfigurationError(
            "MixedPrecision(keep_low_precision_grads=True): FSDP2 keeps gradients in the type of the weights. "
            "Leave it out."
        )
    return {
        "param_dtype": policy.param_dtype,
        "reduce_dtype": policy.reduce_dtype,
        "cast_forward_inputs": bool(policy.cast_forward_inputs),
    }


def _check_state_configs(plugin: Any) -> None:
    for name in ("state_dict_config", "optim_state_dict_config"):
        config = getattr(plugin, name)
        if config is None:
            continue
        if not hasattr(config, "offload_to_cpu"):
            raise ConfigurationError(f"{name} must be one of torch.distributed.fsdp's StateDictConfig, got {config!r}.")
        if getattr(config, "rank0_only", True) is not True:
            raise ConfigurationError(
                f"{name}={config!r} is not supported: only the main process holds a whole state (rank0_only=True). "
                "To get one, call accelerator.get_state_dict(model)."
            )
