"""Options of torch's profiler."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_lib.foundation.errors import ConfigurationError, unknown
from trainer_lib.options.base import KwargsHandler, check_count, check_flag

if TYPE_CHECKING:
    from torch.profiler import ProfilerActivity, profile

_ACTIVITIES = ("cpu", "cuda", "xpu", "mtia", "hpu")
_CYCLE = ("skip_first", "wait", "warmup", "active", "repeat")
_NEEDED = ("wait", "warmup", "active")


@dataclass(repr=False, eq=False)
class ProfileKwargs(KwargsHandler):
    """What `Accelerator.profile` records, when, and where it writes traces.

    Args:
        activities: The activities to record: "cpu", "cuda", "xpu", "mtia", "hpu"; by default all that are available.
        schedule_option: Record cycles of steps, each of which ends with `profiler.step()`: skip the first `skip_first`
            steps, then wait for `wait` steps, warm up for `warmup` steps and record `active` steps, `repeat` times, or
            to the end if `repeat` is 0. By default the whole block is recorded.
        on_trace_ready: A function that is called with the profiler at the end of each cycle. Its errors are raised at
            the end of the block, because torch's profiler cannot continue after one.
        record_shapes: Record the shapes of inputs.
        profile_memory: Record memory that is allocated and freed.
        with_stack: Record the source lines that call operations.
        with_flops: Estimate the FLOPs of matrix products and convolutions.
        with_modules: Record the modules that operations belong to.
        output_trace_dir: The folder for traces in the Chrome format (chrome://tracing, perfetto). Rank 0 writes
            `profile_0.json`, and its later cycles `profile_0_2.json`, `profile_0_3.json` and so on.

    Example:
        >>> ProfileKwargs(activities=["cpu"], schedule_option={"wait": 1, "warmup": 1, "active": 2, "repeat": 1})
        ... # doctest: +ELLIPSIS
        ProfileKwargs(activities=['cpu'], ...
    """

    activities: "Sequence[str | ProfilerActivity] | None" = None
    schedule_option: Mapping[str, int] | None = None
    on_trace_ready: "Callable[[profile], Any] | None" = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | Path | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        self._check_activities()
        if self.schedule_option is not None:
            _check_schedule(self.schedule_option)
        if self.on_trace_ready is not None and not callable(self.on_trace_ready):
            raise ConfigurationError(f"on_trace_ready must be a function of the profiler, got {self.on_trace_ready!r}.")
        for name in ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules"):
            check_flag(name, getattr(self, name))
        if not isinstance(self.output_trace_dir, (str, Path, type(None))) or self.output_trace_dir == "":
            raise ConfigurationError(f"output_trace_dir must be the path of a folder, got {self.output_trace_dir!r}.")

    def build(self) -> "profile":
        """Return torch's profiler with these options; it writes no trace by itself.

        Raises:
            ConfigurationError: If this machine cannot record one of the activities.
        """
        import torch.profiler

        return torch.profiler.profile(
            activities=None if self.activities is None else [_supported(activity) for activity in self.activities],
            schedule=None if self.schedule_option is None else torch.profiler.schedule(**self.schedule_option),
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )

    def _check_activities(self) -> None:
        if isinstance(self.activities, str) or (self.activities is not None and not self.activities):
            raise ConfigurationError(f"activities must be a list such as ['cpu'], got {self.activities!r}.")
        for activity in self.activities or ():
            if isinstance(activity, str) and activity.lower() not in _ACTIVITIES:
                raise ConfigurationError(unknown("activity", activity, _ACTIVITIES))


def _check_schedule(schedule: Mapping[str, int]) -> None:
    for name, steps in schedule.items():
        if name not in _CYCLE:
            raise ConfigurationError(unknown("key of schedule_option", name, _CYCLE))
        check_count(f"schedule_option[{name!r}]", steps, at_least=1 if name == "active" else 0)
    missing = [name for name in _NEEDED if name not in schedule]
    if missing:
        raise ConfigurationError(f"schedule_option lacks {', '.join(missing)}. It needs {', '.join(_NEEDED)}.")


def _supported(activity: "str | ProfilerActivity") -> "ProfilerActivity":
    from torch.profiler import ProfilerActivity, supported_activities

    kind: ProfilerActivity = getattr(ProfilerActivity, activity.upper()) if isinstance(activity, str) else activity
    supported = supported_activities()
    if kind not in supported:
        names = [activity.name.lower() for activity in supported]
        raise ConfigurationError(
            f"The activity {str(activity)!r} cannot be recorded on this machine. Supported: {', '.join(sorted(names))}."
        )
    return kind
