"""An error for parameters without a gradient, where DDP waits for the gradients of all parameters."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from trainer_lib.foundation.errors import ConfigurationError

_SHOWN = 5


def check_all_used(models: Sequence[nn.Module]) -> None:
    """Check after the backward pass that all parameters of replicated models have gradients, unless DDP allows less.

    torch would report it one update later, when the gradients of other parameters were not averaged either.

    Raises:
        ConfigurationError: If some parameters have no gradient; it names them.
    """
    for model in models:
        replica: Any = model
        if getattr(replica, "find_unused_parameters", True) or getattr(replica, "static_graph", False):
            continue
        trained = {name: parameter for name, parameter in replica.module.named_parameters() if parameter.requires_grad}
        unused = [name for name, parameter in trained.items() if parameter.grad is None]
        if unused and len(unused) < len(trained):
            more = ", …" if len(unused) > _SHOWN else ""
            raise ConfigurationError(
                f"{len(unused)} of the {len(trained)} parameters of {type(replica.module).__name__} got no gradient: "
                f"{', '.join(unused[:_SHOWN])}{more}. DDP waits for the gradients of all parameters. Freeze those "
                "that the loss does not depend on (requires_grad_(False)), or, if they change from batch to batch, "
                "give TrainingArguments(ddp=DistributedDataParallelKwargs(find_unused_parameters=True))."
            )
