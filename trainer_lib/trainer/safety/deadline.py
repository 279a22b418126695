"""A deadline for a run, which ends early enough to be saved by then, judged by how long its saves take."""

import math
import time
from datetime import datetime

from trainer_lib.events import Run
from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.logging import get_logger
from trainer_lib.processes.exit_codes import DEADLINE_CODE, Interruption

_logger = get_logger(__name__)

AUTO = "auto"
_MARGIN = 5.0  # seconds, for what comes after the save: callbacks, the end of the program
_BYTES_A_SECOND = 100e6  # what a disk is thought to take, as long as no save was measured
_STATES = 3  # times the size of the weights in a checkpoint: the weights, and two states of Adam
_FADING = 0.9  # the share of a slow step's time that counts at the next step, and again at each later one


def deadline_in(value: str | float | datetime | None) -> float | None:
    """Return a deadline in seconds since 1970; `None` if there is none, or no scheduler that tells one.

    Args:
        value: Such seconds; a date and time as ISO 8601 has it, of this machine's zone if it names none; or "auto".

    Example:
        >>> deadline_in("2030-01-01T00:00:00+00:00"), deadline_in(1893456000)
        (1893456000.0, 1893456000.0)
    """
    if value is None:
        return None
    if value == AUTO:
        return environment.job_end_time()
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    return value.timestamp() if isinstance(value, datetime) else float(value)


def check_ahead(value: str | float | datetime | None) -> None:
    """Raise for a deadline in the past; of one that the job scheduler sets, only warn: the job still runs."""
    ends = deadline_in(value)
    if ends is None or ends > time.time():
        return
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ends))
    if value != AUTO:
        raise ConfigurationError(
            f"deadline={value!r} is in the past ({when}). Give a later time, or None for no deadline."
        )
    _logger.warning(
        "The end of the job, as the scheduler gives it, is in the past (%s). Training continues without a deadline.",
        when,
    )


class Deadline:
    """No deadline: nothing is asked for.

    Attributes:
        description: When the run has to be saved, in words; `None` without a deadline.
    """

    description: str | None = None

    def end_step(self) -> None:
        """Look at the clock after a step."""

    def begin_step(self) -> None:
        """Note that steps continue, after something else."""

    def end_evaluation(self, seconds: float) -> None:
        """Note how long an evaluation took; the next one begins only if there is time for it."""

    def look(self, more: float = 0.0) -> None:
        """Ask for the end if it is time, with so many seconds more to come before the save."""


class TimedDeadline(Deadline):
    """When to save and end; it is the clock of the main process that counts.

    Args:
        ends: When all has to be through, in seconds since 1970.
        run: The run.
        steps_ahead: The steps between a request and its effect.
    """

    def __init__(self, ends: float, run: Run, steps_ahead: int) -> None:
        self.description: str | None = time.strftime("saved before %Y-%m-%d %H:%M:%S", time.localtime(ends))
        self._told_as = time.strftime("the deadline at %Y-%m-%d %H:%M:%S", time.localtime(ends))
        self._ends = time.monotonic() + ends - time.time()
        self._run, self._steps_ahead = run, steps_ahead
        self._step = self._evaluation = 0.0  # seconds
        self._since = time.monotonic()

    def end_step(self) -> None:
        """Look at the clock after a step."""
        now = time.monotonic()
        self._step = max(now - self._since, _FADING * self._step)
        self._since = now
        self.look(self._due())

    def begin_step(self) -> None:
        """Note that steps continue, after something else."""
        self._since = time.monotonic()

    def end_evaluation(self, seconds: float) -> None:
        """Note how long an evaluation took; the next one begins only if there is time for it."""
        self._evaluation = seconds
        self.begin_step()

    def look(self, more: float = 0.0) -> None:
        """Ask for the end if it is time, with so many seconds more to come before the save."""
        if time.monotonic() + more + self.seconds_ahead >= self._ends:
            self._run.control.interruption = self._run.control.interruption or Interruption(
                self._told_as, DEADLINE_CODE
            )

    @property
    def seconds_ahead(self) -> float:
        """How long before the deadline a run is to be asked to end."""
        save = self._run.state.save_seconds
        return self._steps_ahead * self._step + (self._first_save() if save is None else save) + _MARGIN

    def _due(self) -> float:
        """Return how long that takes which is to be done after this step, or is under way."""
        run = self._run
        save = run.state.save_seconds or 0.0
        due = self._evaluation if run.control.evaluate else 0.0
        # An evaluation that may be the best is followed by a save.
        due += save if run.control.evaluate or run.control.save else 0.0
        return due + (save if run.accelerator.is_saving else 0.0)

    def _first_save(self) -> float:
        sizes = (parameter.numel() * parameter.element_size() for parameter in self._run.trained_parameters)
        return math.ceil(_STATES * sum(sizes) / _BYTES_A_SECOND)


def deadline_of(run: Run) -> Deadline:
    """Return the deadline of a run; no deadline on ranks whose clock does not count, and after the time given."""
    ends = deadline_in(run.args.deadline)
    if ends is None or ends <= time.time() or not run.is_main_process:
        return Deadline()
    accelerator = run.accelerator
    # A single rank acts at once. Several learn of a request with the next gradients; on accelerators, an update later.
    steps_ahead = 1 if accelerator.num_processes == 1 else 2 if accelerator.device.type == "cpu" else 3
    return TimedDeadline(ends, run, steps_ahead)
