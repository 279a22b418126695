"""Translation of FSDP1's options into those of FSDP2, with a note for each value that FSDP2 has in another form.

Values may be texts, numbers or objects of `torch.distributed.fsdp`. Objects are recognized by their class names, so
that the check does not import that package (0.7 s).
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from trainer_lib.foundation.environment import str_to_bool
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, unknown

_STRATEGIES = {1: "FULL_SHARD", 2: "SHARD_GRAD_OP", 3: "NO_SHARD", 4: "HYBRID_SHARD", 5: "HYBRID_SHARD_ZERO2"}
_STATE_DICT_TYPES = {1: "FULL_STATE_DICT", 2: "LOCAL_STATE_DICT", 3: "SHARDED_STATE_DICT"}
_PREFETCHES = {1: "BACKWARD_PRE", 2: "BACKWARD_POST", 3: "NO_PREFETCH"}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_POLICIES = ("transformer_based_wrap", "size_based_wrap", "no_wrap")

# FSDP1's strategies in FSDP2's words. FULL_SHARD is the default of both, so it needs no note.
_WITHIN_MACHINES = "and ParallelismConfig(dp_replicate_size=MACHINES, dp_shard_size=RANKS_PER_MACHINE)"
_IN_FSDP2 = {
    "SHARD_GRAD_OP": "reshard_after_forward=False",
    "NO_SHARD": "DDP: leave the plugin out",
    "HYBRID_SHARD": f"reshard_after_forward=True {_WITHIN_MACHINES}",
    "HYBRID_SHARD_ZERO2": f"reshard_after_forward=False {_WITHIN_MACHINES}",
}


class EnumName(str):
    """The name of a member of torch's enums; it equals the member too.

    Example:
        >>> from torch.distributed.fsdp import StateDictType
        >>> EnumName("FULL_STATE_DICT") == StateDictType.FULL_STATE_DICT
        True
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        """Whether it is the same text, or the member of this name."""
        return str(self) == str(getattr(other, "name", other)).lstrip("_")

    def __hash__(self) -> int:
        return str.__hash__(self)


class Strategy(NamedTuple):
    """A sharding strategy: FSDP1's name and FSDP2's `reshard_after_forward`."""

    name: str
    reshard_after_forward: bool | int

    @property
    def shards(self) -> bool:
        """Whether weights are sharded; otherwise each rank has them whole, as with DDP."""
        return self.name != "NO_SHARD"

    @property
    def is_hybrid(self) -> bool:
        """Whether weights are sharded within a machine and replicated across machines."""
        return "HYBRID" in self.name


class Offload(NamedTuple):
    """Whether shards are kept in CPU memory, and whether it is pinned."""

    to_cpu: bool = False
    pin_memory: bool = True


class WholeState(NamedTuple):
    """Which ranks get a whole state dict, and where its tensors are."""

    on_all_ranks: bool = False
    on_cpu: bool = True


def launcher_options(options: dict[str, Any], given: set[str], version: Any) -> dict[str, Any]:
    """Return the launcher's options that apply beside those that the script gives.

    A launcher sets options that exclude each other, at their defaults; the script's choice of one excludes the others.

    Args:
        options: What the launcher set, by the names of the plugin's fields.
        given: The fields that the script gives.
        version: The version of FSDP that the script asks for, if it does.
    """
    applying = {name: value for name, value in options.items() if name not in given}
    if given & {"sharding_strategy", "reshard_after_forward"}:
        _drop(applying, "sharding_strategy", "reshard_after_forward")
    elif {"sharding_strategy", "reshard_after_forward"} <= applying.keys():
        is_default = applying["sharding_strategy"].upper() in ("FULL_SHARD", "1")
        for_fsdp2 = (version or options.get("fsdp_version")) == 2
        _drop(applying, "sharding_strategy" if is_default or for_fsdp2 else "reshard_after_forward")
    if given & {"auto_wrap_policy", "transformer_cls_names_to_wrap", "min_num_params"}:
        _drop(applying, "auto_wrap_policy", "transformer_cls_names_to_wrap")
    elif str(applying.get("auto_wrap_policy", "transformer_based_wrap")).lower() != "transformer_based_wrap":
        _drop(applying, "transformer_cls_names_to_wrap")
    if "state_dict_config" in given:
        _drop(applying, "state_dict_type")
    return applying


def _drop(options: dict[str, Any], *names: str) -> None:
    for name in names:
        options.pop(name, None)


def version(value: Any, notes: list[str]) -> int:
    """Return 2, the only version of FSDP here."""
    if str(value) not in ("1", "2"):
        raise ConfigurationError(f"fsdp_version must be 1 or 2 (got {shown(value)}). Both start FSDP2.")
    if str(value) == "1":
        notes.append("fsdp_version=1 is fsdp_version=2")
    return 2


def note_flags(plugin: Any, notes: list[str]) -> None:
    """Note the flags of FSDP1 that FSDP2 has no choice about."""
    if plugin.use_orig_params not in (None, True):
        notes.append("use_orig_params=False is use_orig_params=True (FSDP2 always keeps the model's own parameters)")
    if plugin.limit_all_gathers is not True:
        notes.append("limit_all_gathers=False is left out (FSDP2 needs no such limit)")
    if plugin.cpu_ram_efficient_loading and plugin.sync_module_states is False:
        notes.append("sync_module_states=False is sync_module_states=True (cpu_ram_efficient_loading needs it)")
        plugin.sync_module_states = True


def backward_prefetch(value: Any, notes: list[str]) -> str | None:
    """Return the name of a prefetch of the backward; `None` is FSDP2's own, which is BACKWARD_PRE."""
    if value is None:
        return None
    name = _word("backward_prefetch", value, _PREFETCHES)
    if name == "BACKWARD_POST":
        notes.append(
            "backward_prefetch='BACKWARD_POST' is backward_prefetch='NO_PREFETCH' (FSDP2 gathers the next block's "
            "weights either before a block's backward or when they are needed)"
        )
        return EnumName("NO_PREFETCH")
    return name


def strategy(sharding_strategy: Any, reshard_after_forward: Any, notes: list[str]) -> Strategy:
    """Return the strategy from FSDP1's option, FSDP2's option or both."""
    reshard = _reshard(reshard_after_forward)
    named = None if sharding_strategy is None else _strategy_named(sharding_strategy)
    if isinstance(reshard, Strategy):  # FSDP1's name in FSDP2's option
        if named not in (None, reshard):
            raise _contradiction(sharding_strategy, reshard_after_forward)
        named, reshard = reshard, None
    if named is None:
        return Strategy("SHARD_GRAD_OP" if reshard is False else "FULL_SHARD", True if reshard is None else reshard)
    if reshard is not None and bool(reshard) != bool(named.reshard_after_forward):
        raise _contradiction(sharding_strategy, reshard_after_forward)
    if named.name in _IN_FSDP2 and (reshard is None or not named.shards):
        notes.append(f"sharding_strategy={named.name!r} is {_IN_FSDP2[named.name]}")
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


def state_dict_type(value: Any, config: Any, notes: list[str]) -> str:
    """Return "FULL_STATE_DICT" or "SHARDED_STATE_DICT": the value, or else what a `StateDictConfig` is for."""
    if value is None:
        value = "FULL_STATE_DICT" if type(config).__name__.startswith("Full") else "SHARDED_STATE_DICT"
    name = _word("state_dict_type", value, _STATE_DICT_TYPES)
    if name == "LOCAL_STATE_DICT":
        notes.append("state_dict_type='LOCAL_STATE_DICT' is state_dict_type='SHARDED_STATE_DICT'")
        return EnumName("SHARDED_STATE_DICT")
    return name


def whole_state(name: str, config: Any) -> WholeState:
    """Return where a whole state goes, from one of torch's objects of the option `name`.

    Raises:
        ConfigurationError: If it is another object.
    """
    if config is None:
        return WholeState()
    if not hasattr(config, "offload_to_cpu"):
        raise ConfigurationError(f"{name} must be one of torch.distributed.fsdp's StateDictConfig, got {config!r}.")
    return WholeState(getattr(config, "rank0_only", True) is False, bool(config.offload_to_cpu))


def mixed_precision(value: Any, notes: list[str]) -> Any:
    """Return a `MixedPrecisionPolicy` from any accepted form."""
    kind = type(value).__name__
    if kind == "MixedPrecisionPolicy":
        return value
    fields: dict[str, Any]
    if kind == "MixedPrecision":
        fields = _fields_of_fsdp1(value, notes)
    elif isinstance(value, dict):
        fields = {name: _dtype(name, dtype) for name, dtype in value.items()}
        _note_buffers(fields.pop("buffer_dtype", None), notes)
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
    if isinstance(value, str) and not value.isdigit():
        with contextlib.suppress(ConfigurationError):
            return bool(str_to_bool(value))
    return _strategy_named(value)


def _contradiction(sharding_strategy: Any, reshard_after_forward: Any) -> ConfigurationError:
    return ConfigurationError(
        f"sharding_strategy={sharding_strategy!s} and reshard_after_forward={reshard_after_forward!s} contradict each "
        "other. Give reshard_after_forward only."
    )


def _word(option: str, value: Any, numbered: dict[int, str]) -> EnumName:
    """Return the name of an enum's member, given as the member, its name or its number."""
    text = str(getattr(value, "name", value)).upper().lstrip("_")
    if text.isdigit() and not isinstance(value, bool):
        text = numbered.get(int(text), text)
    if text not in numbered.values():
        raise ConfigurationError(unknown(option, value, numbered.values()))
    return EnumName(text)


def _dtype(name: str, value: Any) -> Any:
    if name == "cast_forward_inputs" or value is None or isinstance(value, torch.dtype):
        return value
    if str(value).lower() not in _DTYPES:
        raise ConfigurationError(unknown(name, value, _DTYPES))
    return _DTYPES[str(value).lower()]


def _policy_fields() -> list[str]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return [field.name for field in dataclasses.fields(MixedPrecisionPolicy)]


def _fields_of_fsdp1(policy: Any, notes: list[str]) -> dict[str, Any]:
    _note_buffers(policy.buffer_dtype, notes)
    if policy.keep_low_precision_grads:
        notes.append(
            "MixedPrecision(keep_low_precision_grads=True) is MixedPrecisionPolicy() (FSDP2 keeps gradients in the "
            "type of the weights)"
        )
    return {
        "param_dtype": policy.param_dtype,
        "reduce_dtype": policy.reduce_dtype,
        # FSDP1 casts the inputs of the whole model by default, and each block passes that type on.
        "cast_forward_inputs": bool(policy.cast_forward_inputs or policy.cast_root_forward_inputs),
    }


def _note_buffers(dtype: Any, notes: list[str]) -> None:
    if dtype not in (None, torch.float32):
        notes.append(f"buffer_dtype={dtype} is left out (FSDP2 keeps buffers in their own type)")
