"""trackio tracker: a local database, or a Space."""

from pathlib import Path
from typing import Any, ClassVar

from trainer_lib.tracking.adapters.vendor import VendorTracker, images_by_name
from trainer_lib.tracking.base import on_main_process


class TrackioTracker(VendorTracker):
    """Reports to trackio.

    Args:
        run_name: The project.
        token: The source of the run's name, unless `name` is given.
        **kwargs: Arguments of `trackio.init`.
    """

    name: ClassVar[str] = "trackio"
    module: ClassVar[str] = "trackio"
    extra: ClassVar[str] = "trackio"
    options_of: ClassVar[tuple[str, str] | None] = ("trackio", "init")
    set_options: ClassVar[frozenset[str]] = frozenset({"project"})

    @on_main_process
    def __init__(self, run_name: str, token: str | None = None, **kwargs: Any) -> None:
        super().__init__(run_name, **{"embed": False, **kwargs})
        if token is not None:
            self._options = {"name": f"run-{token[:12]}", "resume": "allow", **self._options}

    @on_main_process
    def start(self) -> None:
        """Start the run, or continue it."""
        self.run: Any = self.vendor.init(project=self.run_name, **self._options)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images, with the channels last."""
        for name, images in images_by_name(values):
            for number, image in enumerate(images):
                full = name if len(images) == 1 else f"{name}/{number}"
                self.run.log({full: self.vendor.Image(image, **kwargs)}, step=step)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None, **kwargs: Any) -> None:
        """Log a file or a folder as an artifact."""
        self.vendor.log_artifact(local_path, name=artifact_path or Path(local_path).name, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Write the remaining values, and finish."""
        self.run.finish()
