"""This file is reading a user's loader: a copy of it, in which the sampler (or the dataset) is swapped for our share.

Everything else of the loader stays: its class, collate function, workers, pinning, attributes.
"""

import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import Any
from weakref import ref

import torch
from torch.utils.data import DataLoader

from trainer_lib.data_loader.bad_samples.sample_quarantine import Quarantine
from trainer_lib.data_loader.order.loader_position import Place
from trainer_lib.data_loader.order.rank_rounds import Ending, Sharing
from trainer_lib.data_loader.worker_init import Apart
from trainer_lib.foundation.errors import StateError, UnsupportedError
from trainer_lib.foundation.pytree import ignorant_find_batch_size
from trainer_lib.state.gradient_state import Rows


class Reader(ABC):
    """A copy of a user's loader that reads the share of a process, from any place on.

    Args:
        loader: The user's loader, which stays as it is.
        rank: The process.
    """

    style: str
    unit: str  # what positions count: "samples", or "batches" that come ready
    seeds_samples: bool = False

    def __init__(self, loader: DataLoader[Any], rank: int) -> None:
        self.loader = copied(loader)
        self.rank = rank
        self._replaced: dict[str, Any] = {}
        self._read_by: ref[Any] | None = None
        # Workers are seeded from it. One of our own, so that neither reading nor resuming draws from training's.
        self._generator = torch.Generator()
        self.swap("generator", self._generator)
        self._apart = Apart(loader.worker_init_fn)
        self.swap("worker_init_fn", self._apart)

    @property
    @abstractmethod
    def sharing(self) -> Sharing:
        """How units are shared."""

    @property
    @abstractmethod
    def step(self) -> int:
        """The units that all processes together read while this one reads a batch."""

    @property
    @abstractmethod
    def deals_whole_batches(self) -> bool:
        """Whether a unit is a batch, handed out as it is."""

    @property
    @abstractmethod
    def total_batch_size(self) -> int | None:
        """The samples of a round over all processes, if that is known."""

    @property
    @abstractmethod
    def even_batches(self) -> bool:
        """Whether the last round is filled."""

    @even_batches.setter
    @abstractmethod
    def even_batches(self, even_batches: bool) -> None: ...

    @property
    def counts_alike(self) -> bool:
        """Whether every rank knows how many samples all of them together read in a round."""
        return self.total_batch_size is not None

    def trim_repeats(self) -> None:  # noqa: B027 - nothing to do where samples are not dealt out one by one
        """Of samples that are repeated to make ranks even, read only those that a rank needs to take part."""

    @abstractmethod
    def keep_last(self) -> None:
        """Read a last round that is not complete, whatever the loader's `drop_last` says."""

    @property
    def reads_alike(self) -> bool:
        """Whether every process reads the same stream, of which it keeps its part."""
        return False

    @property
    def opening_digest(self) -> int | None:
        """The digest of the first samples of the stream being read, if they were read here."""
        return None

    @property
    def knows_end_of_all(self) -> bool:
        """Whether the end that `open` tells is that of all processes."""
        return True

    @property
    def read_ahead(self) -> int:
        """How many batches the workers have handed over before the first one is handed out."""
        return 0

    @abstractmethod
    def open(self, place: Place, seed: int, ending: Ending) -> Iterator[Any]:
        """Return the batches from a place on; `ending` is told the end before the last batch comes."""

    @abstractmethod
    def length(self, behind: int = 0) -> int:
        """Return how many batches the process reads in a pass, of which so many units are behind it."""

    @abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch to those objects of the user's who want to know."""

    @abstractmethod
    def read_for_all(self) -> None:
        """Read the batches of all processes, one after the other."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return what a position depends on."""

    @abstractmethod
    def check(self, state: dict[str, Any]) -> None:
        """Raise if a position in `state` means nothing here."""

    @abstractmethod
    def samples(self, seed: int, epoch: int, start: int, rank: int, rows: Rows | None) -> list[Any] | None:
        """Return which samples a process's batch holds, without repeats; `None` where that cannot be told.

        Args:
            seed: The seed of the order.
            epoch: The pass.
            start: Where in the pass the batch's round begins.
            rank: Whose batch.
            rows: What is known of its rows.
        """

    def leave_out(self, quarantine: Quarantine) -> None:
        """Leave out samples that cannot be read, and note them.

        Raises:
            UnsupportedError: If that cannot be done here.
        """
        del quarantine
        if self.iterates_itself:
            why = f"{type(self.loader).__name__} iterates in a way of its own"
        else:
            why = "an iterable dataset that raises has come to its end: catch the error in its __iter__"
        raise UnsupportedError(f"Samples that cannot be read cannot be left out here: {why}.")

    @abstractmethod
    def duplicate(self) -> "Reader":
        """Return another one for the same loader."""

    def rows_of(self, batch: Any, rows: Rows | None) -> Rows | None:
        """Return what is known of a batch's rows; one that was counted as a whole is a repeat as a whole."""
        if rows is None or not self.deals_whole_batches:
            return rows
        return Rows(ignorant_find_batch_size(batch) or 1, 0)

    def set_sampler(self, sampler: Any) -> None:
        """Read in the order of another sampler."""
        raise UnsupportedError(
            f"{type(sampler).__name__} cannot be set: a loader of {self.style} style whose unit is {self.unit} has no "
            "sampler of single samples."
        )

    def bookmark_before(self, position: int) -> Any:
        """Return what helps to get to a position of the pass being read, if anything does."""
        del position

    def swap(self, name: str, value: Any) -> None:
        """Replace an attribute of the copy; the user goes on seeing the old value."""
        self._replaced.setdefault(name, self.loader.__dict__.get(name))
        # Not setattr: torch forbids most of these.
        self.loader.__dict__[name] = value

    def attribute(self, name: str) -> Any:
        """Return an attribute of the loader as the user knows it."""
        return self._replaced[name] if name in self._replaced else getattr(self.loader, name)

    def set_attribute(self, name: str, value: Any) -> None:
        """Set an attribute of the loader."""
        setattr(self.loader, name, value)

    def _iterated(self) -> Iterator[Any]:
        self._apart.note_thread()
        iterator = iter(self.loader)
        self._read_by = ref(iterator) if hasattr(iterator, "_workers") else None  # weakly: its workers end with it
        return iterator

    def end_workers(self) -> None:
        """End the workers after an error."""
        # Its traceback keeps them alive, and left to the collector of garbage they are waited for in vain, 5 s each.
        end = getattr(self.read_by, "_shutdown_workers", None)
        if end is not None and not self.loader.persistent_workers:
            end()

    @property
    def read_by(self) -> Any:
        """The iterator of torch's whose workers read, if there are any."""
        return None if self._read_by is None else self._read_by()

    @property
    def iterates_itself(self) -> bool:
        """Whether the loader's class iterates in a way of its own."""
        return not type(self.loader).__iter__.__module__.startswith(("torch.utils.data", "torchdata."))

    def _check_length(self, state: dict[str, Any], length: int | None) -> None:
        if None not in (length, state["length"]) and length != state["length"]:
            raise StateError(
                f"This state was saved with {state['length']} {self.unit} a pass, and the loader has {length} now; "
                "another number of samples gives another order. Load it into a loader of the same dataset; where "
                "batches are limited (limit_train_batches) and of another size now, limit them to as many samples."
            )


def ahead(batches: Iterator[Any], ending: Ending, own: Ending | None = None, by: int = 1) -> Iterator[Any]:
    """Yield batches late, so that the end is known before the last ones are handed out.

    Args:
        batches: The batches.
        ending: Is told their number.
        own: What else is known of the end.
        by: How many batches to read ahead.
    """
    waiting: deque[Any] = deque()
    handed_out = 0
    for batch in batches:
        waiting.append(batch)
        if len(waiting) > by:
            handed_out += 1
            yield waiting.popleft()
    if own is not None:
        ending.over, ending.remainder, ending.rows = own.over, own.remainder, own.rows
    ending.batches = handed_out + len(waiting)
    while waiting:
        yield waiting.popleft()


def copied(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a shallow copy of a loader that shares no running workers with it."""
    duplicate = copy.copy(loader)
    duplicate.__dict__["_iterator"] = None
    return duplicate
