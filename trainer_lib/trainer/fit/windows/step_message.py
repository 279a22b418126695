"""What ranks tell each other with the gradients of an update: requests, counts, the end of the data, losses."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

Number = float | Tensor


@dataclass(eq=False)
class StepMessage:
    """What one rank tells the others; `received` holds the means over all ranks, once the gradients are reduced.

    Attributes:
        requests: What callbacks ask for, as `Control.to_floats` returns it.
        at_end: 1.0 if this rank's data ends with this update.
        counts: Samples and tokens that only this rank knows of.
        window_loss: The loss of the window on this rank; `None`: loss spikes are not watched.

    Example:
        >>> message = StepMessage(requests=[0.0, 1.0], at_end=0.0, counts=[12.0])
        >>> message.to_floats()
        [0.0, 1.0, 0.0, 12.0]
        >>> message.receive([0.0, 0.5, 0.0, 11.0])
        >>> message.received.requests, message.received.counts
        ([0.0, 0.5], [11.0])
    """

    requests: Sequence[Number]
    at_end: Number
    counts: Sequence[Number] = ()
    window_loss: Number | None = None
    received: "StepMessage | None" = None

    def note_loss(self, loss: Number) -> None:
        """Take the loss of the window on this rank, if loss spikes are watched."""
        if self.window_loss is not None:
            self.window_loss = loss

    def to_floats(self) -> list[Number]:
        """Return the message as numbers, whose means the ranks compute."""
        losses = [] if self.window_loss is None else [self.window_loss]
        return [*self.requests, self.at_end, *self.counts, *losses]

    def receive(self, means: Sequence[Number]) -> None:
        """Take the means over all ranks, in the order of `to_floats`."""
        end = len(self.requests)
        losses = end + 1 + len(self.counts)
        window_loss = None if self.window_loss is None else means[losses]
        self.received = StepMessage(means[:end], means[end], means[end + 1 : losses], window_loss)
