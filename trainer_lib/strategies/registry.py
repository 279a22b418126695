"""Choose the strategy for a world of ranks."""

import torch

from trainer_lib.logging import get_logger
from trainer_lib.options.ddp_options import DistributedDataParallelKwargs
from trainer_lib.options.enums import DistributedType
from trainer_lib.options.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.parallelism_config import ParallelismConfig
from trainer_lib.process_group import ProcessGroup
from trainer_lib.strategies.base import Strategy
from trainer_lib.strategies.ddp.ddp import DDP
from trainer_lib.strategies.single_device import SingleDevice

_logger = get_logger(__name__)


def choose_strategy(
    distributed_type: DistributedType,
    group: ProcessGroup,
    device: torch.device,
    ddp: DistributedDataParallelKwargs | None = None,
    fsdp: FullyShardedDataParallelPlugin | None = None,
    parallelism: ParallelismConfig | None = None,
    mixed_precision: str = "no",
) -> Strategy:
    """Return the strategy: FSDP if `fsdp` asks for it, else DDP if a launcher started ranks (even one), else none."""
    if fsdp is not None and parallelism is not None:
        if ddp is not None:
            _logger.warning_once(
                "DistributedDataParallelKwargs are ignored: FSDP shards the models, and DDP does not run."
            )
        from trainer_lib.strategies.fsdp.fsdp import FSDP

        return FSDP(group, device, fsdp, parallelism, mixed_precision)
    return (SingleDevice if distributed_type == DistributedType.NO else DDP)(group, device, ddp)
