"""This file is what a tracker is: something that takes a run's settings and numbers, and shows them to people."""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from trainer_lib.foundation import environment
from trainer_lib.foundation.imports import is_package_available

_NEEDED = ("name", "requires_logging_directory", "tracker")


class Point(NamedTuple):
    """What one call of `log` brought."""

    values: dict[str, Any]
    step: int | None
    time: float
    kwargs: dict[str, Any]


def is_main_process() -> bool:
    """Whether this is the first of all processes, told without bringing them together."""
    process = sys.modules.get("trainer_lib.state.partial_state")
    if process is not None and process.is_initialized():
        return process.PartialState().is_main_process
    world = environment.read_world()
    return world is None or world.rank == 0


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have a method of a tracker do nothing on other processes, unless its `main_process_only` is false.

    Example:
        >>> class Printing(GeneralTracker):
        ...     name, requires_logging_directory, tracker = "printing", False, None
        ...     @on_main_process
        ...     def log(self, values, step=None, **kwargs):
        ...         print(step, values)
        >>> Printing().log({"loss": 0.5}, step=1)
        1 {'loss': 0.5}
    """

    @functools.wraps(function)
    def gated(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.main_process_only and not is_main_process():
            return None
        return function(self, *args, **kwargs)

    return gated


class GeneralTracker:
    """The base of all trackers, and what to derive one's own from.

    A subclass has a `name`, says by `requires_logging_directory` whether it is made with a folder, and offers by
    `tracker` the object that it stands for. All its methods but the constructor are called on a thread of its own, so
    what may only be used on the thread that made it is made in `start`.

    Attributes:
        main_process_only: Whether only the first process reports to it.
        outcome: How the run ended, known by the time of `finish`: "finished", "stopped", "interrupted" or "failed".
    """

    main_process_only: bool = True
    outcome: str = "finished"

    def __init__(self, _blank: bool = False) -> None:
        if _blank:
            return
        missing = [name for name in _NEEDED if not hasattr(type(self), name) and name not in vars(self)]
        if missing:
            raise NotImplementedError(
                f"The tracker {type(self).__name__} lacks {', '.join(missing)}: a tracker has a name, says by "
                "requires_logging_directory whether it needs a folder, and has a property tracker."
            )

    def start(self) -> None:
        """Begin, before anything is logged."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Take the settings of the run."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Take values of a step."""

    def log_points(self, points: Sequence[Point]) -> None:
        """Take the values of several calls at once."""
        for point in points:
            self.log(point.values, step=point.step, **point.kwargs)

    def finish(self) -> None:
        """End; nothing comes after this."""


class BuiltInTracker(GeneralTracker):
    """What the trackers that ship have in common: values come as plain Python, by flat names.

    Attributes:
        module: What has to be installed, as it is imported; "" for nothing.
        extra: The extra of this library that brings it.
        takes_texts: Whether it logs texts too.
        channels_last: Whether its pictures have their channels last.
        environment: Variables of the process it lives in, unless they are set.
    """

    name: ClassVar[str] = ""
    requires_logging_directory: ClassVar[bool] = False
    module: ClassVar[str] = ""
    extra: ClassVar[str] = ""
    takes_texts: ClassVar[bool] = True
    channels_last: ClassVar[bool] = False
    environment: ClassVar[Mapping[str, str]] = {}

    tracker: Any

    @classmethod
    def is_installed(cls) -> bool:
        """Whether its package is."""
        return not cls.module or is_package_available(cls.module)

    @classmethod
    def is_configured(cls) -> bool:
        """Whether it can be used as things are: it has a key, or needs none."""
        return True

    @classmethod
    def check(cls, project: str, **options: Any) -> None:
        """Raise for what can be seen to be wrong without a connection.

        Raises:
            ConfigurationError: For a missing key, a bad address, a folder that cannot be written.
        """

    @classmethod
    def runs_apart(cls, **options: Any) -> bool:
        """Whether it may wait for a network or a lock, so that it is kept in a process that can be killed."""
        return False

    @classmethod
    def metric_name(cls, name: str) -> str:
        """Return a name of a value as its backend takes it."""
        return name

    @classmethod
    def named(cls, run_name: str) -> dict[str, Any]:
        """Return the options that give a run its name, where runs have one."""
        del run_name
        return {}

    @classmethod
    def with_folder(cls, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
        """Return its options with the folder of the run, if it takes one and was given no other."""
        del folder
        return options

    @classmethod
    def continuing(cls, token: str, resume_step: int | None) -> dict[str, Any]:
        """Return the options that make it go on with the run of an earlier program.

        Args:
            token: A name for the run that is the same in all programs that it is trained by.
            resume_step: The step that training goes on from; `None` for a new run.
        """
        return {}

    def abort(self) -> None:
        """End, since the program is gone without a word."""
        self.outcome = "failed"
        self.finish()


def check_folder(folder: str | Path, tracker: str) -> Path:
    """Make a folder, or say why it cannot be written."""
    from tempfile import TemporaryFile

    from trainer_lib.foundation.errors import ConfigurationError

    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise ConfigurationError(
            f"The tracker {tracker} cannot write to {path}: {error.strerror or error}. Name another folder."
        ) from error
