"""Sequence length warm-up: short sequences first, growing to the full length."""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from trainer_lib.events import Modifier, Run
from trainer_lib.events.trigger import callback_trigger
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.tensors.batch_fields import as_mapping, replaced


class SequenceLengthWarmup(Modifier):
    """Truncates sequences to a length that grows linearly from `start` to `full`.

    It truncates dimension 1 of two-dimensional integer tensors: tokens, masks, and token labels. The truncated tokens
    are not trained on.

    Args:
        start: The initial length.
        full: The final length.
        until: When the final length is reached, such as "1000 steps".
        multiple_of: Lengths are multiples of this number, so that few different lengths occur.
        names: The names of further batch fields to truncate.

    Example:
        >>> warmup = SequenceLengthWarmup(64, 1024, until="1000 steps")
    """

    full: int
    multiple_of: int
    names: tuple[str, ...]
    start: int

    changes_weights: ClassVar[bool] = False
    saves_memory: ClassVar[bool] = True  # short sequences come first

    def __init__(self, start: int, full: int, until: Any, multiple_of: int = 8, names: Sequence[str] = ()) -> None:
        for name, value in {"start": start, "full": full, "multiple_of": multiple_of}.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(
                    f"SequenceLengthWarmup({name}) must be a length of at least 1 (got {shown(value)})."
                )
        if start >= full:
            raise ConfigurationError(f"SequenceLengthWarmup needs start < full (got start={start}, full={full}).")
        self.start, self.full, self.multiple_of, self.names = start, full, multiple_of, tuple(names)
        self._until = callback_trigger(until, "SequenceLengthWarmup(until)", may_be_time=False)

    def length(self, run: Run) -> int:
        """Return the sequence length of the current update."""
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
