"""A loader that yields this rank's part of each sequence, while attention runs over the ranks in the loop's body."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from trainer_lib.context_parallel.batch import BatchCut
from trainer_lib.context_parallel.context_parallel import ContextParallel
from trainer_lib.context_parallel.model_inputs import separates_documents, takes_positions
from trainer_lib.context_parallel.sequence_split import SequenceSplit
from trainer_lib.foundation.tensors.batch_fields import SHIFTED_LABELS, as_mapping, label_names_in


class PartLoader:
    """A prepared loader whose batches are this rank's parts of the sequences.

    A mapping with labels gets `shift_labels`, the label of the next position, instead of them: compute the loss from
    those. It gets `position_ids` too if the model takes them. Forward and backward belong into the loop's body.

    Args:
        loader: The prepared loader, which yields the same whole batches on all ranks that share sequences.
        model: The user's model.
        parallel: How sequences are shared.
    """

    def __init__(self, loader: Iterable[Any], model: nn.Module, parallel: ContextParallel) -> None:
        self.loader: Iterable[Any] = loader
        self._model, self._parallel = model, parallel

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this rank's parts; inside the loop, attention runs over the ranks."""
        cut: BatchCut | None = None
        for batch in self.loader:
            cut = cut or self._cut_for(batch)
            with self._parallel.batch(cut, batch) as part:
                yield _without_labels(part)

    def around(self, loader: Iterable[Any]) -> "PartLoader":
        """Return the same for another loader."""
        return PartLoader(loader, self._model, self._parallel)

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """Return another attribute of the loader, such as `set_epoch`."""
        if name == "loader":  # not set yet while unpickling
            raise AttributeError(name)
        return getattr(self.loader, name)

    def _cut_for(self, batch: Any) -> BatchCut:
        return BatchCut(
            self._parallel.ranks.layout,
            shifts_labels=True,
            takes_positions=takes_positions(self._model),
            separates_documents=separates_documents(self._model, batch),
        )


def with_parts(prepared: Sequence[Any], models: Sequence[nn.Module], split: SequenceSplit) -> list[Any]:
    """Return prepared objects, with this rank's parts of sequences instead of the loaders of a model that is there."""
    if not models or not isinstance(split, ContextParallel):
        return list(prepared)
    return [PartLoader(value, models[0], split) if isinstance(value, DataLoader) else value for value in prepared]


def _without_labels(part: Any) -> Any:
    """Drop labels that are not shifted: a model would compute a second loss from them."""
    named = as_mapping(part)
    if named is None or SHIFTED_LABELS not in named:
        return part
    dropped = label_names_in(named, None)
    return {name: value for name, value in named.items() if name not in dropped}
