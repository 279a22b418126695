"""This file is groups of parameters that are trained each in its own way."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters that are trained otherwise than the rest; what is left at `None` is as for the rest.

    Args:
        pattern: Which parameters: a shell pattern (`fnmatch`) over their names, such as "encoder.*" or "*.bias".
        learning_rate: Their learning rate.
        weight_decay: Their weight decay.
        frozen: Leave them as they are.
    """

    pattern: str
    learning_rate: float | None = None
    weight_decay: float | None = None
    frozen: bool = False
