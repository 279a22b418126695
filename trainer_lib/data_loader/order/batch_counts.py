"""The samples in the batches of a user's batch sampler, counted in its lists of indices."""

from collections.abc import Iterator
from typing import Any

from trainer_lib.data_loader.order.samples_per_rank import Counted, Ending, Sharing
from trainer_lib.foundation.tensors.pytree import ignorant_find_batch_size
from trainer_lib.state.gradient_state import Rows


def with_sample_counts(batches: Iterator[Any], ending: Ending, sharing: Sharing, full: int) -> Iterator[Any]:
    """Yield batches; those of a round that is not full, and the last ones, come with the counts of their samples.

    The batches themselves do not tell: a `collate_fn` may pack samples into fewer rows, or make more of them.

    Args:
        batches: The batches of the ranks that are read here, in turn.
        ending: How the pass ends; its `sizes` are used up.
        sharing: How batches are divided between ranks.
        full: The samples in a full batch of one rank.
    """
    assert ending.sizes is not None
    ranks, sizes = sharing.ranks, list[int | None]()
    for number, batch in enumerate(batches):
        place = number % len(ranks)
        if not place:
            sizes = ending.sizes.popleft()
        is_last = ending.batches is not None and number >= ending.batches - len(ranks)
        if type(batch) is Counted or None in sizes or not (is_last or any(size != full for size in sizes)):
            yield batch
            continue
        counts = [size or 0 for size in sizes]
        # Of all ranks, also where only one of them is read here: they count alike.
        is_whole = sum(counts) == full * sharing.processes
        real = counts[ranks[place]] if ranks[place] < len(counts) else 0
        tail = ending.rows.get(ranks[place]) if is_last else None
        yield Counted(batch, _rows(batch, real, tail, full), 0 if is_whole else sum(counts))


def _rows(batch: Any, real: int, tail: Rows | None, full: int) -> Rows | None:
    if tail is None and real == full:
        return None
    found = ignorant_find_batch_size(batch)
    total = real if tail is None else tail.total if real else found or 1
    # Rows as many as a full batch has are one for each sample, if the batch itself has so many.
    return Rows(total, real, None if found == full else full)
