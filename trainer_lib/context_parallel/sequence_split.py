"""Whether ranks share sequences, and how: an interface, and the object for ranks that have whole sequences."""

from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from trainer_lib.context_parallel.sequence_ranks import SequenceRanks


class SequenceSplit(Protocol):
    """Whether ranks share sequences, and how."""

    @property
    def ranks(self) -> "SequenceRanks | None":
        """The ranks that share this rank's sequences; `None`: each rank has whole ones."""
        ...

    def attach(self, model: nn.Module) -> None:
        """Have a model compute attention over the ranks."""
        ...

    @contextmanager
    def buffers(
        self,
        buffers: Sequence[Tensor] | None,
        dims: Sequence[int] | None,
        left_cut: Collection[Tensor] | None,
    ) -> Generator[None]:
        """Return the context in which tensors hold this rank's part of themselves."""
        ...


class WholeSequences:
    """Each rank has whole sequences."""

    ranks: "SequenceRanks | None" = None

    def attach(self, model: nn.Module) -> None:
        """Leave the model unchanged."""

    @contextmanager
    def buffers(
        self,
        buffers: Sequence[Tensor] | None,
        dims: Sequence[int] | None,
        left_cut: Collection[Tensor] | None,
    ) -> Generator[None]:
        """Leave the tensors whole."""
        from trainer_lib.context_parallel.buffers import checked_buffers

        checked_buffers(buffers, dims, left_cut)
        yield
