"""An error for parameters without a gradient, where DDP waits for the gradients of all parameters."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from trainer_lib.state.partial_state import PartialState


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
        with_gradient = {p.grad is not None for p in replica.module.parameters() if p.requires_grad}
        if with_gradient == {True, False}:
            from trainer_lib.strategies.ddp.ddp import unused_parameters_error

            raise unused_parameters_error(replica, PartialState().process_index)
