"""This file is which samples a batch holds: worked out from the order when somebody asks, and noted down by nobody."""

import copy
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from trainer_lib.data_loader.order.epoch_order import ComputedOrder, ReplayedOrder
from trainer_lib.data_loader.order.permutation import Places
from trainer_lib.data_loader.order.rank_batches import BatchSamplerShard

# To look up thousands of places takes hardly longer than a few, and who asks once asks again for the next batch.
_BLOCK = 4096
_blocks: WeakKeyDictionary[ComputedOrder, tuple[tuple[int, ...], Places]] = WeakKeyDictionary()


def samples_of_batch(shard: BatchSamplerShard, seed: int, epoch: int, start: int, rank: int) -> list[Any] | None:
    """Return the indices of the samples in a process's batch, without those that repeat others to fill a round.

    The order of a user's sampler is drawn anew up to there, apart from training's random numbers.

    Args:
        shard: What shares the batches out.
        seed: The seed of the order.
        epoch: The pass.
        start: Where in the pass the round begins.
        rank: Whose batch.

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
        (batch,) = _units(shard, order, seed, epoch, start, start + 1) or ([],)
        share = -(-len(batch) // shard.sharing.processes)
        return list(batch)[rank * share : (rank + 1) * share]
    units = _units(shard, order, seed, epoch, first, last)
    if shard.shares_samples:
        return units
    return [sample for unit in units for sample in (unit if isinstance(unit, (list, tuple)) else [unit])]


def _looked_up(order: ComputedOrder, seed: int, epoch: int, first: int, last: int) -> list[Any]:
    """Return the samples at some places of a computed order."""
    begin = first - first % _BLOCK
    if last - begin > _BLOCK:
        return order.lookup(seed, epoch)(np.arange(first, last)).tolist()
    key = (seed, epoch, begin, order.length())
    known, samples = _blocks.get(order, (None, None))
    if samples is None or known != key:
        samples = order.lookup(seed, epoch)(np.arange(begin, min(begin + _BLOCK, order.length())))
        _blocks[order] = key, samples
    return samples[first - begin : max(last - begin, 0)].tolist()


def _units(shard: BatchSamplerShard, order: ReplayedOrder, seed: int, epoch: int, first: int, last: int) -> list[Any]:
    # A copy, since the sampler may count the passes over itself.
    units = ReplayedOrder(copy.copy(order.source)).replay(seed, epoch, 0, shard.at_once)
    units.skip(first)
    return units.draw(last - first)
