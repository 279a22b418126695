"""The indices of the samples in a batch, computed from the order on request instead of being stored."""

import copy
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from trainer_lib.data_loader.order.epoch_order import ComputedOrder, ReplayedOrder
from trainer_lib.data_loader.order.permutation import Positions
from trainer_lib.data_loader.order.rank_batches import BatchSamplerShard

# Looking up thousands of positions takes hardly longer than a few, and the caller asks again for the next batch.
_BLOCK = 4096
_blocks: WeakKeyDictionary[ComputedOrder, tuple[tuple[int, ...], Positions]] = WeakKeyDictionary()


def samples_of_batch(shard: BatchSamplerShard, seed: int, epoch: int, start: int, rank: int) -> list[Any] | None:
    """Return the indices of the samples in a rank's batch, without repeats that fill a round.

    The order of a user's sampler is drawn again up to that position, without using training's random numbers.

    Args:
        shard: The batch sampler that divides the batches between ranks.
        seed: The seed of the order.
        epoch: The pass.
        start: The position in the pass at which the round begins.
        rank: The rank of the batch.

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


def _units(shard: BatchSamplerShard, order: ReplayedOrder, seed: int, epoch: int, first: int, last: int) -> list[Any]:
    # A copy, since the sampler may count its passes.
    units = ReplayedOrder(copy.copy(order.source)).replay(seed, epoch, 0, shard.at_once)
    units.skip(first)
    return units.draw(last - first)
