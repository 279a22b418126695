"""The `Accelerator`'s methods for sequences that several ranks hold parts of: `maybe_context_parallel`."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainer_lib.context_parallel.sequence_split import SequenceSplit
from trainer_lib.foundation.errors import ConfigurationError

if TYPE_CHECKING:
    from trainer_lib.context_parallel.part_loader import PartLoader
    from trainer_lib.strategies import Strategy


class SequenceMethods:
    """Methods of an `Accelerator` for context and sequence parallelism.

    Attributes:
        sequence_split: Whether ranks share sequences, and how attention runs over them.
    """

    sequence_split: SequenceSplit
    strategy: "Strategy"
    prepare_data_loader: Callable[..., Any]

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

    def deepspeed_ulysses_dl_adapter(self, dl: "DataLoader[Any] | PartLoader", model: nn.Module) -> "PartLoader":
        """Return a loader that yields this rank's parts of the sequences, while attention runs over the ranks.

        With DeepSpeed and `sp_size` or `cp_size`, `prepare(model, optimizer, loader)` returns such a loader; call this
        for a loader that you prepare by itself. A batch has `shift_labels`, the label of the next position, instead of
        `labels`. Run forward and backward in the loop's body.

        Args:
            dl: The loader, of whole sequences.
            model: The model that is trained with it.

        Raises:
            ConfigurationError: If ranks do not share sequences.
        """
        from trainer_lib.context_parallel.context_parallel import ContextParallel
        from trainer_lib.context_parallel.part_loader import PartLoader

        if isinstance(dl, PartLoader):
            return dl
        if not isinstance(self.sequence_split, ContextParallel):
            raise ConfigurationError(
                "deepspeed_ulysses_dl_adapter cuts sequences, and each rank has whole ones here. Give "
                "Accelerator(parallelism_config=ParallelismConfig(sp_size=…)), or use the loader itself."
            )
        loader, bare = self.prepare_data_loader(dl), self.strategy.bare(model)
        return PartLoader(loader, bare, self.sequence_split)
