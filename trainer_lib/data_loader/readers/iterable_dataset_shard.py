"""An iterable dataset for one of several ranks: it reads all samples and keeps its part."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from trainer_lib.data_loader.order.data_rng import RandomStream, derived_seed
from trainer_lib.data_loader.order.epoch_order import announce_epoch
from trainer_lib.data_loader.order.epoch_start import EpochStream
from trainer_lib.data_loader.order.samples_per_rank import Counted, Ending, Sharing, deal
from trainer_lib.data_loader.readers.fingerprint import digest
from trainer_lib.data_loader.readers.sample_stream import Bookmark, SampleStream, is_split_already
from trainer_lib.foundation.tensors.pytree import ignorant_find_batch_size
from trainer_lib.state.gradient_state import Rows

_OPENING = 2  # samples that ranks compare
_SEEDED, _AS_TORCH = 1, 2  # how a pass draws random numbers


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of an iterable dataset that belong to one rank.

    All ranks read all samples, so the order does not depend on the world size. Reading or setting an attribute (as a
    `worker_init_fn` does) reads or sets it on the dataset inside.

    Args:
        dataset: The dataset.
        batch_size: How many consecutive samples a rank gets; with `split_batches`, all ranks together.
        drop_last: Drop an incomplete last round; otherwise the first samples fill it.
        num_processes: How many ranks share the samples.
        process_index: The rank.
        split_batches: `batch_size` is that of all ranks together.

    Example:
        >>> class Numbers(IterableDataset):
        ...     def __iter__(self):
        ...         return iter(range(5))
        >>> [list(IterableDatasetShard(Numbers(), 2, num_processes=2, process_index=rank)) for rank in range(2)]
        [[0, 1, 4, 0], [2, 3, 1, 2]]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        self.dataset = dataset
        self._sharing = Sharing.of_batches(batch_size, num_processes, process_index, split_batches, drop_last)
        self._marks_tails = False
        # How it was entered, and if so the seed, the epoch and the position, in memory that workers can share.
        self._place = torch.zeros(4, dtype=torch.int64)
        self._resumed_at: int | None = None
        self._bookmark: Bookmark | None = None
        self._ending = Ending()
        self._randomness: EpochStream | None = None
        self._stream: SampleStream | None = None
        self._position = 0
        self._digest = torch.zeros((), dtype=torch.int64)  # of the first samples; 0: not read
        self._worker_digests = torch.zeros(0, dtype=torch.int64)  # of what each of several workers read first

    @property
    def opening_digest(self) -> int | None:
        """The digest of the first samples of the pass, as read by this rank or its first worker."""
        return int(self._digest) or None

    def workers_alike(self) -> list[int]:
        """Return the workers that read the same first samples in this pass as a worker before them."""
        digests: list[int] = self._worker_digests.tolist()
        return [worker for worker, first in enumerate(digests) if first and first in digests[:worker]]

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the dataset if it has it."""
        announce_epoch(epoch, self.dataset)

    def __len__(self) -> int:
        rounds, rest = divmod(len(self.dataset), self._sharing.round_size)
        tails = [self._sharing.rows(rest, rank) for rank in self._sharing.ranks]
        tail = sum(self._sharing.share if rows is None else rows.total for rows in tails)
        whole = rounds * self._sharing.share * len(tails)
        return whole + (tail if self._sharing.tail_batches(rest) else 0)

    @property
    def is_split_between_processes(self) -> bool:
        """Whether each rank reads its own samples."""
        return self._sharing.processes > 1 or is_split_already(self.dataset)

    def share(self, sharing: Sharing) -> None:
        """Divide the samples in this way."""
        self._sharing = sharing

    def share_place_with_workers(self, workers: int) -> None:
        """Let workers see where to start, also workers that persist from pass to pass."""
        self._place.share_memory_()
        self._digest.share_memory_()
        self._worker_digests = torch.zeros(workers, dtype=torch.int64).share_memory_()

    def mark_tails(self) -> None:
        """Yield the samples of a last round as `TailSample`s, for a `TailCollate` to count."""
        self._marks_tails = True

    def enter(
        self,
        seed: int,
        epoch: int,
        position: int,
        bookmark: Bookmark | None,
        ending: Ending,
        stream: EpochStream | None = None,
    ) -> None:
        """Start the next iteration at a position of a pass, and fill in `ending` (if in the same process).

        Args:
            seed: The seed of random numbers, if they have no stream.
            epoch: The pass.
            position: The position.
            bookmark: A bookmark before it.
            ending: Receives how the pass ends.
            stream: What the dataset draws from; `None`: it is seeded from seed and epoch.
        """
        self._place.copy_(torch.tensor([_SEEDED if stream is None else _AS_TORCH, seed, epoch, position]))
        self._bookmark, self._ending = bookmark, ending
        self._randomness = stream
        self._digest.zero_()
        self._worker_digests.zero_()

    def bookmark_before(self, position: int) -> Bookmark | None:
        """Return the newest bookmark of the current pass that is not after `position`."""
        return None if self._stream is None else self._stream.bookmark_before(position)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the iteration; torchdata's StatefulDataLoader calls it in its workers."""
        return {"position": self._position, "bookmark": self.bookmark_before(self._position)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Start the next iteration at the position in `state_dict`."""
        # Not in `_place`, which all workers share.
        self._resumed_at = state_dict["position"]
        self._bookmark = state_dict["bookmark"]

    def __iter__(self) -> Iterator[Any]:
        stream = self._stream = self._entered_stream()
        position, self._resumed_at = self._resumed_at, None
        bookmark, self._bookmark = self._bookmark, None
        return self._read(stream, int(self._place[3]) if position is None else position, bookmark, self._ending)

    def _entered_stream(self) -> SampleStream:
        entered, seed, epoch, _ = self._place.tolist()
        size = self._sharing.round_size
        if not entered:
            return SampleStream(self.dataset, size)
        announce_epoch(epoch, self.dataset)
        # Workers are seeded, and only samples draw random numbers there.
        worker = get_worker_info()
        stream = self._randomness if worker is None else None
        if entered == _SEEDED:
            generator = getattr(self.dataset, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(derived_seed(seed, epoch, "generator"))
            stream = RandomStream(derived_seed(seed, epoch, "stream")) if worker is None else None
        is_compared = self._sharing.processes > 1 if worker is None else worker.id == 0 or worker.num_workers > 1
        return SampleStream(self.dataset, size, stream, self._digest_opening if is_compared else None)

    def _digest_opening(self, samples: list[Any]) -> None:
        worker, first = get_worker_info(), digest(samples[:_OPENING])
        if self._sharing.processes > 1 and (worker is None or worker.id == 0):
            self._digest.fill_(first)
        if worker is not None and samples and not _are_equal(samples[:_OPENING]):
            self._worker_digests[worker.id] = first

    def _read(self, stream: SampleStream, position: int, bookmark: Bookmark | None, ending: Ending) -> Iterator[Any]:
        sharing = self._sharing
        size = sharing.round_size
        stream.start(position, bookmark)
        self._position = position
        for rank, part, own in deal(lambda: stream.draw(size), stream.opening, sharing, position, ending):
            if rank == sharing.ranks[0]:
                self._position += size
            if own < size and self._marks_tails:
                yield from _marked(part, rank * sharing.share, own)
            else:
                yield from part

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the dataset inside."""
        if name == "dataset" or name.startswith("__"):  # not set yet while unpickling
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the dataset, unless it is one of this class."""
        if name == "dataset" or name in _LOCAL_ATTRIBUTES:
            object.__setattr__(self, name, value)
        else:
            setattr(self.dataset, name, value)


_LOCAL_ATTRIBUTES = frozenset(
    {
        "_sharing",
        "_marks_tails",
        "_place",
        "_resumed_at",
        "_bookmark",
        "_ending",
        "_randomness",
        "_stream",
        "_position",
        "_digest",
        "_worker_digests",
    }
)


class ShardOfItsClass(IterableDatasetShard):
    """A shard that is an instance of the dataset's class too, for a loader that asks what kind of dataset it has."""

    @property
    def __class__(self) -> type[Any]:  # type: ignore[override]
        """The class of the dataset. `isinstance` accepts it besides the type."""
        return type(self.dataset)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to copy it: pickle refuses an object whose `__class__` is not its type."""
        return object.__new__, (ShardOfItsClass,), vars(self)


class TailSample(NamedTuple):
    """A sample of an incomplete last round."""

    sample: Any
    is_real: bool  # False: a repeat
    own: int  # how many real samples the round has, over all ranks


class TailCollate:
    """The user's collate function, which also counts the real samples in batches of a last round.

    Args:
        collate: The user's function.
        full: How many samples a full batch has; `None` where the dataset yields batches.
    """

    def __init__(self, collate: Callable[[Any], Any], full: int | None) -> None:
        self.collate = collate
        self._full = full

    def __call__(self, samples: Any) -> Any:
        """Return the batch, with its counts if it is of a last round."""
        if self._full is None:
            return self._ready(samples) if type(samples) is TailSample else self.collate(samples)
        if not samples or type(samples[-1]) is not TailSample:
            return self.collate(samples)
        real = sum(tail.is_real for tail in samples)
        rows = None if real == self._full else Rows(len(samples), real, self._full)
        return Counted(self.collate([tail.sample for tail in samples]), rows, samples[-1].own)

    def _ready(self, tail: TailSample) -> Any:
        batch = self.collate(tail.sample)
        if tail.is_real:
            return batch
        return Counted(batch, Rows(ignorant_find_batch_size(batch) or 1, 0), -1)


def _are_equal(samples: list[Any]) -> bool:
    """Whether there are several samples, all equal: these cannot tell whose they are."""
    return len(samples) > 1 and len({digest([sample]) for sample in samples}) == 1


def _marked(part: list[Any], first: int, own: int) -> Iterator[TailSample]:
    return (TailSample(sample, first + index < own, own) for index, sample in enumerate(part))
