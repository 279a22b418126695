"""`refuse_unbound`: an optimizer of weights that sharding has replaced raises in its first step."""

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trainer_lib.foundation.errors import PreparationError


def refuse_unbound(replacements: Mapping[Tensor, Tensor], method: str) -> Any:
    """Have the first step of any optimizer raise if it holds a weight that was replaced; return torch's handle.

    Such an optimizer was created before its model was prepared and not given to `prepare`. Its weights get no
    gradients, so its steps would change nothing.

    Args:
        replacements: The new parameter of each replaced one that is still held.
        method: The name of what replaced them.
    """
    checked: WeakSet[Optimizer] = WeakSet()

    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if optimizer in checked:
            return
        if any(parameter in replacements for group in optimizer.param_groups for parameter in group["params"]):
            name = type(optimizer).__name__
            raise PreparationError(
                f"This {name} holds the weights from before prepare(model), and {method} has replaced them, so its "
                f"steps would change nothing. Prepare it too: model, optimizer = accelerator.prepare(model, optimizer)."
            )
        checked.add(optimizer)

    return register_optimizer_step_pre_hook(check)
