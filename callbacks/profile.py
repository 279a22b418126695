"""This file is a look into some updates with torch's profiler."""

import dataclasses
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from trainer_lib.events import Callback, Run
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options.profiler_options import ProfileKwargs


class Profile(Callback):
    """Profiles some updates, and writes a trace of them, which a browser shows (chrome://tracing, perfetto).

    Each process writes its own: `profile/process-0-steps-11-15.json` in the run's folder. The operations that took
    longest are told in the history ("profile"). Profiled updates take longer than others.

    Args:
        after: How many updates to leave alone first, counted from where training begins or goes on.
        steps: How many to profile.
        options: What to record; neither with a schedule nor with a folder, which this callback sees to.
        folder: Where the traces go; by default `profile` in the run's folder.
        top: How many operations to tell.

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
                raise ConfigurationError(f"Profile({name}={shown(value)}): give a whole number from {least} on.")
        self._options = options or ProfileKwargs()
        if self._options.schedule_option is not None or self._options.output_trace_dir is not None:
            raise ConfigurationError(
                "Profile(options=…) has a schedule or a folder. Say Profile(after=…, steps=…, folder=…) instead."
            )
        self._after, self._steps, self._top = after, steps, top
        self._given = None if folder is None else Path(folder).expanduser()
        self._open: ExitStack | None = None
        self._profiler: Any = None
        self._first, self._is_due = 0, True

    def on_fit_begin(self, run: Run) -> None:
        if self._given is None and run.folder is None:
            raise ConfigurationError("Profile has no folder for traces. Give output_dir, or Profile(folder=…).")
        self._first, self._is_due = run.state.step + self._after, True

    def on_step_begin(self, run: Run) -> None:
        if self._is_due and run.state.step >= self._first:
            self._first, self._is_due = run.state.step, False  # further on, where updates were left out
            self._open = ExitStack()
            # Without a folder: at the end of a block with one, processes wait for each other.
            self._profiler = self._open.enter_context(run.accelerator.profile(dataclasses.replace(self._options)))

    def on_step_end(self, run: Run) -> None:
        if self._open is not None and run.state.step >= self._first + self._steps:
            self._end(run)

    def on_fit_end(self, run: Run) -> None:
        if self._open is not None:
            self._end(run)

    def _end(self, run: Run) -> None:
        assert self._open is not None
        opened, self._open = self._open, None
        opened.close()
        folder = self._given or (run.folder or Path()) / "profile"
        folder.mkdir(parents=True, exist_ok=True)
        steps = f"{self._first + 1}-{max(run.state.step, self._first + 1)}"  # the last may not have come to its end
        trace = folder / f"process-{run.accelerator.process_index}-steps-{steps}.json"
        self._profiler.export_chrome_trace(str(trace))
        run.record_event("profile", steps=steps, trace=str(trace), operations=_longest(self._profiler, self._top))
        self._profiler = None


def _longest(profiler: Any, count: int) -> list[dict[str, Any]]:
    """Return the operations that took most time of their own, on the device where there is one."""
    found = [
        {
            "name": one.key,
            "calls": one.count,
            "milliseconds": round(one.self_cpu_time_total / 1e3, 3),
            "device_milliseconds": round(one.self_device_time_total / 1e3, 3),
        }
        for one in profiler.key_averages()
    ]
    found.sort(key=lambda one: (one["device_milliseconds"], one["milliseconds"]), reverse=True)
    return found[:count]
