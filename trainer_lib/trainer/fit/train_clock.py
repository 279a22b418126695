"""The seconds of training of a run; evaluations, saves and rewinds restart the clock."""

import time

from trainer_lib.events import Run


class TrainClock:
    """Counts the time of training in the state of a run.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """The seconds of training until now."""
        return self._run.state.seconds + time.monotonic() - self._began

    def restart(self) -> None:
        """Count from now."""
        self._began = time.monotonic()

    def add(self) -> None:
        """Count the time so far."""
        now = time.monotonic()
        self._run.state.seconds += now - self._began
        self._began = now
