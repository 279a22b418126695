"""trackio tracker: a local database, or a Space."""

from pathlib import Path
from typing import Any, ClassVar

from trainer_lib.foundation.imports import require
from trainer_lib.tracking.base import BuiltInTracker, on_main_process


class TrackioTracker(BuiltInTracker):
    """Reports to trackio.

    Args:
        run_name: The project.
        token: The source of the run's name, unless `name` is given.
        **kwargs: Arguments of `trackio.init`.
    """

    name: ClassVar[str] = "trackio"
    module: ClassVar[str] = "trackio"
    extra: ClassVar[str] = "trackio"
    channels_last: ClassVar[bool] = True

    @on_main_process
    def __init__(self, run_name: str, token: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name, self._options = run_name, {"embed": False, **kwargs}
        if token is not None:
            self._options = {"name": f"run-{token[:12]}", "resume": "allow", **self._options}
        self.run: Any = None

    @classmethod
    def runs_apart(cls, **options: Any) -> bool:
        """Always: it may send to a Space, and its import is heavy."""
        return True

    @classmethod
    def continuing(cls, token: str, resume_step: int | None) -> dict[str, Any]:
        """Return the options with which it continues its run."""
        return {"token": token}

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
        trackio = require(self.module, self.extra)

        self.run = trackio.init(project=self.run_name, **self._options)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the settings."""
        self.run.config.update(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values."""
        self.run.log(values, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images, with the channels last."""
        trackio = require(self.module, self.extra)

        for name, value in values.items():
            images = value if value.ndim == 4 else value[None]
            for number, image in enumerate(images):
                full = name if len(images) == 1 else f"{name}/{number}"
                self.run.log({full: trackio.Image(image, **kwargs)}, step=step)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None, **kwargs: Any) -> None:
        """Log a file or a folder as an artifact."""
        trackio = require(self.module, self.extra)

        trackio.log_artifact(local_path, name=artifact_path or Path(local_path).name, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Write the remaining values, and finish."""
        self.run.finish()
