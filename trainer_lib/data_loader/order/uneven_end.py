"""A common end of a pass, where each rank has its own data and does not know how much the other ranks have."""

from collections.abc import Iterator
from typing import Any

import torch

from trainer_lib.data_loader.order.samples_per_rank import Counted, Ending
from trainer_lib.foundation.tensors.pytree import ignorant_find_batch_size
from trainer_lib.process_group import ProcessGroup
from trainer_lib.state.gradient_state import Rows

_NOTHING = object()


def until_all_end(batches: Iterator[Any], own: Ending, ending: Ending, group: ProcessGroup) -> Iterator[Any]:
    """Yield batches until no rank has any left; a rank that has none left repeats its first batch.

    Before each batch, the ranks reduce one number to find out.

    Args:
        batches: The batches that this rank reads.
        own: How those end; it has to be known before the last batch is read.
        ending: Receives how all ranks end.
        group: The ranks.
    """
    batch = next(batches, _NOTHING)
    first = _first_batch(batch, group)
    if first is _NOTHING:
        ending.batches = 0
        return
    read, handed_out = 0, 0
    while ending.batches is None:
        if batch is _NOTHING:
            batch = Counted(first, Rows(ignorant_find_batch_size(first) or 1, 0), -1)
            has_more = False
        else:
            read += 1
            has_more = own.batches != read
        handed_out += 1
        if not _any_rank_has_more(has_more, group):
            ending.batches = handed_out
        yield batch
        batch = next(batches, _NOTHING) if has_more else _NOTHING


def _first_batch(batch: Any, group: ProcessGroup) -> Any:
    """Return this rank's first batch, or that of another rank if this rank has none."""
    have_batch = group.all_gather_objects(batch is not _NOTHING)
    borrowed = _NOTHING
    if any(have_batch) and not all(have_batch):
        borrowed = group.broadcast_objects([_content(batch)], source=have_batch.index(True))[0]
    return borrowed if batch is _NOTHING else _content(batch)


def _content(batch: Any) -> Any:
    if batch is _NOTHING:
        return None
    return batch.batch if type(batch) is Counted else batch


def _any_rank_has_more(has_more: bool, group: ProcessGroup) -> bool:
    # Where ranks can communicate over the CPU, no device has to be synchronized.
    device = "cpu" if "gloo" in str(group.backend) else torch.accelerator.current_accelerator()
    flag = torch.tensor(int(has_more), dtype=torch.int32, device=device)
    return bool(group.all_reduce(flag, "max").item())
