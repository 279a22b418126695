"""This file is the choice of a strategy: which one a world of processes needs."""

from collections.abc import Callable

import torch

from trainer_lib.options.distributed import DistributedDataParallelKwargs
from trainer_lib.options.kinds import DistributedType
from trainer_lib.process_group import ProcessGroup
from trainer_lib.strategies.base import SingleProcess
from trainer_lib.strategies.replicate import Replicate

# A new engine is a file in this package and a line here.
_STRATEGIES: dict[str, Callable[..., SingleProcess]] = {"single": SingleProcess, "replicate": Replicate}


def choose_strategy(
    distributed_type: DistributedType,
    group: ProcessGroup,
    device: torch.device,
    ddp: DistributedDataParallelKwargs | None = None,
) -> SingleProcess:
    """Return the strategy for a world: DDP wherever processes were started together, if only one."""
    name = "single" if distributed_type == DistributedType.NO else "replicate"
    return _STRATEGIES[name](group, device, ddp)
