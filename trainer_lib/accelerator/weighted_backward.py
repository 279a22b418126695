"""Backward of losses with a weight: sums over items, divided by the weight of the whole accumulation window."""

from collections.abc import Sequence
from numbers import Real
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from trainer_lib.accelerator.engine import Engine
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.optimizer import AcceleratedOptimizer
from trainer_lib.state.accumulation_window import Share, nan_if_negative, sum_from_mean


class WeightedBackward:
    """Computes the gradients of losses with a weight, and reduces the weight across ranks with them.

    Args:
        engine: The engine that trains.
    """

    def __init__(self, engine: Engine) -> None:
        self._prepared, self._window = engine.prepared, engine.window
        self._strategy, self._precision = engine.strategy, engine.precision

    def run(self, loss: Tensor, weight: Any, optimizer: Any, is_mean: bool, kwargs: dict[str, Any]) -> None:
        """Compute gradients of a loss that is a sum over `weight` items, or their mean."""
        window = self._window
        reduces = window.state.sync_gradients and not window.is_alone
        share = self._share(optimizer)
        before, weight, divisor = share.local, _checked_weight(weight), share.nominal
        share.local = before + weight
        if is_mean and type(weight) is float and weight > 0:
            divisor /= weight  # of the mean: the sum would take two operations more
        elif is_mean:
            loss = sum_from_mean(loss, weight)
        if reduces:
            extra = () if window.message is None else window.message.to_floats()
            self._strategy.send_with_gradients([share.local, *extra])
        window.begin_backward()
        try:
            self._precision.backward(loss, window.is_fresh, divisor, **kwargs)
        except BaseException:
            # The script may retry with a smaller batch; the failed one must not count.
            share.local = before
            self._strategy.send_with_gradients([])
            raise
        if reduces:
            share.total, *means = self._strategy.received_averages()
            if window.message is not None:
                window.message.receive(means)

    def _share(self, optimizer: AcceleratedOptimizer | Sequence[AcceleratedOptimizer] | None) -> Share:
        prepared = self._prepared.optimizers
        optimizers = tuple(prepared if optimizer is None else _listed(optimizer))
        share = self._window.share_of(optimizers)
        if share is not None:  # of an earlier micro-batch
            return share
        if optimizer is None and len(optimizers) != 1:
            raise ConfigurationError(
                f"backward(loss, weight=…) needs optimizer=: {len(optimizers)} optimizers are prepared. Call "
                "backward(loss_sum, weight=n, optimizer=the_prepared_optimizer)."
            )
        for candidate in optimizers:
            if not isinstance(candidate, AcceleratedOptimizer):
                raise ConfigurationError(
                    f"optimizer={type(candidate).__name__} is not prepared. Give the object that prepare() returned."
                )
        if len(prepared) == 1 and optimizers[0].holds_gradients:
            raise ConfigurationError(
                "backward got a loss with weight= in an update that has losses without. Give weight= with all losses "
                "of an update, or with none."
            )
        return self._window.open_share(optimizers)


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, Optimizer) else list(value)


def _checked_weight(weight: Any) -> float | Tensor:
    if type(weight) is float and 0 <= weight < float("inf"):  # first: by far the most frequent
        return weight
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise ConfigurationError(f"weight must be one number (got a tensor of shape {tuple(weight.shape)}).")
        if weight.device.type != "cpu":
            return nan_if_negative(weight.detach().reshape(()).float())
        weight = weight.item()
        if weight != weight:
            return weight
    if isinstance(weight, bool) or not isinstance(weight, Real) or not 0 <= float(weight) < float("inf"):
        raise ConfigurationError(f"weight must be a finite number of at least 0 (got {weight!r}).")
    return float(weight)
