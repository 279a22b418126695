"""SwanLab tracker."""

from pathlib import Path
from typing import Any, ClassVar

from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError, unknown
from trainer_lib.foundation.imports import require
from trainer_lib.tracking.base import BuiltInTracker, on_main_process

_MODES = ("cloud", "online", "local", "offline", "disabled")


class SwanLabTracker(BuiltInTracker):
    """Reports to SwanLab.

    Args:
        run_name: The project.
        token: The id of the run.
        **kwargs: Arguments of `swanlab.init`.
    """

    name: ClassVar[str] = "swanlab"
    module: ClassVar[str] = "swanlab"
    extra: ClassVar[str] = "swanlab"
    takes_texts: ClassVar[bool] = False
    channels_last: ClassVar[bool] = True

    @on_main_process
    def __init__(self, run_name: str, token: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name, self._options = run_name, kwargs
        if token is not None and _mode(kwargs) in ("cloud", "online") and "id" not in kwargs:
            self._options |= {"id": token[:21], "resume": "allow"}
        self.run: Any = None

    @classmethod
    def is_configured(cls) -> bool:
        """Whether there is a key, or a local or offline mode is set."""
        key = environment.variable("SWANLAB_API_KEY")
        return (
            bool(key)
            or _mode({}) in ("local", "offline", "disabled")
            or Path("~/.swanlab/.netrc").expanduser().is_file()
        )

    @classmethod
    def check(cls, project: str, **options: Any) -> None:
        """Raise for an unknown mode, or if there is no key."""
        mode = _mode(options)
        if mode not in _MODES:
            raise ConfigurationError(unknown("mode of swanlab", mode, _MODES))
        if mode in ("cloud", "online") and not cls.is_configured():
            raise ConfigurationError(
                "The tracker swanlab has no key. Set SWANLAB_API_KEY, run `swanlab login`, or give mode='offline' "
                "to write files, which `swanlab sync` sends."
            )

    @classmethod
    def runs_apart(cls, **options: Any) -> bool:
        """Always: it waits for the network at the end."""
        return True

    @classmethod
    def continuing(cls, token: str, resume_step: int | None) -> dict[str, Any]:
        """Return the options with which it continues its run."""
        return {"token": token}

    @classmethod
    def with_folder(cls, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options with the run's folder."""
        return {"log_dir": str(folder / "swanlab"), **options}

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
        swanlab = require(self.module, self.extra)

        if "log_dir" in self._options:
            Path(self._options["log_dir"]).mkdir(parents=True, exist_ok=True)

        self.run = swanlab.init(project=self.run_name, **self._options)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the settings."""
        swanlab = require(self.module, self.extra)

        swanlab.config.update(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers."""
        self.run.log(values, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images, with the channels last."""
        swanlab = require(self.module, self.extra)

        for name, value in values.items():
            images = value if value.ndim == 4 else [value]
            self.run.log({name: [swanlab.Image(image, **kwargs) for image in images]}, step=step)

    @on_main_process
    def finish(self) -> None:
        """Send the remaining values, and finish."""
        swanlab = require(self.module, self.extra)

        states = {"failed": "crashed", "interrupted": "aborted"}
        swanlab.finish(state=states.get(self.outcome, "success"))


def _mode(options: dict[str, Any]) -> str:
    return str(options.get("mode") or environment.variable("SWANLAB_MODE") or "online")
