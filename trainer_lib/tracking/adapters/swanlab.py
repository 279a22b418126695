"""SwanLab tracker."""

from pathlib import Path
from typing import Any, ClassVar

from trainer_lib.tracking.adapters.vendor import VendorTracker, make_folder
from trainer_lib.tracking.base import on_main_process


class SwanLabTracker(VendorTracker):
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
    modes: ClassVar[tuple[str, ...]] = ("cloud", "online", "local", "offline", "disabled")
    online_modes: ClassVar[tuple[str, ...]] = ("cloud", "online")
    mode_variable: ClassVar[str] = "SWANLAB_MODE"
    key_variable: ClassVar[str] = "SWANLAB_API_KEY"
    without_key: ClassVar[str] = (
        "The tracker swanlab has no key. Set SWANLAB_API_KEY, or run `swanlab login`. Without a network, give "
        "SwanLabCallback(mode='offline'): `swanlab sync` sends the files later."
    )

    @on_main_process
    def __init__(self, run_name: str, token: str | None = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        if token is not None and self.is_online(kwargs) and "id" not in kwargs:
            self._options |= {"id": token[:21], "resume": "allow"}

    @classmethod
    def has_login(cls) -> bool:
        """Whether `swanlab login` wrote a key."""
        return Path("~/.swanlab/.netrc").expanduser().is_file()

    @classmethod
    def with_folder(cls, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options with the run's folder."""
        return {"log_dir": str(folder / "swanlab"), **options}

    @on_main_process
    def start(self) -> None:
        """Start the run, or continue it."""
        make_folder(self._options, "log_dir")
        self.run: Any = self.vendor.init(project=self.run_name, **self._options)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the settings."""
        self.vendor.config.update(values)

    @on_main_process
    def finish(self) -> None:
        """Send the remaining values, and finish."""
        states = {"failed": "crashed", "interrupted": "aborted"}
        self.vendor.finish(state=states.get(self.outcome, "success"))
