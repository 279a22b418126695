"""`ZeroOptimizer`: the optimizer of a script, stepped by ZeRO on this rank's shards."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer_lib.foundation.errors import PreparationError, UnsupportedError
from trainer_lib.strategies.deepspeed.zero_shards import ZeroShards


class ZeroOptimizer(Optimizer):
    """An optimizer whose parameter groups hold this rank's shards, once its model is prepared.

    Args:
        optimizer: The optimizer of the script; its groups and options stay the same objects.
        before_step: Called with the shards when their gradients are complete, before they are used.
    """

    _step_supports_amp_scaling = False  # torch's name: the scaler decides about a step, for fused optimizers too

    def __init__(self, optimizer: Optimizer, before_step: Callable[[ZeroShards], None]) -> None:
        # Not super().__init__: the parameter groups are the wrapped optimizer's.
        self.optimizer = optimizer
        self.shards: ZeroShards | None = None
        self._before_step = before_step

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The wrapped optimizer's state."""
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The wrapped optimizer's parameter groups, which hold this rank's shards."""
        if self.shards is not None:
            self.shards.show_in_groups()
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The wrapped optimizer's defaults."""
        return self.optimizer.defaults

    def collect_gradients(self) -> None:
        """Complete the gradients of the window. All ranks call it."""
        if self.shards is not None:
            self.shards.reduce_gradients()

    def share_overflow(self, flags: Mapping[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        """Return whether gradients of any rank overflowed (fp16), out of the flags for this rank's shards."""
        assert self.shards is not None  # since there are gradients
        return {device: self.shards.group.all_reduce(flag) for device, flag in flags.items()}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the weights on all ranks; without a backward do nothing, as torch's optimizers do.

        Raises:
            PreparationError: If its model is not prepared.
            UnsupportedError: If it gets a closure.
        """
        if closure is not None:
            raise UnsupportedError(
                "optimizer.step(closure) does not work with DeepSpeed: ZeRO reduces the gradients before the step. "
                "Compute the loss and call accelerator.backward(loss), then step()."
            )
        if self.shards is None:
            raise PreparationError(
                f"This {type(self.optimizer).__name__} was prepared, and its model was not: DeepSpeed needs both. Give "
                "prepare() the model too."
            )
        if not self.shards.has_gradients:
            return
        self.shards.reduce_gradients()
        self._before_step(self.shards)
        self.shards.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        if self.shards is None:
            self.optimizer.zero_grad(set_to_none)
        else:
            self.shards.drop_gradients()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise: ZeRO has laid out its shards.

        Raises:
            UnsupportedError: Once the model is prepared.
        """
        if self.shards is not None:
            raise UnsupportedError(
                "add_param_group does not work after prepare() with DeepSpeed: its shards are laid out. Add the group "
                "before."
            )
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's shards."""
        if self.shards is not None:
            self.shards.show_in_groups()
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this rank's shards."""
        if self.shards is not None:
            self.shards.show_in_groups()
        self.optimizer.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        """Return another attribute of the wrapped optimizer."""
        if name == "optimizer":  # not set yet while unpickling
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        """Return the wrapped optimizer's representation."""
        return f"ZeroOptimizer({self.optimizer!r})"
