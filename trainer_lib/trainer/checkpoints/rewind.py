"""Rewinding a run: back to the last checkpoint with finite weights, without the samples that led away from it."""

from collections.abc import Callable
from typing import Any

from trainer_lib.filesystem.remote_paths import path_at
from trainer_lib.foundation.errors import NonFiniteError
from trainer_lib.trainer.checkpoints.run_loading import RunLoading
from trainer_lib.trainer.checkpoints.saver import CheckpointSaver
from trainer_lib.trainer.fit.context import FitContext
from trainer_lib.trainer.fit.train_clock import TrainClock

Restart = Callable[[], None]


class Rewind:
    """Rewinds a run.

    Args:
        context: The fit.
        loading: Loads a checkpoint into the run.
        saver: The checkpoints of the run.
        clock: Counts the time of training.
        restart: Begins to count time and intervals from the loaded state.
    """

    def __init__(
        self, context: FitContext, loading: RunLoading, saver: CheckpointSaver, clock: TrainClock, restart: Restart
    ) -> None:
        self._state, self._loading, self._saver = context.run.state, loading, saver
        self._clock, self._restart = clock, restart

    @property
    def is_possible(self) -> bool:
        """Whether there is a checkpoint to rewind to."""
        return bool(self._good_checkpoints()) or self._saver.pending is not None

    def skip_from(self, first: int) -> None:
        """Load the last good checkpoint, and skip the samples from `first` to where the run is now.

        Raises:
            NonFiniteError: If no checkpoint has finite weights.
        """
        self._saver.flush()
        state, good = self._state, self._good_checkpoints()
        if not good:
            raise NonFiniteError("There is no checkpoint with finite weights to rewind to.")
        self._clock.add()
        left_out = [*state.left_out, [first, state.samples]]
        kept = {"left_out": left_out, "skipped": state.skipped, "seconds": state.seconds}
        self._loading.load(path_at(good[-1]["path"]))
        for name, value in kept.items():
            setattr(state, name, value)
        state.status = "running"
        self._restart()

    def _good_checkpoints(self) -> list[dict[str, Any]]:
        return [entry for entry in self._state.checkpoints if not entry.get("nonfinite")]
