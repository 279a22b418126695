"""The `Accelerator`'s methods for trackers: `init_trackers`, `log`, `get_tracker`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer_lib.accelerator.methods.collective_methods import CollectiveMethods
from trainer_lib.foundation.errors import ConfigurationError, unknown
from trainer_lib.options.project_options import ProjectConfiguration
from trainer_lib.tracking.base import GeneralTracker, SilentTracker
from trainer_lib.tracking.registry import installed_trackers, names_of, tracker_class

if TYPE_CHECKING:
    from trainer_lib.accelerator.checkpoints.checkpoints import Checkpoints
    from trainer_lib.tracking.tracker_group import Isolation, TrackerGroup


class TrackingMethods(CollectiveMethods):
    """Methods of an `Accelerator` that log to trackers."""

    checkpoints: "Checkpoints"
    log_with: list[str | GeneralTracker]
    _trackers: "TrackerGroup | None" = None
    _attached: "tuple[TrackerGroup, ...]" = ()  # of the callbacks of a Trainer

    @property
    def trackers(self) -> list[Any]:
        """The trackers of this rank: those of `init_trackers`, and while a Trainer's `fit` runs those of its run."""
        return [tracker for group in self._groups for tracker in group.trackers]

    @property
    def _groups(self) -> "list[TrackerGroup]":
        return [*([] if self._trackers is None else [self._trackers]), *self._attached]

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        isolation: "Isolation | Mapping[str, Isolation]" = "auto",
    ) -> None:
        """Start the trackers of `log_with`, without waiting for them.

        Args:
            project_name: The project that the runs belong to.
            config: The settings of the run; values under names such as `api_key` are hidden.
            init_kwargs: Further arguments of trackers, by tracker name.
            isolation: Where trackers run: "thread" in this process, "process" in a child process, "auto" as each
                tracker prefers. One value for all of them, or a dictionary by tracker name.

        Raises:
            ConfigurationError: If a tracker cannot work: a missing key, a bad address, no folder.

        Example:
            >>> accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir="logs")
            >>> accelerator.init_trackers("digits", config={"learning_rate": 0.1})
            >>> accelerator.log({"loss": 0.5}, step=1)
            >>> accelerator.end_training()
        """
        from trainer_lib.tracking.tracker_group import TrackerGroup

        if not isinstance(project_name, str) or not project_name:
            raise ConfigurationError(f"project_name must be a non-empty string (got {project_name!r}).")
        if config is not None and not isinstance(config, Mapping):
            raise ConfigurationError(
                f"config must be a dictionary (got a {type(config).__name__}). For an object, give vars(config)."
            )
        if self._trackers is not None:
            self._trackers.finish()
        self._trackers = TrackerGroup(
            self.log_with, project_name, self.checkpoints.project.logging_dir, init_kwargs, isolation=isolation
        )
        if config is not None:
            self._trackers.store_init_configuration(config)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log values of a step to all trackers, without waiting for them; if there are none, do nothing.

        Args:
            values: Numbers, tensors of one element, texts, or dictionaries of these.
            step: The step.
            log_kwargs: Further arguments of the trackers' `log`, by tracker name.
        """
        for group in self._groups:
            group.log(values, step, log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker with this name, or with `unwrap` its library's own object.

        If a tracker runs in a child process, the unwrapped object forwards calls to it and returns nothing. On ranks
        that do not log, you get a tracker that does nothing.

        In a callback of a Trainer, `run.accelerator.get_tracker("wandb")` is a tracker of the run.

        Raises:
            ConfigurationError: If there is no such tracker.
        """
        tracker = next((tracker for tracker in self.trackers if tracker.name == name), None)
        if tracker is not None:
            return tracker.tracker if unwrap else tracker
        attached = [known for group in self._attached for known in group.names]
        known = [*names_of(self.log_with), *attached]
        if not known:
            raise ConfigurationError(
                f"There is no tracker {name!r}, nor any other. Give Accelerator(log_with={name!r}); in a Trainer give "
                f"TrainingArguments(report_to={name!r}), and take the tracker while fit runs, in a callback."
            )
        if name not in known:
            raise ConfigurationError(unknown("tracker", name, known))
        if self._trackers is None and name not in attached:
            raise ConfigurationError(f"The tracker {name} has not started. Call init_trackers first.")
        return SilentTracker(name)

    def attach_trackers(self, group: "TrackerGroup") -> None:
        """Let `log` and `get_tracker` use trackers that a callback starts and finishes, until `detach_trackers`."""
        self._attached = (*self._attached, group)

    def detach_trackers(self, group: "TrackerGroup") -> None:
        """Forget the trackers of a callback."""
        self._attached = tuple(other for other in self._attached if other is not group)

    def _finish_trackers(self) -> None:
        if self._trackers is not None:
            self._trackers.finish()


def checked_trackers(log_with: Any, configuration: ProjectConfiguration) -> list[str | GeneralTracker]:
    """Return the trackers of `log_with` that are installed, each once; warn about the others.

    Raises:
        ConfigurationError: If a tracker is unknown, or has no folder to write to.
    """
    trackers = installed_trackers(log_with)
    for tracker in trackers:
        needs_folder = isinstance(tracker, str) and getattr(tracker_class(tracker), "requires_logging_directory", False)
        if needs_folder and configuration.logging_dir is None:
            raise ConfigurationError(
                f"log_with: the tracker {tracker} writes files and needs a folder. Give Accelerator(project_dir=…) or "
                "ProjectConfiguration(logging_dir=…)."
            )
    return trackers
