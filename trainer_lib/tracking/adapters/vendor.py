"""What the trackers of vendors have in common: a table of facts, and what follows from it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError, unknown
from trainer_lib.foundation.imports import require
from trainer_lib.tracking.base import BuiltInTracker, on_main_process


class VendorTracker(BuiltInTracker):
    """The base class of trackers that send to a vendor's service; an adapter states its facts and what differs.

    Attributes:
        object_name: The attribute that holds the vendor's object.
        name_option: The option that sets the run's name.
        takes_token: Whether its `token` continues a run.
        modes: The modes that its option `mode` knows; empty: it has no such option.
        online_modes: The modes that need a key.
        mode_variable: The environment variable of the mode.
        key_variable: The environment variable of the key.
        without_key: The error if there is no key, with how to fix it.
    """

    channels_last: ClassVar[bool] = True
    object_name: ClassVar[str] = "run"
    name_option: ClassVar[str] = "name"
    takes_token: ClassVar[bool] = True
    modes: ClassVar[tuple[str, ...]] = ()
    online_modes: ClassVar[tuple[str, ...]] = ()
    mode_variable: ClassVar[str] = ""
    key_variable: ClassVar[str] = ""
    without_key: ClassVar[str] = ""

    @on_main_process
    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._options: dict[str, Any] = kwargs
        setattr(self, self.object_name, None)

    @classmethod
    def is_online(cls, options: Mapping[str, Any]) -> bool:
        """Whether it sends to the service, for which it needs a key."""
        return cls.mode(options) in cls.online_modes

    @classmethod
    def mode(cls, options: Mapping[str, Any]) -> str:
        """Return the mode of the options, or that of the environment."""
        return str(options.get("mode") or environment.variable(cls.mode_variable) or "online")

    @classmethod
    def has_login(cls) -> bool:
        """Whether a file of the user has a key."""
        return False

    @classmethod
    def is_configured(cls) -> bool:
        """Whether it has a key or needs none."""
        return bool(environment.variable(cls.key_variable)) or not cls.is_online({}) or cls.has_login()

    @classmethod
    def check(cls, project: str, **options: Any) -> None:
        """Raise for an unknown mode, or if there is no key."""
        if cls.modes and (mode := cls.mode(options)) not in cls.modes:
            raise ConfigurationError(unknown(f"mode of {cls.name}", mode, cls.modes))
        if cls.is_online(options) and not cls.is_configured():
            raise ConfigurationError(cls.without_key)

    @classmethod
    def runs_apart(cls, **options: Any) -> bool:
        """Always: it waits for the network at the end."""
        return True

    @classmethod
    def continuing(cls, token: str, resume_step: int | None) -> dict[str, Any]:
        """Return the options with which it continues its run."""
        return {"token": token} if cls.takes_token else {}

    @classmethod
    def named(cls, run_name: str) -> dict[str, Any]:
        """Return the options that set the run's name."""
        return {cls.name_option: run_name}

    @property
    def tracker(self) -> Any:
        """The vendor's object."""
        return getattr(self, self.object_name)

    @property
    def vendor(self) -> Any:
        """The vendor's module."""
        return require(self.module, self.extra)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the settings."""
        self.tracker.config.update(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values."""
        self.tracker.log(values, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images, with the channels last."""
        for name, images in images_by_name(values):
            self.tracker.log({name: [self.vendor.Image(image, **kwargs) for image in images]}, step=step)


def images_by_name(values: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the name and the images of each value: one image, or several. Gray ones have no dimension for channels."""
    for name, value in values.items():
        images = list(value) if isinstance(value, list) or value.ndim == 4 else [value]
        yield name, [image[..., 0] if image.ndim == 3 and image.shape[-1] == 1 else image for image in images]


def make_folder(options: Mapping[str, Any], option: str) -> None:
    """Create the folder that an option names, if it is given."""
    if option in options:
        Path(options[option]).mkdir(parents=True, exist_ok=True)
