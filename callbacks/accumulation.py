"""This file is how many batches make an update, pass by pass."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from trainer_lib.events import Modifier, Run
from trainer_lib.events.callback import UpdatePlan
from trainer_lib.foundation.errors import ConfigurationError


class AccumulationSchedule(Modifier):
    """Makes updates of more batches in later passes, or of fewer.

    The length of the run, and of the schedule of learning rates, is told accordingly. Passes that come before the
    first one named go by `gradient_accumulation_steps`.

    Args:
        steps: By the number of a pass, counted from 0, how many batches make an update from then on.

    Example:
        >>> schedule = AccumulationSchedule({0: 1, 4: 2, 8: 4})
        >>> schedule.steps_in(5), schedule.updates(batches=10, epochs=6)
        (2, 50)
    """

    exclusive_group: ClassVar[str | None] = "say how many batches make an update"

    def __init__(self, steps: Mapping[int, int]) -> None:
        bad = [(epoch, count) for epoch, count in steps.items() if not _is_count(epoch, 0) or not _is_count(count, 1)]
        if bad or not steps:
            told = f"{bad[0][0]!r}: {bad[0][1]!r}" if bad else ""
            raise ConfigurationError(
                f"AccumulationSchedule({{{told}}}): give passes, counted from 0, and how many batches make an update "
                "from then on, such as {0: 1, 4: 2}."
            )
        self.steps = dict(sorted(steps.items()))
        self._base = 1
        self._run: Run | None = None

    def update_plan(self) -> UpdatePlan:
        return self

    def begin(self, base: int) -> int:
        """Take note of the arguments' steps, and return those of the first pass."""
        self._base = base
        return self.steps_in(0)

    def steps_in(self, epoch: int) -> int:
        """Return how many batches make an update in a pass."""
        return next((count for first, count in reversed(self.steps.items()) if first <= epoch), self._base)

    def updates(self, batches: int, epochs: float) -> int:
        """Return how many updates so many passes of so many batches are."""
        whole = math.floor(epochs + 1e-9)
        lengths = [math.ceil(batches / self.steps_in(epoch)) for epoch in range(whole + 1)]
        return sum(lengths[:-1]) + max(0, math.ceil((epochs - whole) * lengths[-1] - 1e-9))

    def on_fit_begin(self, run: Run) -> None:
        if run.args.global_batch_size is not None:
            raise ConfigurationError(
                f"global_batch_size={run.args.global_batch_size} says how large updates are, and so does "
                "AccumulationSchedule. Leave one of them out."
            )

    def on_epoch_begin(self, run: Run) -> None:
        self._apply(run)

    # -- a run that goes on ---------------------------------------------------------------------------------------

    def on_load_begin(self, run: Run, folder: Path) -> None:
        del folder
        self._run = run

    def on_load_end(self, run: Run, folder: Path) -> None:
        del folder
        state, batches = run.state, _batches(run)
        if batches is not None and state.max_epochs is not None:
            behind = self.updates(batches, state.epoch) + state.steps_in_epoch
            steps = state.step + self.updates(batches, state.max_epochs) - behind
            state.max_steps = steps if run.args.max_steps is None else min(steps, run.args.max_steps)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": {str(epoch): count for epoch, count in self.steps.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        del state
        assert self._run is not None
        self._apply(self._run)  # before it is counted how much of the pass is left

    def _apply(self, run: Run) -> None:
        steps, batches = self.steps_in(run.state.epoch), _batches(run)
        run.accelerator.gradient_accumulation_steps = steps
        if batches is not None:
            run.state.steps_per_epoch = math.ceil(batches / steps)


def _batches(run: Run) -> int | None:
    """Return the batches of a pass; `None` where the data does not tell."""
    try:
        return len(run.accelerator._dataloaders[-1])
    except (TypeError, NotImplementedError):
        return None


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
