"""States that an optimizer's constructor made, before any step."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def is_initial(state: Mapping[str, Any]) -> bool:
    """Whether an optimizer's state of one weight is from its constructor: no step, and the same number everywhere.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> is_initial(torch.optim.Adagrad([weight]).state[weight])
        True
    """
    values = [value for name, value in state.items() if name != "step"]
    are_tensors = all(isinstance(value, Tensor) and value.numel() for value in values)
    return state.get("step") == 0 and are_tensors and all(bool((v == v.flatten()[0]).all()) for v in values)
