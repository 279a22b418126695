"""Choose the strategy for a world of ranks."""

import torch

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options.ddp_options import DistributedDataParallelKwargs
from trainer_lib.options.enums import DistributedType
from trainer_lib.options.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.parallelism_config import ParallelismConfig
from trainer_lib.process_group import ProcessGroup
from trainer_lib.strategies.base import Strategy
from trainer_lib.strategies.ddp.ddp import DDP
from trainer_lib.strategies.single_device import SingleDevice


def choose_strategy(
    distributed_type: DistributedType,
    group: ProcessGroup,
    device: torch.device,
    ddp: DistributedDataParallelKwargs | None = None,
    fsdp: FullyShardedDataParallelPlugin | None = None,
    parallelism: ParallelismConfig | None = None,
    mixed_precision: str = "no",
) -> Strategy:
    """Return the strategy: FSDP if `fsdp` asks for it, DDP wherever a launcher started ranks (even one), else none.

    Raises:
        ConfigurationError: If options of one strategy are given to another.
    """
    if fsdp is not None and parallelism is not None:
        if ddp is not None:
            raise ConfigurationError(
                "DistributedDataParallelKwargs belong to DDP, and this run shards its models (FSDP). Leave them out."
            )
        from trainer_lib.strategies.fsdp.fsdp import FSDP

        return FSDP(group, device, fsdp, parallelism, mixed_precision)
    return (SingleDevice if distributed_type == DistributedType.NO else DDP)(group, device, ddp)
