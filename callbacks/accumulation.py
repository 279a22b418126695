"""A gradient accumulation schedule: the number of micro-batches per update, by epoch."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from trainer_lib.events import Modifier, Run
from trainer_lib.events.callback import UpdatePlan
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.lengths import length_of


class AccumulationSchedule(Modifier):
    """Changes the number of accumulated batches per update from epoch to epoch.

    The length of the run and of the learning-rate schedule follows. Epochs before the first one given use
    `gradient_accumulation_steps`.

    Args:
        steps: The epoch, counted from 0, mapped to the number of batches per update from that epoch on.

    Example:
        >>> schedule = AccumulationSchedule({0: 1, 4: 2, 8: 4})
        >>> schedule.steps_in(5), schedule.updates(batches=10, epochs=6)
        (2, 50)
    """

    changes_weights: ClassVar[bool] = False
    exclusive_group: ClassVar[str | None] = "set the number of batches per update"

    def __init__(self, steps: Mapping[int, int]) -> None:
        is_mapping = isinstance(steps, Mapping)  # pyright: ignore[reportUnnecessaryIsInstance]
        counts = steps.items() if is_mapping else ()
        if not counts or not all(_is_count(epoch, 0) and _is_count(count, 1) for epoch, count in counts):
            raise ConfigurationError(
                f"AccumulationSchedule({steps!r}) is not valid. Map epochs, counted from 0, to the number of batches "
                "per update from that epoch on, such as {0: 1, 4: 2}."
            )
        self.steps: dict[int, int] = dict(sorted(steps.items()))
        self._base = 1
        self._run: Run | None = None

    def update_plan(self) -> UpdatePlan:
        return self

    def begin(self, base: int) -> int:
        """Store the accumulation steps of the arguments, and return those of the first epoch."""
        self._base = base
        return self.steps_in(0)

    def steps_in(self, epoch: int) -> int:
        """Return the number of batches per update in an epoch."""
        return next((count for first, count in reversed(self.steps.items()) if first <= epoch), self._base)

    def updates(self, batches: int, epochs: float) -> int:
        """Return the number of updates in `epochs` epochs of `batches` batches."""
        whole = math.floor(epochs + 1e-9)
        lengths = [math.ceil(batches / self.steps_in(epoch)) for epoch in range(whole + 1)]
        return sum(lengths[:-1]) + max(0, math.ceil((epochs - whole) * lengths[-1] - 1e-9))

    def on_fit_begin(self, run: Run) -> None:
        if run.args.global_batch_size is not None:
            raise ConfigurationError(
                f"global_batch_size={run.args.global_batch_size} and AccumulationSchedule both set the size of an "
                "update. Remove one of them."
            )
        self._run = run

    def on_epoch_begin(self, run: Run) -> None:
        self._apply(run)

    def on_epoch_end(self, run: Run) -> None:
        self._apply(run)  # a checkpoint at the end of an epoch counts the next one, as a resumed run does

    # -- resuming -------------------------------------------------------------------------------------------------

    def on_load_begin(self, run: Run, folder: Path) -> None:
        del folder
        self._run = run

    def state_dict(self) -> dict[str, Any]:
        return {"steps": {str(epoch): count for epoch, count in self.steps.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        del state
        assert self._run is not None
        self._apply(self._run)  # before the rest of the epoch is counted

    def _apply(self, run: Run) -> None:
        steps, batches = self.steps_in(run.state.epoch), _batches(run)
        run.accelerator.gradient_accumulation_steps = steps
        if batches is not None:
            run.state.steps_per_epoch = math.ceil(batches / steps)


def _batches(run: Run) -> int | None:
    """Return the number of batches per epoch; `None` if the data has no length."""
    return length_of(run.accelerator.prepared.dataloaders[-1])


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
