"""Weights & Biases tracker."""

import netrc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError, unknown
from trainer_lib.foundation.imports import require
from trainer_lib.tracking.base import BuiltInTracker, Point, on_main_process

_MODES = ("online", "offline", "disabled", "shared")


class WandBTracker(BuiltInTracker):
    """Reports to Weights & Biases.

    Args:
        run_name: The project.
        token: The id of the run.
        **kwargs: Arguments of `wandb.init`.
    """

    name: ClassVar[str] = "wandb"
    module: ClassVar[str] = "wandb"
    extra: ClassVar[str] = "wandb"
    channels_last: ClassVar[bool] = True

    @on_main_process
    def __init__(self, run_name: str, token: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name, self._options = run_name, kwargs
        if token is not None and "id" not in kwargs and "resume" not in kwargs:
            self._options |= {"id": token, "resume": "allow"}
        self.run: Any = None

    @classmethod
    def is_configured(cls) -> bool:
        """Whether there is a key, or offline mode is set."""
        if environment.variable("WANDB_API_KEY") or _mode({}) in ("offline", "disabled"):
            return True
        host = (environment.variable("WANDB_BASE_URL") or "https://api.wandb.ai").partition("://")[2].partition("/")[0]
        try:
            file = environment.variable("NETRC")
            return netrc.netrc(file or str(Path("~/.netrc").expanduser())).authenticators(host) is not None
        except (OSError, netrc.NetrcParseError):
            return False

    @classmethod
    def check(cls, project: str, **options: Any) -> None:
        """Raise for an unknown mode, or if there is no key."""
        mode = _mode(options)
        if mode not in _MODES:
            raise ConfigurationError(unknown("mode of wandb", mode, _MODES))
        if mode in ("online", "shared") and not cls.is_configured():
            raise ConfigurationError(
                "The tracker wandb has no key. Set WANDB_API_KEY, run `wandb login`, or give mode='offline' to "
                "write files, which `wandb sync` sends."
            )

    @classmethod
    def runs_apart(cls, **options: Any) -> bool:
        """Always: it waits for the network at the end, in an exit hook too."""
        return True

    @classmethod
    def continuing(cls, token: str, resume_step: int | None) -> dict[str, Any]:
        """Return the options with which it continues its run."""
        return {"token": token}

    @classmethod
    def with_folder(cls, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options with the run's folder."""
        return options if environment.variable("WANDB_DIR") else {"dir": str(folder), **options}

    @classmethod
    def named(cls, run_name: str) -> dict[str, Any]:
        """Return the options that set the run's name."""
        return {"name": run_name}

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.run

    @on_main_process
    def start(self) -> None:
        """Start the run, or continue it."""
        wandb = require(self.module, self.extra)

        if "dir" in self._options:
            Path(self._options["dir"]).mkdir(parents=True, exist_ok=True)
        settings = {"disable_git": True, "disable_code": True, "console": "off"}
        self.run = wandb.init(project=self.run_name, **{"settings": settings, **self._options})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the settings."""
        self.run.config.update(values, allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values."""
        self.run.log(values, step=step, **kwargs)

    @on_main_process
    def log_points(self, points: Sequence[Point]) -> None:
        """Log the values of several calls, with their times."""
        for point in points:
            self.run.log({"_timestamp": point.time, **point.values}, step=point.step, **point.kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images, with the channels last."""
        wandb = require(self.module, self.extra)

        for name, value in values.items():
            images = value if value.ndim == 4 else [value]
            self.run.log({name: [wandb.Image(image, **kwargs) for image in images]}, step=step)

    @on_main_process
    def log_table(
        self, table_name: str, columns: list[str], data: list[list[Any]], step: int | None = None, **kwargs: Any
    ) -> None:
        """Log a table."""
        wandb = require(self.module, self.extra)

        self.run.log({table_name: wandb.Table(columns=columns, data=data, **kwargs)}, step=step)

    @on_main_process
    def log_artifact(
        self, local_path: str, artifact_path: str | None = None, type: str = "model", **kwargs: Any
    ) -> None:
        """Log a file or a folder."""
        wandb = require(self.module, self.extra)

        path = Path(local_path)
        artifact = wandb.Artifact(f"{artifact_path or path.name}-{self.run.id}", type=type, **kwargs)
        if path.is_dir():
            artifact.add_dir(str(path))
        else:
            artifact.add_file(str(path))
        self.run.log_artifact(artifact)

    @on_main_process
    def finish(self) -> None:
        """Send the remaining values, and finish."""
        self.run.finish(exit_code=int(self.outcome in ("failed", "interrupted")))


def _mode(options: dict[str, Any]) -> str:
    return str(options.get("mode") or environment.variable("WANDB_MODE") or "online")
