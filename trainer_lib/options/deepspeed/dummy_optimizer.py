"""Stand-ins for the optimizer and the schedule that a DeepSpeed config describes."""

from collections.abc import Callable, Iterable
from typing import Any

_DEFAULT_LR = float("0.001")  # an object of its own, so that a script's 0.001 is known to be given


class DummyOptim:
    """Stands for the optimizer in the section `optimizer` of a DeepSpeed config; `prepare` replaces it.

    Args:
        params: The parameters, or groups of them.
        lr: The learning rate, where the config says "auto".
        weight_decay: The weight decay, where the config says "auto".
        **kwargs: Further values for the section that are "auto", such as `betas`.

    Example:
        >>> import torch
        >>> DummyOptim(torch.nn.Linear(2, 1).parameters(), lr=1e-3).lr
        0.001
    """

    kwargs: dict[str, Any]
    lr: float
    weight_decay: float

    def __init__(self, params: Iterable[Any], lr: float = _DEFAULT_LR, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params: list[Any] = list(params)
        self.lr, self.weight_decay, self.kwargs = lr, weight_decay, kwargs

    @property
    def given(self) -> dict[str, Any]:
        """The values of the section that the script gave, by their names in it."""
        values = {"lr": None if self.lr is _DEFAULT_LR else self.lr, "weight_decay": self.weight_decay or None}
        return {name: value for name, value in (values | self.kwargs).items() if value is not None}


class DummyScheduler:
    """Stands for the schedule in the section `scheduler` of a DeepSpeed config; `prepare` replaces it.

    Args:
        optimizer: The optimizer or `DummyOptim` that it follows.
        total_num_steps: The number of optimizer steps, where the config says "auto".
        warmup_num_steps: The optimizer steps of the warm-up, where the config says "auto".
        lr_scheduler_callable: Makes the schedule from the optimizer, if the config has no section `scheduler`.
        **kwargs: Further values for the section that are "auto".
    """

    total_num_steps: int | None
    warmup_num_steps: int
    kwargs: dict[str, Any]
    lr_scheduler_callable: Callable[[Any], Any] | None

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps, self.warmup_num_steps = total_num_steps, warmup_num_steps
        self.lr_scheduler_callable, self.kwargs = lr_scheduler_callable, kwargs

    @property
    def given(self) -> dict[str, Any]:
        """The values of the section that the script gave, by their names in it."""
        values = {"total_num_steps": self.total_num_steps, "warmup_num_steps": self.warmup_num_steps or None}
        return {name: value for name, value in (values | self.kwargs).items() if value is not None}
