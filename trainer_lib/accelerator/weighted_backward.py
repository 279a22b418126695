"""Backward of losses with a weight: sums over items, divided by the weight of the whole accumulation window."""

from collections.abc import Callable, Hashable, Sequence
from numbers import Real
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_lib.accelerator.engine import Engine
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.tensors.pytree import named_leaves
from trainer_lib.modules.module_buffers import no_gradients_of
from trainer_lib.optimizer import AcceleratedOptimizer
from trainer_lib.state.accumulation_window import Share, nan_if_negative, sum_from_mean
from trainer_lib.strategies.base import Surroundings, no_surroundings

_INFINITY = float("inf")


class WeightedLoss(NamedTuple):
    """The loss of a micro-batch.

    Args:
        loss: The sum over its items.
        weight: How many items there are.
        facts: What else is known of it, such as values to log.
    """

    loss: Tensor
    weight: float | Tensor
    facts: Any = None


class WeightedBackward:
    """Computes the gradients of losses with a weight, and reduces the weight across ranks with them.

    Args:
        engine: The engine that trains.
        has_whole_sequences: Whether no other rank has losses that depend on what this rank computes.
    """

    def __init__(self, engine: Engine, has_whole_sequences: bool) -> None:
        self._has_whole_sequences = has_whole_sequences
        self._prepared, self._window = engine.prepared, engine.window
        self._strategy, self._precision = engine.strategy, engine.precision

    def run(self, loss: Tensor, weight: Any, optimizer: Any, is_mean: bool, kwargs: dict[str, Any]) -> None:
        """Compute gradients of a loss that is a sum over `weight` items, or their mean."""
        window = self._window
        reduces = window.state.sync_gradients and not window.is_local
        optimizers = tuple(self._prepared.optimizers if optimizer is None else _listed(optimizer))
        share = window.share_of(optimizers) or self._opened_share(optimizers, is_named=optimizer is not None)
        if type(weight) is not float or not 0 <= weight < _INFINITY:
            weight = _checked_weight(weight)
        before, divisor = share.local, share.nominal
        share.local = before + weight
        if is_mean and type(weight) is float and weight > 0:
            divisor /= weight  # of the mean: the sum would take two operations more
        elif is_mean:
            loss = sum_from_mean(loss, weight)
        if reduces:
            extra = () if window.message is None else window.message.to_floats()
            self._strategy.send_with_gradients([share.local, *extra])
            if optimizers[0].updates_in_backward:  # which needs the weight of all ranks
                self._receive(share)
        window.begin_backward()
        try:
            if type(weight) is float and not weight and self._has_whole_sequences:  # on a device nobody waits
                # A mean of nothing has gradients of NaN, for the parameters of other optimizers too.
                with no_gradients_of(_parameters_of(self._prepared.optimizers)):
                    self._precision.backward(loss, window.is_fresh, divisor, **kwargs)
            else:
                self._precision.backward(loss, window.is_fresh, divisor, **kwargs)
        except BaseException:
            # The script may retry with a smaller batch; the failed one must not count.
            share.local = before
            self._strategy.send_with_gradients([])
            raise
        if reduces and not optimizers[0].updates_in_backward:
            share.total, *means = self._strategy.received_averages()  # inlined `_receive`, for speed
            if window.message is not None:
                window.message.receive(means)

    def run_window(
        self,
        model: nn.Module,
        compute: Callable[[Any], WeightedLoss],
        batches: Sequence[Any],
        around: Surroundings = no_surroundings,
    ) -> list[Any]:
        """Compute the gradients of all micro-batches of a window at once; see `Accelerator.backward_window`."""
        window, optimizers = self._window, tuple(self._prepared.optimizers)
        share = window.share_of(optimizers) or self._opened_share(optimizers, is_named=False)

        def scaled(index: int) -> tuple[Tensor, WeightedLoss]:
            loss, weight, facts = compute(batches[index])
            return self._precision.scale(loss / share.nominal), WeightedLoss(
                loss.detach(), _checked_weight(weight), facts
            )

        self._precision.begin_backward(not any(optimizer.holds_gradients for optimizer in optimizers))
        window.begin_backward()
        losses = self._strategy.run_window(model, scaled, [_shapes(batch) for batch in batches], around)
        share.local = sum((loss.weight for loss in losses), start=share.local)
        if window.state.sync_gradients and not window.is_local:
            values: list[Any] = [share.local]
            if window.message is not None:
                window.message.note_loss(sum(loss.loss for loss in losses))
                values += window.message.to_floats()
            self._strategy.send_with_gradients(values)
            self._receive(share)
        return losses

    def _receive(self, share: Share) -> None:
        share.total, *means = self._strategy.received_averages()
        if self._window.message is not None:
            self._window.message.receive(means)

    def _opened_share(self, optimizers: tuple[AcceleratedOptimizer, ...], is_named: bool) -> Share:
        prepared = self._prepared.optimizers
        if not is_named and len(optimizers) != 1:
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


def _shapes(batch: Any) -> Hashable:
    """Return the shapes and types of the tensors of a batch, by name."""
    return tuple(
        (name, tuple(value.shape), value.dtype) for name, value in named_leaves(batch) if isinstance(value, Tensor)
    )


def _parameters_of(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    return [parameter for each in optimizers for group in each.param_groups for parameter in group["params"]]


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, Optimizer) else list(value)


def _checked_weight(weight: Any) -> float | Tensor:
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
