"""Options of a project: where states and logs are saved."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from trainer_lib.filesystem.remote_paths import AnyPath, is_url
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options.base import KwargsHandler, check_count, check_flag


@dataclass(repr=False, eq=False)
class ProjectConfiguration(KwargsHandler):
    """Where a project's states and logs are saved, and how many states are kept.

    Args:
        project_dir: The project's folder, or a URL such as `s3://bucket/project`, for the states.
        logging_dir: The folder of logs; by default the project's folder, if it is on this machine.
        automatic_checkpoint_naming: Let `save_state()` name states: `checkpoints/checkpoint_0`, `checkpoint_1`, … in
            the project's folder.
        total_limit: The number of states to keep with automatic naming. Older ones are deleted after a new one is
            written.
        iteration: The number of the next state.
        save_on_each_node: Write the state on each machine, for machines without a shared file system.
    """

    project_dir: str | AnyPath | None = None
    logging_dir: str | Path | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("automatic_checkpoint_naming", "save_on_each_node"):
            check_flag(name, getattr(self, name))
        check_count("iteration", self.iteration, at_least=0)
        if self.total_limit is not None:
            check_count("total_limit", self.total_limit)
            if not self.automatic_checkpoint_naming:
                raise ConfigurationError(
                    f"total_limit={self.total_limit} needs automatic_checkpoint_naming=True. "
                    "Set that too, or leave total_limit out."
                )
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | AnyPath | None = None) -> None:
        """Set the project's folder, and use it for logs too if no logging folder is set."""
        self.project_dir = project_dir
        if self.logging_dir is None and not is_url(project_dir):
            self.logging_dir = cast(str | Path | None, project_dir)


def project_configuration(
    directory: str | AnyPath | None, config: ProjectConfiguration | None, logging_dir: str | Path | None = None
) -> ProjectConfiguration:
    """Return one configuration from the two ways to give the folders of a project and its logs."""
    if config is not None and not isinstance(config, ProjectConfiguration):
        raise ConfigurationError(f"project_config must be a ProjectConfiguration, got a {type(config).__name__}.")
    chosen = config or ProjectConfiguration(project_dir=directory, logging_dir=logging_dir)
    if logging_dir is not None and str(chosen.logging_dir) != str(logging_dir):
        raise ConfigurationError(
            f"logging_dir={str(logging_dir)!r} and ProjectConfiguration(logging_dir={str(chosen.logging_dir)!r}) "
            "contradict each other. Give one of them."
        )
    if chosen.project_dir is None:
        chosen.set_directories(directory)
    elif directory is not None and str(chosen.project_dir) != str(directory):
        raise ConfigurationError(
            f"project_dir={str(directory)!r} and ProjectConfiguration(project_dir={str(chosen.project_dir)!r}) "
            "contradict each other. Give one of them."
        )
    if chosen.automatic_checkpoint_naming and chosen.project_dir is None:
        raise ConfigurationError(
            "automatic_checkpoint_naming=True needs a project folder, which is not set. Give project_dir."
        )
    return chosen
