"""This file is how the arguments of `Accelerator` become its parts, and which of them are refused."""

import inspect
from collections.abc import Sequence
from typing import Any, TypeVar

from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError, unknown
from trainer_lib.options.base import KwargsHandler, check_flag
from trainer_lib.options.compile_options import TorchDynamoPlugin
from trainer_lib.options.data_options import DataLoaderConfiguration
from trainer_lib.options.ddp_options import DistributedDataParallelKwargs, InitProcessGroupKwargs
from trainer_lib.options.enums import DynamoBackend, RNGType
from trainer_lib.options.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.options.precision_options import AutocastKwargs, GradScalerKwargs
from trainer_lib.options.profiler_options import ProfileKwargs

_HANDLERS = (AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs, InitProcessGroupKwargs, ProfileKwargs)
_OLDER_DATA_OPTIONS = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler")
_NOT_YET = {
    "deepspeed_plugin": "DeepSpeed",
    "deepspeed_plugins": "DeepSpeed",
    "torch_tp_plugin": "tensor parallelism",
    "megatron_lm_plugin": "Megatron-LM",
}
Handler = TypeVar("Handler", bound=KwargsHandler)


class Handlers:
    """The `kwargs_handlers` of an `Accelerator`, found by their type."""

    def __init__(self, handlers: Sequence[KwargsHandler]) -> None:
        self._by_type: dict[type, KwargsHandler] = {}
        if not isinstance(handlers, (list, tuple)):
            raise ConfigurationError(
                f"kwargs_handlers must be a list of option objects, got {type(handlers).__name__}. For one: "
                "kwargs_handlers=[AutocastKwargs()]."
            )
        for handler in handlers:
            if not isinstance(handler, _HANDLERS):
                raise ConfigurationError(
                    unknown("kwargs handler", type(handler).__name__, [kind.__name__ for kind in _HANDLERS])
                )
            if type(handler) in self._by_type:
                raise ConfigurationError(f"{type(handler).__name__} is given twice in kwargs_handlers. Give one.")
            self._by_type[type(handler)] = handler

    def get(self, kind: type[Handler]) -> Handler | None:
        """Return the handler of a type, if it was given."""
        handler = self._by_type.get(kind)
        return handler if isinstance(handler, kind) else None


def check_generators(rng_types: Any) -> None:
    """Raise unless `rng_types` is a list of kinds of generators, or `None`."""
    if rng_types is None:
        return
    if isinstance(rng_types, str) or not isinstance(rng_types, Sequence):
        raise ConfigurationError(f"rng_types must be a list of kinds, got {rng_types!r}. For one: rng_types=['torch'].")
    for kind in rng_types:
        RNGType.read("kind of generator in rng_types", kind)


def refuse_unsupported(arguments: dict[str, Any]) -> None:
    """Raise for an argument that asks for a capability this version lacks."""
    for name, capability in _NOT_YET.items():
        if arguments.get(name) is not None and str(arguments[name]).lower() != "no":
            raise UnsupportedError(
                f"Accelerator({name}=…) asks for {capability}, which this version does not have. Leave it out."
            )


def check_names(arguments: dict[str, Any], constructor: Any) -> None:
    """Raise for an argument that the constructor does not know."""
    known = [name for name in inspect.signature(constructor).parameters if name not in ("self", "older_arguments")]
    for name in arguments:
        if name not in (*_OLDER_DATA_OPTIONS, *_NOT_YET, "fp16", "logging_dir"):
            raise ConfigurationError(unknown("argument", name, known))


def data_configuration(
    given: DataLoaderConfiguration | None, older_arguments: dict[str, Any]
) -> DataLoaderConfiguration:
    """Return the data options, whether given as one object or by their older names."""
    older = {name: older_arguments[name] for name in _OLDER_DATA_OPTIONS if name in older_arguments}
    if given is not None and older:
        raise ConfigurationError(
            f"dataloader_config and {', '.join(older)} are both given. Put {', '.join(older)} into dataloader_config."
        )
    return given or DataLoaderConfiguration(**older)


def precision_name(mixed_precision: Any, older_arguments: dict[str, Any]) -> Any:
    """Return the precision asked for, whether by `mixed_precision` or by the older `fp16=True`."""
    fp16 = older_arguments.get("fp16")
    if fp16 is None:
        return mixed_precision
    check_flag("fp16", fp16)
    asked = "fp16" if fp16 else "no"
    if mixed_precision is not None and str(mixed_precision) != asked:
        raise ConfigurationError(f"fp16={fp16} and mixed_precision={mixed_precision!r} contradict each other.")
    return asked


def check_compilation(
    plugin: TorchDynamoPlugin, ddp: DistributedDataParallelKwargs | None, fsdp: FullyShardedDataParallelPlugin | None
) -> None:
    """Raise for ways to compile that cannot work with how processes share a model."""
    if not plugin.is_active:
        return
    if ddp is not None and ddp.bucket_cap_mb < 1:
        raise ConfigurationError(
            f"bucket_cap_mb={ddp.bucket_cap_mb} and torch.compile: torch cuts compiled graphs by DDP's buckets, and "
            "the first one has a megabyte. Give a bucket_cap_mb of at least 1."
        )
    if fsdp is not None and fsdp.activation_checkpointing and plugin.backend == DynamoBackend.EAGER:
        raise ConfigurationError(
            "activation_checkpointing=True and the dynamo backend 'eager': there torch computes activations again with "
            "other random numbers, so that a model with dropout gets wrong gradients. Use 'aot_eager' or 'inductor'."
        )
    if fsdp is not None and plugin.fullgraph and not plugin.use_regional_compilation:
        raise ConfigurationError(
            "fullgraph=True cannot hold for a whole model under FSDP: its weights are gathered in between, which is no "
            "part of a graph. Add use_regional_compilation=True, so that each block is one graph."
        )
