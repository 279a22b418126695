"""This file is sequences that are short at first, and grow to their length."""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from trainer_lib.callbacks.weight_averaging import interval
from trainer_lib.events import Modifier, Run
from trainer_lib.foundation.batch_fields import as_mapping, replaced
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError


class SequenceLengthWarmup(Modifier):
    """Cuts sequences to a length that grows evenly from `start` to `full`; what is cut off is not trained on.

    What is cut is the second dimension of integers in two dimensions: tokens, masks, labels of each token.

    Args:
        start: The length at the beginning.
        full: The length in the end.
        until: When it is reached, such as "1000 steps".
        multiple_of: Lengths are multiples of it, so that few different ones occur.
        names: What to cut besides, by its names in the batch.

    Example:
        >>> warmup = SequenceLengthWarmup(64, 1024, until="1000 steps")
    """

    saves_memory: ClassVar[bool] = True  # short sequences come first

    def __init__(self, start: int, full: int, until: Any, multiple_of: int = 8, names: Sequence[str] = ()) -> None:
        for name, value in {"start": start, "full": full, "multiple_of": multiple_of}.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"SequenceLengthWarmup({name}={shown(value)}): give a length, 1 or more.")
        if start >= full:
            raise ConfigurationError(f"SequenceLengthWarmup(start={start}, full={full}): it has to grow.")
        self.start, self.full, self.multiple_of, self.names = start, full, multiple_of, tuple(names)
        self._until = interval(until, "SequenceLengthWarmup(until)")

    def length(self, run: Run) -> int:
        """Return how long sequences are in this update."""
        progress = self._until.progress(run.state)
        if progress >= 1:
            return self.full
        grown = self.start + int((self.full - self.start) * progress)
        return max(self.start, grown // self.multiple_of * self.multiple_of)

    def on_micro_batch_begin(self, run: Run) -> None:
        length = self.length(run)
        if length == self.full:
            return
        batch: Any = run.batch
        named = as_mapping(batch)
        if named is not None:
            run.batch = replaced(batch, {name: self._cut(value, length, name) for name, value in named.items()})
        elif isinstance(batch, (tuple, list)):
            run.batch = type(batch)([self._cut(value, length) for value in batch])  # type: ignore[reportUnknownVariableType]
        else:
            run.batch = self._cut(batch, length)

    def _cut(self, value: Any, length: int, name: str | None = None) -> Any:
        is_sequence = isinstance(value, Tensor) and value.ndim == 2 and not value.is_floating_point()
        if is_sequence or (name in self.names and isinstance(value, Tensor) and value.ndim > 1):
            return value[:, :length]
        return value
