"""This file is parameters without a gradient, where the processes wait for the gradients of all of them."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from trainer_lib.foundation.errors import ConfigurationError

_SHOWN = 5


def check_all_used(models: Sequence[nn.Module]) -> None:
    """Check, once gradients are there, that replicated models got all of them, or were told that they may not.

    torch says so one update later, when the gradients of other parameters were not averaged either.

    Raises:
        ConfigurationError: If one did not; with the names of the parameters.
    """
    for model in models:
        replica: Any = model
        if getattr(replica, "find_unused_parameters", True) or getattr(replica, "static_graph", False):
            continue
        trained = {name: one for name, one in replica.module.named_parameters() if one.requires_grad}
        unused = [name for name, one in trained.items() if one.grad is None]
        if unused and len(unused) < len(trained):
            more = ", …" if len(unused) > _SHOWN else ""
            raise ConfigurationError(
                f"{len(unused)} of the {len(trained)} parameters of {type(replica.module).__name__} got no gradient: "
                f"{', '.join(unused[:_SHOWN])}{more}. Several processes wait for all. Freeze what the loss does "
                "not depend on (requires_grad_(False)), or, if that changes from batch to batch, give "
                "TrainingArguments(ddp=DistributedDataParallelKwargs(find_unused_parameters=True))."
            )
