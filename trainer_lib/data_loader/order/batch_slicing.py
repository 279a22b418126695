"""Batches made for all ranks, cut into one slice for each rank."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from trainer_lib.data_loader.order.samples_per_rank import Counted, Ending, Sharing
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.foundation.tensors.pytree import ignorant_find_batch_size, map_leaves
from trainer_lib.state.gradient_state import Rows


@frozen_dataclass(kw_only=True)
class Slicing:
    """How batches are cut.

    Args:
        processes: How many slices to cut.
        batch_size: How many rows a whole batch has; `None`: the rows of each batch.
        function: Cuts a slice; called with the batch, a slice, `process_index` and `num_processes`.
    """

    processes: int
    batch_size: int | None
    function: Callable[..., Any] | None = None

    def slices(self, batches: Iterator[Any], own: Ending, ending: Ending) -> Iterator[Counted]:
        """Yield the slices of one batch after the other.

        Args:
            batches: The batches, of which the last may hold repeats.
            own: How the batches end.
            ending: Receives how the slices end.
        """
        handed_out = 0
        for read, batch in enumerate(batches, 1):
            is_last = own.batches == read
            content = batch if type(batch) is Counted else Counted(batch, own.rows.get(0) if is_last else None, -1)
            slices = self._cut(content)
            handed_out += len(slices)
            if is_last:
                ending.batches, ending.over, ending.remainder = handed_out, own.over, own.remainder
            elif own.batches == read + 1 and (rows := own.rows.get(0)) is not None and self.batch_size is not None:
                # Ranks that get no slice of the last batch have to know now.
                ending.batches = handed_out + -(-rows.total * self.processes // self.batch_size)
            yield from slices

    def _cut(self, content: Counted) -> list[Counted]:
        batch, rows, remainder = content
        held = rows.total if rows is not None else self.batch_size or self._size_of(batch)
        whole = self.batch_size or held
        real = held if rows is None else rows.real
        sharing = Sharing(share=whole // self.processes, processes=self.processes)
        slices: list[Counted] = []
        for rank in range(self.processes):
            start, stop = rank * sharing.share, min((rank + 1) * sharing.share, held)
            if start < stop:
                chosen = slice(start, stop)
                if self.function is None:
                    part = _rows_of(batch, chosen, held)
                else:
                    part = self.function(batch, chosen, process_index=rank, num_processes=self.processes)
                part_rows = Rows(stop - start, min(max(real - start, 0), stop - start), sharing.share)
                is_plain = part_rows.real == sharing.share
                slices.append(Counted(part, None if is_plain else part_rows, remainder))
        return slices

    def _size_of(self, batch: Any) -> int:
        size = ignorant_find_batch_size(batch)
        if not size or size % self.processes:
            raise ConfigurationError(
                f"split_batches=True: a batch of the dataset has {size} rows, which do not split into "
                f"{self.processes} equal parts. Yield batches of a multiple of {self.processes} rows, or set "
                "split_batches=False."
            )
        return size


def _rows_of(batch: Any, chosen: slice, held: int) -> Any:
    """Return a slice of the rows of a batch: of its tensors, and of lists with one item a row, such as texts."""

    def is_column(part: Any) -> bool:
        if not isinstance(part, (list, tuple)) or len(part) != held:
            return False
        items: Any = part
        if isinstance(part, tuple):  # of numbers, it may be a size
            return all(isinstance(item, (str, bytes)) for item in items)
        return not any(isinstance(item, (list, tuple, Mapping, Tensor)) for item in items)

    def cut(leaf: Any) -> Any:
        has_rows = leaf.ndim > 0 if isinstance(leaf, Tensor) else is_column(leaf)
        return leaf[chosen] if has_rows else leaf

    return map_leaves(cut, batch, is_leaf=is_column)
