"""Choose the strategy for a world of ranks, or one that another package registered."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.logging import get_logger
from trainer_lib.options.base import KwargsHandler
from trainer_lib.options.enums import DistributedType
from trainer_lib.options.parallel.ddp_options import DistributedDataParallelKwargs
from trainer_lib.options.parallel.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.parallelism_config import ParallelismConfig
from trainer_lib.process_group import ProcessGroup
from trainer_lib.strategies.base import Strategy
from trainer_lib.strategies.single_device import SingleDevice

if TYPE_CHECKING:
    from trainer_lib.options.deepspeed.active_plugin import DeepSpeedPlugins


_logger = get_logger(__name__)

_Class = TypeVar("_Class", bound=type[Strategy])
_registered: dict[type[KwargsHandler], type[Strategy]] = {}


def register_strategy(options: type[KwargsHandler]) -> Callable[[_Class], _Class]:
    """Register your own strategy under the class of its options; `kwargs_handlers=[OPTIONS()]` selects it. A decorator.

    Args:
        options: The class of the options, a subclass of `KwargsHandler`.

    Raises:
        ConfigurationError: If one of them is no such class.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class EchoKwargs(KwargsHandler):
        ...     loud: bool = False
        >>> @register_strategy(EchoKwargs)
        ... class Echo(SingleDevice):
        ...     def distribute(self, model, evaluation_mode=False):
        ...         print("distributed", self.options)
        ...         return model
        >>> from trainer_lib import Accelerator
        >>> model = Accelerator(cpu=True, kwargs_handlers=[EchoKwargs(loud=True)]).prepare(torch.nn.Linear(2, 1))
        distributed EchoKwargs(loud=True)
    """

    def register(strategy: _Class) -> _Class:
        for kind, base in ((options, KwargsHandler), (strategy, Strategy)):
            if not (isinstance(kind, type) and issubclass(kind, base)):
                raise ConfigurationError(f"register_strategy needs a subclass of {base.__name__} (got {kind!r}).")
        _registered[options] = strategy
        return strategy

    return register


def registered_options() -> tuple[type[KwargsHandler], ...]:
    """Return the options of the registered strategies."""
    return tuple(_registered)


def choose_strategy(
    distributed_type: DistributedType,
    group: ProcessGroup,
    device: torch.device,
    ddp: DistributedDataParallelKwargs | None = None,
    fsdp: FullyShardedDataParallelPlugin | None = None,
    parallelism: ParallelismConfig | None = None,
    mixed_precision: str = "no",
    registered: KwargsHandler | None = None,
    data_group: ProcessGroup | None = None,
    deepspeed: "DeepSpeedPlugins | None" = None,
) -> Strategy:
    """Return the strategy that the options ask for, else DDP if there are several ranks, else none.

    Raises:
        ConfigurationError: If the options of a registered strategy come with those of another one.
    """
    if registered is not None:
        if fsdp is not None or ddp is not None:
            raise ConfigurationError(
                f"{type(registered).__name__} selects the strategy {_registered[type(registered)].__name__}, and "
                f"{type(fsdp or ddp).__name__} another one. Give one of them."
            )
        return _registered[type(registered)](group, device, registered)
    if distributed_type == DistributedType.XLA:
        from trainer_lib.strategies.xla import XLA

        _warn_of_unused(ddp, "torch_xla averages the gradients")
        return XLA(group, device)
    if deepspeed is not None and deepspeed.shards:
        from trainer_lib.strategies.deepspeed.deepspeed import DeepSpeed

        _warn_of_unused(ddp, "DeepSpeed reduces the gradients")
        return DeepSpeed(group, device, deepspeed)
    replicas = group if data_group is None else data_group
    if parallelism is not None and (parallelism.pp_enabled or parallelism.tp_enabled):
        replicas = _ranks_of_equal_parts(group, replicas, parallelism)
    if parallelism is not None and parallelism.pp_enabled:
        from trainer_lib.strategies.pipeline_parallel.pipeline_parallel import PipelineParallel

        _warn_of_unused(ddp, "pipeline parallelism spreads the models")
        return PipelineParallel(group, device, fsdp, parallelism, mixed_precision, replicas)
    if parallelism is not None and parallelism.tp_enabled:
        from trainer_lib.strategies.tensor_parallel.tensor_parallel import TensorParallel

        _warn_of_unused(ddp, "tensor parallelism splits the models")
        return TensorParallel(group, device, fsdp, parallelism, mixed_precision, replicas)
    if fsdp is not None and parallelism is not None:
        from trainer_lib.strategies.fsdp.fsdp import FSDP

        _warn_of_unused(ddp, "FSDP shards the models")
        return FSDP(group, device, fsdp, parallelism, mixed_precision)
    # DDP would wait for unused parameters and keep a second copy of the gradients, though a launcher started one rank.
    if group.size == 1 and distributed_type != DistributedType.MEGATRON_LM:  # whose train steps are on DDP's wrapper
        return SingleDevice(group, device, ddp)
    from trainer_lib.strategies.ddp.ddp import DDP

    return DDP(group, device, ddp)


def _ranks_of_equal_parts(
    group: ProcessGroup, data_group: ProcessGroup, parallelism: ParallelismConfig
) -> ProcessGroup:
    """Return the ranks that hold the same part of a model as this one: other data, and other parts of its sequences."""
    shares_sequences = parallelism.cp_enabled or parallelism.sp_enabled
    return group.parts(parallelism.ranks_of_parts) if shares_sequences else data_group


def _warn_of_unused(ddp: DistributedDataParallelKwargs | None, reason: str) -> None:
    if ddp is not None:
        _logger.warning_once("DistributedDataParallelKwargs are ignored: %s, and DDP does not run.", reason)
