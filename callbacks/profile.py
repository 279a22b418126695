"""Profiles of some updates, by torch's profiler."""

import dataclasses
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from trainer_lib.events import Callback, Run
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.logging import get_logger
from trainer_lib.options.profiler_options import ProfileKwargs

_logger = get_logger(__name__)


class Profile(Callback):
    """Profiles some updates, and writes a trace for a browser (chrome://tracing, Perfetto).

    Each rank writes its own file, such as `profile/process-0-steps-11-15.json` in the run's folder. The history lists
    the slowest operations ("profile"). Profiled updates are slower than others.

    Args:
        after: How many updates to skip first, counted from the start or the resume.
        steps: How many updates to profile.
        options: What to record, without a schedule or a folder: this callback sets both.
        folder: The folder for the traces; by default `profile` in the run's folder.
        top: How many operations to list in the history.

    Example:
        >>> profile = Profile(after=10, steps=5, options=ProfileKwargs(record_shapes=True))
    """

    def __init__(
        self,
        after: int = 10,
        steps: int = 5,
        options: ProfileKwargs | None = None,
        folder: str | Path | None = None,
        top: int = 10,
    ) -> None:
        for name, value, least in (("after", after, 0), ("steps", steps, 1), ("top", top, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigurationError(
                    f"Profile({name}) must be a whole number of at least {least} (got {shown(value)})."
                )
        self._options = options or ProfileKwargs()
        if self._options.schedule_option is not None or self._options.output_trace_dir is not None:
            raise ConfigurationError(
                "Profile(options=…) must not set a schedule or a folder. Give Profile(after=…, steps=…, folder=…) "
                "instead."
            )
        self._after, self._steps, self._top = after, steps, top
        self._folder = None if folder is None else Path(folder).expanduser()
        self._open: ExitStack | None = None
        self._profiler: Any = None
        self._first, self._is_due = 0, True

    def on_fit_begin(self, run: Run) -> None:
        if self._folder is None and run.folder is None and getattr(run.args, "dry_run", False):
            self._is_due = False  # which writes nothing
            return
        if self._folder is None and run.folder is None:
            raise ConfigurationError("Profile has no folder for its traces. Give output_dir, or Profile(folder=…).")
        self._first, self._is_due = run.state.step + self._after, True

    def on_step_begin(self, run: Run) -> None:
        if self._is_due and run.state.step >= self._first:
            self._first, self._is_due = run.state.step, False  # later than planned if updates were skipped
            self._open = ExitStack()
            # Without a folder: with one, the ranks would wait for each other at the end.
            self._profiler = self._open.enter_context(run.accelerator.profile(dataclasses.replace(self._options)))

    def on_step_end(self, run: Run) -> None:
        if self._open is not None and run.state.step >= self._first + self._steps:
            self._end(run)

    def on_fit_end(self, run: Run) -> None:
        if self._open is not None:
            self._end(run)
        elif self._is_due:
            _logger.warning(
                "Profile wrote no trace: it skips the first %d updates, and the run ended before. Give a smaller "
                "Profile(after=…).",
                self._after,
            )

    def _end(self, run: Run) -> None:
        assert self._open is not None
        opened, self._open = self._open, None
        opened.close()
        folder = self._folder or (run.folder or Path()) / "profile"
        folder.mkdir(parents=True, exist_ok=True)
        steps = f"{self._first + 1}-{max(run.state.step, self._first + 1)}"  # the last update may be incomplete
        trace = folder / f"process-{run.accelerator.process_index}-steps-{steps}.json"
        self._profiler.export_chrome_trace(str(trace))
        run.record_event("profile", steps=steps, trace=str(trace), operations=_slowest(self._profiler, self._top))
        self._profiler = None


def _slowest(profiler: Any, count: int) -> list[dict[str, Any]]:
    """Return the operations with the longest self time, on the device if there is one."""
    operations = [
        {
            "name": event.key,
            "calls": event.count,
            "milliseconds": round(event.self_cpu_time_total / 1e3, 3),
            "device_milliseconds": round(event.self_device_time_total / 1e3, 3),
        }
        for event in profiler.key_averages()
    ]
    operations.sort(key=lambda entry: (entry["device_milliseconds"], entry["milliseconds"]), reverse=True)
    return operations[:count]
