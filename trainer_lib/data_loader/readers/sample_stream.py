"""One pass over an iterable dataset, with bookmarks to return to a position quickly."""

import inspect
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

from trainer_lib.data_loader.bad_samples.guarded_dataset import by_worker
from trainer_lib.data_loader.order.data_rng import RandomStream
from trainer_lib.data_loader.order.epoch_start import EpochStream, set_state, started, state_of

_DRAWS_PER_BOOKMARK = 16  # a state may cost as much as reading a batch, so not every batch has one
_CHUNK = 1024  # samples skipped at once

# The step of a Hugging Face pipeline whose state omits samples: those in its buffer.
_FORGETFUL = "BufferShuffledExamplesIterable"

Bookmark = dict[str, Any]


class SampleStream:
    """The samples of one pass, in order, from some position on.

    Args:
        dataset: The dataset.
        remembered: How many of the first samples of the pass to keep, to fill its last round.
        randomness: The stream that the dataset draws random numbers from; by default the global generators.
        look: Called with the first samples, unless the pass starts from a bookmark.
    """

    position: int

    def __init__(
        self,
        dataset: Any,
        remembered: int,
        randomness: RandomStream | EpochStream | None = None,
        look: Callable[[list[Any]], None] | None = None,
    ) -> None:
        self.position = 0
        self._dataset = dataset
        self._randomness, self._look = randomness, look
        self._scope: AbstractContextManager[Any] = randomness or nullcontext()
        self._remembered = remembered
        self._opening: list[Any] = []
        self._entered_by_bookmark = False
        self._iterator: Any = None
        self._draws = 0
        self._keeps_place = keeps_place(dataset)
        self._held: list[Any] = []
        if self._keeps_place:
            from trainer_lib.data_loader.order.held_generators import generators_of_dataset

            self._held = generators_of_dataset(dataset)
        # Two, since the newer one may be ahead of the current batch.
        self._bookmarks: deque[Bookmark] = deque(maxlen=2)

    def start(self, position: int, bookmark: Bookmark | None = None) -> None:
        """Go to `position`: from a bookmark before it if there is one, otherwise by reading from the start."""
        if bookmark is not None:
            states = bookmark.get("generators", [])
            if len(states) == len(self._held):
                for generator, state in zip(self._held, states, strict=True):
                    set_state(generator, state)
            self._dataset.load_state_dict(bookmark["dataset"])
            self.position = bookmark["position"]
            self._entered_by_bookmark = True
            if self._randomness is not None and bookmark["randomness"] is not None:
                self._randomness.load_state_dict(bookmark["randomness"])
            self._bookmarks.append(bookmark)
        while self.position < position and self.draw(min(position - self.position, _CHUNK)):
            pass

    def draw(self, count: int) -> list[Any]:
        """Return the next `count` samples, or the rest if fewer are left."""
        if self._keeps_place and self._draws and self._draws % _DRAWS_PER_BOOKMARK == 0:
            self._bookmarks.append(self._bookmark())
        samples: list[Any] = []
        try:
            if self._iterator is None:
                self._iterator = self._begun()
            with self._scope:
                samples.extend(islice(self._iterator, count))
        except Exception as error:  # `samples` holds the ones before it
            error.add_note(f"In sample {self.position + len(samples)}{by_worker()}.")
            raise
        if self._entered_by_bookmark and not self._draws and is_pipeline(self._dataset):
            self._dataset.load_state_dict(None)  # otherwise the next pass would start there too
        self._draws += 1
        self.position += len(samples)
        if len(self._opening) < self._remembered:
            if self._look is not None and not (self._opening or self._entered_by_bookmark):
                self._look(samples)
            self._opening += samples[: self._remembered - len(self._opening)]
        return samples

    def _begun(self) -> Any:
        if isinstance(self._randomness, EpochStream):
            return self._randomness.begin(self._dataset)
        with self._scope:
            return started(iter(self._dataset))

    def opening(self) -> list[Any]:
        """Return the first samples of the pass, if they are available.

        A pass that starts from a bookmark has not read them. A Hugging Face dataset can read them again. For other
        datasets, the first samples after the bookmark take their place.
        """
        if self._entered_by_bookmark and is_pipeline(self._dataset):
            return list(islice(started(iter(self._dataset)), self._remembered))
        return self._opening

    def bookmark_before(self, position: int) -> Bookmark | None:
        """Return the newest bookmark that is not after `position`."""
        fitting = [bookmark for bookmark in self._bookmarks if bookmark["position"] <= position]
        return fitting[-1] if fitting else None

    def _bookmark(self) -> Bookmark:
        randomness = None if self._randomness is None else self._randomness.state_dict()
        return {
            "position": self.position,
            "dataset": self._dataset.state_dict(),
            "randomness": randomness,
            "generators": [state_of(generator) for generator in self._held],
        }


def keeps_place(dataset: Any) -> bool:
    """Whether a dataset has a state that holds its exact position."""
    if not (_takes(dataset, "state_dict") and _takes(dataset, "load_state_dict", None)):
        return False
    return all(type(step).__name__ != _FORGETFUL for step in _steps(dataset))


def _takes(dataset: Any, name: str, *values: Any) -> bool:
    """Whether a dataset has a method that can be called so; that of a few needs what only their own loader counts."""
    method = getattr(dataset, name, None)
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(*values)
    except TypeError:
        return False
    except ValueError:  # not written in Python
        return True
    return True


def is_pipeline(dataset: Any) -> bool:
    """Whether this is a streaming dataset of Hugging Face's datasets library."""
    return hasattr(dataset, "_ex_iterable")


def is_split_already(dataset: Any) -> bool:
    """Whether each rank reads its own samples from this dataset.

    As after `split_dataset_by_node`, or if the dataset has a true attribute `is_split_between_processes`.
    """
    return getattr(dataset, "_distributed", None) is not None or bool(
        getattr(dataset, "is_split_between_processes", False)
    )


def _steps(dataset: Any) -> list[Any]:
    """Return the steps of a Hugging Face pipeline."""
    steps: list[Any] = []
    waiting = [getattr(dataset, "_ex_iterable", None)]
    while waiting:
        step = waiting.pop()
        if step is not None:
            steps.append(step)
            waiting += [getattr(step, "ex_iterable", None), *getattr(step, "ex_iterables", [])]
    return steps
