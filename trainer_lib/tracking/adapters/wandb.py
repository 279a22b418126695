"""Weights & Biases tracker."""

import netrc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.tracking.adapters.vendor import VendorTracker, make_folder
from trainer_lib.tracking.base import Point, on_main_process
from trainer_lib.tracking.table import table_of

_REFUSED = frozenset("/\\#?%:")  # in names of projects
_LONGEST_NAME = 128


class WandBTracker(VendorTracker):
    """Reports to Weights & Biases.

    Args:
        run_name: The project.
        token: The id of the run.
        **kwargs: Arguments of `wandb.init`.
    """

    name: ClassVar[str] = "wandb"
    module: ClassVar[str] = "wandb"
    extra: ClassVar[str] = "wandb"
    options_of: ClassVar[tuple[str, str] | None] = ("wandb.sdk.wandb_init", "init")
    set_options: ClassVar[frozenset[str]] = frozenset({"project"})
    modes: ClassVar[tuple[str, ...]] = ("online", "offline", "disabled", "shared")
    online_modes: ClassVar[tuple[str, ...]] = ("online", "shared")
    mode_variable: ClassVar[str] = "WANDB_MODE"
    key_variable: ClassVar[str] = "WANDB_API_KEY"
    project_variable: ClassVar[str] = "WANDB_PROJECT"
    drops_earlier_steps: ClassVar[bool] = True
    without_key: ClassVar[str] = (
        "The tracker wandb has no key. Set WANDB_API_KEY, or run `wandb login`. Without a network, set "
        "WANDB_MODE=offline or give WandbCallback(mode='offline'): `wandb sync` sends the files later."
    )

    @on_main_process
    def __init__(self, run_name: str, token: str | None = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        if token is not None and "id" not in kwargs and "resume" not in kwargs:
            self._options |= {"id": token, "resume": "allow"}

    @classmethod
    def check(cls, project: str, **options: Any) -> None:
        """Raise for a project's name that W&B refuses, too."""
        super().check(project, **options)
        refused = sorted(set(project) & _REFUSED)
        if refused or len(project) > _LONGEST_NAME:
            reason = f"it has {' '.join(refused)}" if refused else f"it has more than {_LONGEST_NAME} characters"
            raise ConfigurationError(
                f"W&B does not take {project!r} as the name of a project: {reason}. Give the tracker another "
                "project, or set WANDB_PROJECT."
            )

    @classmethod
    def has_login(cls) -> bool:
        """Whether the user's netrc file has a key."""
        host = (environment.variable("WANDB_BASE_URL") or "https://api.wandb.ai").partition("://")[2].partition("/")[0]
        try:
            file = environment.variable("NETRC")
            return netrc.netrc(file or str(Path("~/.netrc").expanduser())).authenticators(host) is not None
        except (OSError, netrc.NetrcParseError):
            return False

    @classmethod
    def named(cls, run_name: str) -> dict[str, Any]:
        """Return the options that set the run's name; `WANDB_NAME` overrides it."""
        return {} if environment.variable("WANDB_NAME") else super().named(run_name)

    @classmethod
    def with_folder(cls, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options with the run's folder."""
        return options if environment.variable("WANDB_DIR") else {"dir": str(folder), **options}

    @on_main_process
    def start(self) -> None:
        """Start the run, or continue it."""
        make_folder(self._options, "dir")
        settings = {"disable_git": True, "disable_code": True, "console": "off"}
        self.run: Any = self.vendor.init(project=self.run_name, **{"settings": settings, **self._options})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the settings."""
        self.run.config.update(values, allow_val_change=True)

    @on_main_process
    def log_points(self, points: Sequence[Point]) -> None:
        """Log the values of several calls, with their times."""
        for point in points:
            self.run.log({"_timestamp": point.time, **point.values}, step=point.step, **point.kwargs)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table: rows with column names, or a data frame."""
        columns, data = table_of(columns, data, dataframe)
        self.run.log({table_name: self.vendor.Table(columns=columns, data=data, **kwargs)}, step=step)

    @on_main_process
    def log_artifact(
        self, local_path: str, artifact_path: str | None = None, type: str = "model", **kwargs: Any
    ) -> None:
        """Log a file or a folder."""
        path = Path(local_path)
        artifact = self.vendor.Artifact(f"{artifact_path or path.name}-{self.run.id}", type=type, **kwargs)
        if path.is_dir():
            artifact.add_dir(str(path))
        else:
            artifact.add_file(str(path))
        self.run.log_artifact(artifact)

    @on_main_process
    def finish(self) -> None:
        """Send the remaining values, and finish."""
        self.run.finish(exit_code=int(self.outcome in ("failed", "interrupted")))
