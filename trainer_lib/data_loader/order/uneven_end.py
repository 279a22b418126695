"""This file is ending together, where each process has data of its own and cannot know how much the others have."""

from collections.abc import Iterator
from typing import Any

import torch

from trainer_lib.data_loader.order.rank_rounds import Counted, Ending
from trainer_lib.foundation.pytree import ignorant_find_batch_size
from trainer_lib.process_group import ProcessGroup
from trainer_lib.state.gradient_state import Rows

_NOTHING = object()


def evened(batches: Iterator[Any], own: Ending, ending: Ending, group: ProcessGroup) -> Iterator[Any]:
    """Yield batches until no process has any left; one that has none left repeats its first.

    The processes agree on it before each batch, by a reduction of one number.

    Args:
        batches: What this process reads.
        own: How that ends; it has to be known before its last batch is read.
        ending: Is told how all end.
        group: The processes.
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
        if not _anybody(has_more, group):
            ending.batches = handed_out
        yield batch
        batch = next(batches, _NOTHING) if has_more else _NOTHING


def _first_batch(batch: Any, group: ProcessGroup) -> Any:
    """Return this process's first batch, or one of another process if this has none and another has."""
    have_one = group.all_gather_objects(batch is not _NOTHING)
    lent = _NOTHING
    if any(have_one) and not all(have_one):
        lent = group.broadcast_objects([_content(batch)], source=have_one.index(True))[0]
    return lent if batch is _NOTHING else _content(batch)


def _content(batch: Any) -> Any:
    if batch is _NOTHING:
        return None
    return batch.batch if type(batch) is Counted else batch


def _anybody(has_more: bool, group: ProcessGroup) -> bool:
    # Where the processes can talk over the CPU, no device has to be waited for.
    device = "cpu" if "gloo" in str(group.backend) else torch.accelerator.current_accelerator()
    flag = torch.tensor(int(has_more), dtype=torch.int32, device=device)
    return bool(group.all_reduce(flag, "max").item())
