"""`SingleDevice`: the strategy for one process on one device."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from trainer_lib.options.parallel.ddp_options import DistributedDataParallelKwargs
from trainer_lib.strategies.base import JoinOutcome, Leftovers, Strategy

NO_CONTEXT = nullcontext()  # shared: each micro-batch that does not update enters it


class SingleDevice(Strategy):
    """The model on one device, without wrapper and without collectives."""

    def distribute(self, model: nn.Module, evaluation_mode: bool = False) -> nn.Module:
        """Return the model itself."""
        del evaluation_mode
        return model

    def set_ddp_options(self, options: DistributedDataParallelKwargs | None) -> None:
        """Keep the options, which do nothing on one device."""
        self.options = options

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        del model
        return NO_CONTEXT

    def force_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        del model
        return NO_CONTEXT

    def why_gradients_are_late(self) -> None:
        """Return `None`: there is nothing to reduce."""

    def send_with_gradients(self, values: Sequence[float | Tensor]) -> None:
        """Keep the values: one rank's averages are its own values."""
        self._averages = values

    def join(
        self, joinables: Sequence[Any], leftovers: Callable[[], Leftovers] | None
    ) -> AbstractContextManager[JoinOutcome]:
        """Return a context that does nothing: no other rank waits."""
        del joinables, leftovers
        return nullcontext(JoinOutcome())

    def stay_local(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return self.no_sync(model)

    def average_weights(self, model: nn.Module) -> None:
        """Leave the weights: one rank's mean is its own weights."""
