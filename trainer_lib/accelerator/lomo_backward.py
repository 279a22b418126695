"""Backward with LOMO, an optimizer that updates each weight as soon as its gradient is computed."""

import sys
from collections.abc import Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from trainer_lib.foundation.errors import ConfigurationError, MissingPackageError, UnsupportedError
from trainer_lib.foundation.imports import is_lomo_available, pip_install
from trainer_lib.optimizer import AcceleratedOptimizer


def lomo_backward(
    optimizers: Sequence[AcceleratedOptimizer], loss: Tensor, learning_rate: float, has_other_ranks: bool, steps: int
) -> None:
    """Compute gradients and update the weights of the prepared LOMO optimizer one by one."""
    optimizer = _fused(optimizers)
    if isinstance(learning_rate, bool) or not isinstance(learning_rate, Real):
        raise ConfigurationError(f"learning_rate must be a number (got {learning_rate!r}).")
    for is_used, conflict in (
        (has_other_ranks, "several ranks: each rank would update with its own gradients only"),
        (steps > 1, "gradient accumulation: it keeps no gradients to add to"),
        (optimizers[0].scaler is not None, "the loss scaler of fp16: it brings its own for models in fp16"),
    ):
        if is_used:
            raise UnsupportedError(f"LOMO does not work with {conflict}.")
    optimizer.fused_backward(loss, learning_rate)


def is_lomo(optimizer: AcceleratedOptimizer) -> bool:
    """Whether a prepared optimizer is `Lomo` or `AdaLomo` of lomo_optim."""
    package = sys.modules.get("lomo_optim")
    return package is not None and isinstance(optimizer.optimizer, (package.Lomo, package.AdaLomo))


def _fused(optimizers: Sequence[AcceleratedOptimizer]) -> Any:
    if not is_lomo_available():
        raise MissingPackageError(f"lomo_backward needs a LOMO optimizer: {pip_install('lomo-optim')}.")
    fused = [prepared.optimizer for prepared in optimizers if is_lomo(prepared)]
    if len(fused) != 1 or len(optimizers) != 1:
        raise ConfigurationError(
            f"lomo_backward needs one prepared optimizer, Lomo or AdaLomo of lomo_optim (prepared: "
            f"{', '.join(type(prepared.optimizer).__name__ for prepared in optimizers) or 'none'})."
        )
    return fused[0]
