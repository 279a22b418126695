"""The `Accelerator`'s methods for sequences that several ranks hold parts of: `maybe_context_parallel`."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from trainer_lib.context_parallel.sequence_split import SequenceSplit


class SequenceMethods:
    """Methods of an `Accelerator` for context and sequence parallelism.

    Attributes:
        sequence_split: Whether ranks share sequences, and how attention runs over them.
    """

    sequence_split: SequenceSplit

    def maybe_context_parallel(
        self,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: set[Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Return the context in which tensors hold this rank's part of their sequences, and attention runs over ranks.

        Without `cp_size` or `sp_size` the tensors stay whole. Run forward and backward inside. Give the batch's tensors
        and its `position_ids`, and labels that are shifted before they are cut (`shift_labels` for a model of
        transformers).

        Args:
            buffers: The tensors to cut; they change in place, and are whole again after the context.
            buffer_seq_dims: For each of them, the dimension that is the sequence.
            no_restore_buffers: Those that need not be whole again.

        Raises:
            ConfigurationError: If a length is no multiple of what the ranks need, or the arguments do not fit together.

        Example:
            >>> accelerator, tokens = Accelerator(cpu=True), torch.arange(4)
            >>> with accelerator.maybe_context_parallel(buffers=[tokens], buffer_seq_dims=[0]):
            ...     len(tokens)
            4
        """
        return self.sequence_split.buffers(buffers, buffer_seq_dims, no_restore_buffers)
