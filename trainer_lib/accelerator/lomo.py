"""This file is LOMO: an optimizer that updates each weight in backward, as soon as its gradient is there."""

from collections.abc import Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from trainer_lib.foundation.errors import ConfigurationError, MissingPackageError, UnsupportedError
from trainer_lib.foundation.imports import is_lomo_available
from trainer_lib.optimizer import AcceleratedOptimizer


def lomo_backward(
    optimizers: Sequence[AcceleratedOptimizer], loss: Tensor, learning_rate: float, num_processes: int, steps: int
) -> None:
    """Compute gradients and update the weights of the prepared LOMO optimizer with them, one after the other."""
    optimizer = _fused(optimizers)
    if isinstance(learning_rate, bool) or not isinstance(learning_rate, Real):
        raise ConfigurationError(f"learning_rate must be a number, got {learning_rate!r}.")
    for is_asked_for, what in (
        (num_processes > 1, "several processes: each would update with gradients of its own"),
        (steps > 1, "gradient accumulation: there are no gradients to add to"),
        (optimizers[0].scaler is not None, "the loss scaler of fp16: LOMO has its own for models in fp16"),
    ):
        if is_asked_for:
            raise UnsupportedError(f"LOMO cannot work with {what}.")
    optimizer.fused_backward(loss, learning_rate)


def _fused(optimizers: Sequence[AcceleratedOptimizer]) -> Any:
    if not is_lomo_available():
        raise MissingPackageError("lomo_backward needs a LOMO optimizer: `pip install lomo-optim`.")
    from lomo_optim import AdaLomo, Lomo  # pyright: ignore[reportMissingImports]

    found = [one.optimizer for one in optimizers if isinstance(one.optimizer, (Lomo, AdaLomo))]
    if len(found) != 1 or len(optimizers) != 1:
        raise ConfigurationError(
            f"lomo_backward needs one prepared optimizer, Lomo or AdaLomo of lomo_optim; prepared are: "
            f"{', '.join(type(one.optimizer).__name__ for one in optimizers) or 'none'}."
        )
    return found[0]
