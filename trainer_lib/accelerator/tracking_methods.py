"""This file is the engine's side of trackers: begin them, tell them what happens, end them."""

from collections.abc import Mapping
from typing import Any

from trainer_lib.accelerator.collective_methods import Processes
from trainer_lib.foundation.errors import ConfigurationError, unknown
from trainer_lib.options.project_options import ProjectConfiguration
from trainer_lib.tracking.base import GeneralTracker
from trainer_lib.tracking.registry import names_of, resolve, tracker_class
from trainer_lib.tracking.tracker_group import Isolation, TrackerGroup


class Reporting(Processes):
    """What an `Accelerator` tells its trackers."""

    project_configuration: ProjectConfiguration
    log_with: list[str | GeneralTracker]
    _trackers: TrackerGroup | None = None

    @property
    def trackers(self) -> list[Any]:
        """The trackers of this process, once `init_trackers` was called."""
        return [] if self._trackers is None else self._trackers.trackers

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        isolation: Isolation | Mapping[str, Isolation] = "auto",
    ) -> None:
        """Begin the trackers that `log_with` names, without waiting for them.

        Args:
            project_name: What the runs belong to.
            config: The settings of the run; values under names such as `api_key` are hidden.
            init_kwargs: Further arguments of trackers, by their names.
            isolation: Where they live: "thread" is this process, "process" one of their own, and "auto" leaves that to
                each tracker; for all of them, or by their names.

        Raises:
            ConfigurationError: For what can be known now not to work: no key, a bad address, no folder.

        Example:
            >>> accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir="logs")
            >>> accelerator.init_trackers("digits", config={"learning_rate": 0.1})
            >>> accelerator.log({"loss": 0.5}, step=1)
            >>> accelerator.end_training()
        """
        if not isinstance(project_name, str) or not project_name:
            raise ConfigurationError(f"project_name must be a text, got {project_name!r}.")
        if config is not None and not isinstance(config, Mapping):
            raise ConfigurationError(
                f"config must be a dictionary, got a {type(config).__name__}. Of an object: vars(config)."
            )
        if self._trackers is not None:
            self._trackers.finish()
        self._trackers = TrackerGroup(
            self.log_with, project_name, self.project_configuration.logging_dir, init_kwargs, isolation=isolation
        )
        if config is not None:
            self._trackers.store_init_configuration(config)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Tell all trackers values of a step, without waiting for them; before `init_trackers` nobody is told.

        Args:
            values: Numbers, tensors of one element, texts, or dictionaries of these.
            step: The step.
            log_kwargs: What trackers take besides, by their names.
        """
        if self._trackers is not None:
            self._trackers.log(values, step, log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker of a name, or with `unwrap` the object behind it.

        Where a tracker has a process of its own, what is unwrapped passes calls on, and returns nothing. On processes
        that do not report, what is returned does nothing.

        Raises:
            ConfigurationError: If there is none.
        """
        found = next((one for one in self.trackers if one.name == name), None)
        if found is not None:
            return found.tracker if unwrap else found
        known = names_of(self.log_with)
        if name not in known:
            raise ConfigurationError(unknown("tracker", name, known))
        if self._trackers is None:
            raise ConfigurationError(f"The tracker {name} has not begun. Call init_trackers first.")
        return GeneralTracker(_blank=True)

    def _finish_trackers(self) -> None:
        if self._trackers is not None:
            self._trackers.finish()


def checked_trackers(log_with: Any, configuration: ProjectConfiguration) -> list[str | GeneralTracker]:
    """Return the trackers asked for.

    Raises:
        ConfigurationError: If one is not known, is named twice, or has no folder to write to.
        MissingPackageError: If one is not installed.
    """
    trackers = resolve(log_with, "log_with")
    for one in trackers:
        needs_folder = isinstance(one, str) and getattr(tracker_class(one), "requires_logging_directory", False)
        if needs_folder and configuration.logging_dir is None:
            raise ConfigurationError(
                f"log_with: the tracker {one} writes files, and there is no folder for them. Give "
                "Accelerator(project_dir=…) or ProjectConfiguration(logging_dir=…)."
            )
    return trackers
