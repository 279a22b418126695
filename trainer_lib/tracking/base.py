"""Base classes of trackers."""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from trainer_lib.foundation import environment
from trainer_lib.foundation.imports import is_package_available

_BEFORE_AND_AFTER = ("__init__", "finish", "abort")  # calls that need no started tracker
_REQUIRED = ("name", "requires_logging_directory", "tracker")


class Point(NamedTuple):
    """The values of one call of `log`."""

    values: dict[str, Any]
    step: int | None
    time: float
    kwargs: dict[str, Any]


def is_main_process() -> bool:
    """Whether this is rank 0, without initializing the process group."""
    process = sys.modules.get("trainer_lib.state.partial_state")
    if process is not None and process.is_initialized():
        return process.PartialState().is_main_process
    world = environment.read_world()
    return world is None or world.rank == 0


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a tracker's method do nothing on ranks other than 0, unless `main_process_only` is false.

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
        if isinstance(self, BuiltInTracker):
            self.start_before(function.__name__)
        return function(self, *args, **kwargs)

    return gated


class GeneralTracker:
    """The base class of all trackers; derive your own tracker from it.

    A subclass has a `name`, sets `requires_logging_directory` if its constructor takes a folder, and returns the
    backend's object as `tracker`. All methods except the constructor run on the tracker's own thread, so create
    thread-bound objects in `start`.

    Attributes:
        main_process_only: Whether only rank 0 reports to it.
        outcome: How the run ended, set before `finish`: "finished", "stopped", "interrupted" or "failed".
    """

    main_process_only: bool = True
    outcome: str = "finished"

    def __init__(self, _blank: bool = False) -> None:
        if _blank:
            return
        missing = [name for name in _REQUIRED if not hasattr(type(self), name) and name not in vars(self)]
        if missing:
            raise NotImplementedError(
                f"The tracker {type(self).__name__} lacks {', '.join(missing)}. A tracker class needs the attributes "
                "name "
                "and requires_logging_directory (whether it takes a folder), and the property tracker."
            )

    def start(self) -> None:
        """Start, before anything is logged."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings of the run."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log the values of a step."""

    def log_points(self, points: Sequence[Point]) -> None:
        """Log the values of several calls at once."""
        for point in points:
            self.log(point.values, step=point.step, **point.kwargs)

    def finish(self) -> None:
        """Finish; no call follows."""


class SilentTracker(GeneralTracker):
    """A tracker that does nothing, on ranks that do not report: it takes any method of any tracker."""

    def __init__(self, name: str) -> None:
        super().__init__(_blank=True)
        self.name = name

    @property
    def tracker(self) -> "SilentTracker":
        """Itself."""
        return self

    def __getattr__(self, name: str) -> "SilentTracker":
        if name.startswith("_"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


class BuiltInTracker(GeneralTracker):
    """The base class of the shipped trackers, which get plain Python values with flat names.

    Attributes:
        module: The module that must be installed; "" for none.
        extra: The extra of this library that installs it.
        project_variable: The environment variable of the project, for a Trainer that names none; "" for none.
        takes_texts: Whether it logs text values.
        drops_earlier_steps: Whether it drops values whose step lies before the last one.
        channels_last: Whether it takes images with the channels last.
        image_options: The arguments of `log_images` that say how to read an array, which is then passed as it is.
        environment: Environment variables of its process, unless they are set.
        options_of: The module and the function of its package that take its further options.
        set_options: The options of that function that it sets from its own arguments.
    """

    name: ClassVar[str] = ""
    requires_logging_directory: ClassVar[bool] = False
    module: ClassVar[str] = ""
    extra: ClassVar[str] = ""
    project_variable: ClassVar[str] = ""
    takes_texts: ClassVar[bool] = True
    drops_earlier_steps: ClassVar[bool] = False
    channels_last: ClassVar[bool] = False
    image_options: ClassVar[frozenset[str]] = frozenset()
    environment: ClassVar[Mapping[str, str]] = {}
    options_of: ClassVar[tuple[str, str] | None] = None
    set_options: ClassVar[frozenset[str]] = frozenset()

    tracker: Any
    _was_started: bool = False

    def start_before(self, method: str) -> None:
        """Start a tracker that you made yourself before the first call that logs; `init_trackers` starts its own."""
        if method == "start":
            self._was_started = True
        elif method not in _BEFORE_AND_AFTER and not self._was_started:
            self.start()

    @classmethod
    def is_installed(cls) -> bool:
        """Whether its package is installed."""
        return not cls.module or is_package_available(cls.module)

    @classmethod
    def is_configured(cls) -> bool:
        """Whether it has the credentials it needs."""
        return True

    @classmethod
    def check(cls, project: str, **options: Any) -> None:
        """Raise for errors that can be detected without a connection.

        Raises:
            ConfigurationError: For a missing key, an invalid address, or a folder that cannot be written.
        """

    @classmethod
    def runs_apart(cls, **options: Any) -> bool:
        """Whether it may wait for a network or a lock, so it runs in a separate process that can be killed."""
        return False

    @classmethod
    def named(cls, run_name: str) -> dict[str, Any]:
        """Return the options that set the run's name, if the backend has run names."""
        del run_name
        return {}

    @classmethod
    def with_folder(cls, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options with the run's folder, unless they name another."""
        del folder
        return options

    @classmethod
    def continuing(cls, token: str, resume_step: int | None) -> dict[str, Any]:
        """Return the options with which it continues the run of an earlier program.

        Args:
            token: An identifier of the run that stays the same across resumes.
            resume_step: The step that training resumes from; `None` for a new run.
        """
        return {}

    def abort(self) -> None:
        """Finish after the training program was killed."""
        self.outcome = "failed"
        self.finish()


def check_folder(folder: str | Path, tracker: str) -> Path:
    """Create a folder and check that it is writable; raise if not."""
    from tempfile import TemporaryFile

    from trainer_lib.foundation.errors import ConfigurationError

    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise ConfigurationError(
            f"The tracker {tracker} cannot write to {path}: {error.strerror or error}. Give another folder."
        ) from error
