"""The indices of the samples in a batch, computed from the order on request instead of being stored."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from trainer_lib.data_loader.order.batch_sampler_shard import BatchSamplerShard
from trainer_lib.data_loader.order.epoch_order import ComputedOrder
from trainer_lib.data_loader.order.permutation import Positions

# Looking up thousands of positions takes hardly longer than a few, and the caller asks again for the next batch.
_BLOCK = 4096
_blocks: WeakKeyDictionary[ComputedOrder, tuple[tuple[int, ...], Positions]] = WeakKeyDictionary()


def samples_of_batch(
    shard: BatchSamplerShard, seed: int, epoch: int, start: int, rank: int, units: Callable[[int, int], list[Any]]
) -> list[Any] | None:
    """Return the indices of the samples in a rank's batch, without repeats that fill a round.

    Args:
        shard: The batch sampler that divides the batches between ranks.
        seed: The seed of the order.
        epoch: The pass.
        start: The position in the pass at which the round begins.
        rank: The rank of the batch.
        units: Returns the units between two positions of an order that is replayed.

    Returns:
        The indices; `None` where a sampler cannot be read a second time.
    """
    order, share = shard.order, shard.sharing.share
    first, last = start + rank * share, start + (rank + 1) * share
    if isinstance(order, ComputedOrder):
        return _looked_up(order, seed, epoch, first, min(last, order.length()))
    if hasattr(order.source, "__next__"):  # an iterator, which is read once
        return None
    if shard.cuts_batches:
        (batch,) = units(start, start + 1) or ([],)
        share = -(-len(batch) // shard.sharing.processes)
        return list(batch)[rank * share : (rank + 1) * share]
    samples = units(first, last)
    if shard.shares_samples:
        return samples
    return [sample for unit in samples for sample in (unit if isinstance(unit, (list, tuple)) else [unit])]


def _looked_up(order: ComputedOrder, seed: int, epoch: int, first: int, last: int) -> list[Any]:
    """Return the samples at some positions of a computed order."""
    begin = first - first % _BLOCK
    if last - begin > _BLOCK:
        return order.lookup(seed, epoch)(np.arange(first, last)).tolist()
    key = (seed, epoch, begin, order.length())
    known, samples = _blocks.get(order, (None, None))
    if samples is None or known != key:
        samples = order.lookup(seed, epoch)(np.arange(begin, min(begin + _BLOCK, order.length())))
        _blocks[order] = key, samples
    return samples[first - begin : max(last - begin, 0)].tolist()
