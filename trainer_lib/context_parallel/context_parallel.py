"""Context and sequence parallelism of one process: which ranks share its sequences, and what is cut for them."""

from collections.abc import Collection, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from trainer_lib.context_parallel.active import CutSequences
from trainer_lib.context_parallel.attention.all_to_all import check_heads
from trainer_lib.context_parallel.attention.interception import Place, intercepted, places_of
from trainer_lib.context_parallel.attention.transformers_attention import use_context_parallel_attention
from trainer_lib.context_parallel.batch import BatchCut, BatchPart
from trainer_lib.context_parallel.buffers import checked_buffers, cut_buffers
from trainer_lib.context_parallel.sequence_ranks import SequenceRanks
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.logging import get_logger

_logger = get_logger(__name__)


class ContextParallel:
    """Several ranks share each sequence.

    Args:
        ranks: These ranks.
        tp_size: How many ranks split the heads of the model's attention already; `None`: not known, as with a plan of
            the user's for tensor parallelism.
    """

    def __init__(self, ranks: SequenceRanks, tp_size: int | None = 1) -> None:
        self._ranks, self._tp_size = ranks, tp_size
        self._places: list[Place] = []

    @property
    def ranks(self) -> SequenceRanks:
        """The ranks that share this rank's sequences."""
        return self._ranks

    def attach(self, model: nn.Module) -> None:
        """Have a model compute attention over the ranks.

        Raises:
            UnsupportedError: If its attention cannot be computed on parts of sequences.
            ConfigurationError: If the ranks cannot share out its attention heads, where they have to.
        """
        for heads in use_context_parallel_attention(model):
            if self._ranks.method != "ulysses" or self._tp_size is None:  # then attention checks its heads
                continue
            if not heads % self._tp_size:  # else tensor parallelism refuses
                check_heads(heads // self._tp_size, self._ranks.layout.size)
        self._places += places_of(model)

    @contextmanager
    def buffers(
        self,
        buffers: Sequence[Tensor] | None,
        dims: Sequence[int] | None,
        left_cut: Collection[Tensor] | None,
    ) -> Generator[None]:
        """Return the context in which tensors hold this rank's part of themselves, and attention runs over ranks."""
        tensors, dims, left_cut = checked_buffers(buffers, dims, left_cut)
        if CutSequences.active() is not None:
            raise ConfigurationError(
                "Sequences are cut already: do not use maybe_context_parallel inside itself, or in a loop over a "
                "loader of deepspeed_ulysses_dl_adapter."
            )
        lengths = {tensor.shape[dim] for tensor, dim in zip(tensors, dims, strict=True)}
        if len(lengths) > 1:
            raise ConfigurationError(
                f"buffers have sequences of {', '.join(map(str, sorted(lengths)))}: give those of one length, which "
                "are cut alike."
            )
        length = lengths.pop() if lengths else None
        with (
            cut_buffers(self._ranks.layout, tensors, dims, left_cut),
            self._attention(CutSequences(self._ranks, length)) as sequences,
        ):
            yield
        if not sequences.attentions:
            _logger.warning_once(
                "No attention was computed inside maybe_context_parallel. If the model ran there, it saw this rank's "
                "part of the sequences alone: use F.scaled_dot_product_attention, or a model of transformers with "
                "attn_implementation='sdpa', and prepare the model before."
            )

    @contextmanager
    def batch(self, cut: BatchCut, batch: Any) -> Generator[Any]:
        """Return the context in which attention runs over ranks, with this rank's part of a batch."""
        part = cut.part(batch)
        with self.computing(part):
            yield part.batch

    def computing(self, part: BatchPart) -> AbstractContextManager[Any]:
        """Return the context in which attention runs over ranks, for this rank's part of a batch."""
        return self._attention(CutSequences(self._ranks, part.length, part.real_length, part.documents, True))

    @contextmanager
    def _attention(self, sequences: CutSequences) -> Generator[CutSequences]:
        with ExitStack() as contexts:
            contexts.enter_context(intercepted(self._places))  # left after the sequences
            contexts.enter_context(sequences.in_use())
            yield sequences
