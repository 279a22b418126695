"""This file is the trackers by their names, those of other packages included."""

import functools
import importlib
import importlib.metadata
from collections.abc import Iterable, Sequence
from typing import Any

from trainer_lib.foundation.errors import ConfigurationError, MissingPackageError, unknown
from trainer_lib.logging import get_logger
from trainer_lib.tracking.base import BuiltInTracker, GeneralTracker

_logger = get_logger(__name__)

ENTRY_POINTS = "trainer_lib.trackers"
ALL = "all"

# Each is imported when it is asked for.
_BUILT_IN = {
    "tensorboard": "trainer_lib.tracking.adapters.tensorboard:TensorBoardTracker",
    "mlflow": "trainer_lib.tracking.adapters.mlflow:MLflowTracker",
    "comet_ml": "trainer_lib.tracking.adapters.comet:CometMLTracker",
    "wandb": "trainer_lib.tracking.adapters.wandb:WandBTracker",
    "trackio": "trainer_lib.tracking.adapters.trackio:TrackioTracker",
    "clearml": "trainer_lib.tracking.adapters.clearml:ClearMLTracker",
    "dvclive": "trainer_lib.tracking.adapters.dvclive:DVCLiveTracker",
    "swanlab": "trainer_lib.tracking.adapters.swanlab:SwanLabTracker",
    "jsonl": "trainer_lib.tracking.adapters.jsonl_file:JsonlTracker",
}
_OTHER_NAMES = {"comet": "comet_ml", "dvc": "dvclive"}
# What other libraries know and this one refuses: why.
_REFUSED = {
    "aim": "its package writes without an error, and its own reader finds nothing",
    "neptune": "its service ended on 5 March 2026 and deleted all runs, and nothing else reads what its package writes",
}
_IN_ALL = frozenset(_BUILT_IN) - {"jsonl"}  # it needs no package, and would be in every "all"

_registered: dict[str, type[GeneralTracker]] = {}


def register_tracker_class(tracker_class: type[GeneralTracker]) -> type[GeneralTracker]:
    """Let a class of one's own be asked for by its name. It may be used as a decorator.

    Raises:
        ConfigurationError: If it is no tracker, has no name, or one that is taken.

    Example:
        >>> @register_tracker_class
        ... class Printing(GeneralTracker):
        ...     name, requires_logging_directory, tracker = "printing", False, None
        ...     def log(self, values, step=None, **kwargs):
        ...         print(step, values)
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise ConfigurationError(f"{tracker_class!r} is no class derived from GeneralTracker.")
    name = getattr(tracker_class, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"{tracker_class.__name__} has no name. Give the class an attribute name.")
    there = _registered.get(name)
    if name in (*_BUILT_IN, "all", "none") or (there is not None and _path(there) != _path(tracker_class)):
        raise ConfigurationError(f"The name {name!r} of {tracker_class.__name__} is taken. Give it another.")
    _registered[name] = tracker_class
    return tracker_class


def known_names() -> list[str]:
    """Return the names that can be asked for, installed or not."""
    return sorted({*_BUILT_IN, *_registered, *_entry_points()})


def canonical(name: Any) -> str:
    """Return a tracker's name as it is known here.

    Raises:
        ConfigurationError: If it is not known.
    """
    text = str(getattr(name, "value", name))
    text = _OTHER_NAMES.get(text.lower(), text)
    known = known_names()
    if text not in known:
        if (why := _REFUSED.get(text.lower())) is not None:
            raise ConfigurationError(
                f"The tracker {text} is not supported: {why}. Use one of {', '.join(known)}, or pass an object of your "
                "own class derived from GeneralTracker."
            )
        raise ConfigurationError(unknown("tracker", text, [*known, "all"]))
    return text


def tracker_class(name: Any) -> type[GeneralTracker]:
    """Return the class of a name.

    Raises:
        ConfigurationError: If it is not known.
        MissingPackageError: If its package is not installed.
    """
    name = canonical(name)
    if name in _registered:
        return _registered[name]
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        found: type[BuiltInTracker] = getattr(importlib.import_module(module), attribute)
        if not found.is_installed():
            raise MissingPackageError(
                f"The tracker {name} needs the package {found.module}, which is not installed. Install it with "
                f"`pip install trainer_lib[{found.extra}]`."
            )
        return found
    loaded = _entry_points()[name].load()
    if not (isinstance(loaded, type) and issubclass(loaded, GeneralTracker)):
        raise ConfigurationError(f"The entry point {name!r} of {ENTRY_POINTS} is no class derived from GeneralTracker.")
    return loaded


def available_names() -> list[str]:
    """Return the names of what is installed and configured, which is what "all" means."""
    found: list[str] = []
    for name in sorted(_IN_ALL):
        try:
            kind = tracker_class(name)
        except MissingPackageError:
            continue
        if issubclass(kind, BuiltInTracker) and kind.is_configured():
            found.append(name)
    return found + sorted({*_registered, *_entry_points()} - set(_BUILT_IN))


def resolve(wanted: Any, argument: str) -> list[str | GeneralTracker]:
    """Return the trackers asked for: names as they are known here, and objects.

    Args:
        wanted: A name, "all", an object, or several of these; `None`: none.
        argument: What they are given as, for errors.
    """
    given: Iterable[Any] = wanted if isinstance(wanted, (list, tuple, set)) else [] if wanted is None else [wanted]
    found: list[str | GeneralTracker] = []
    for one in given:
        if isinstance(one, GeneralTracker):
            found.append(one)
        elif isinstance(one, type):
            raise ConfigurationError(f"{argument} has the class {one.__name__}. Give its name, or an object.")
        elif str(getattr(one, "value", one)) == "all":
            found += [name for name in available_names() if name not in found]
        else:
            found.append(canonical(one))
    names = [one if isinstance(one, str) else str(getattr(one, "name", "")) for one in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigurationError(f"{argument} has the tracker {twice!r} twice. Give it once.")
    return found


def get_available_trackers() -> list[str]:
    """Return the names of the trackers whose packages are installed."""
    return [name for name in known_names() if _is_installed(name)]


def filter_trackers(log_with: Any, logging_dir: Any = None) -> list[str | GeneralTracker]:
    """Return the trackers of a list that are installed, "all" among them; others are warned of.

    Args:
        log_with: Names and objects.
        logging_dir: The folder of logs.

    Raises:
        ConfigurationError: For unknown names, and for a tracker that needs a folder where there is none.
    """
    found: list[str | GeneralTracker] = []
    for one in resolve(log_with, "log_with"):
        if isinstance(one, str) and not _is_installed(one):
            _logger.warning_once("The tracker %s is not installed, and left out.", one)
            continue
        kind = one if isinstance(one, GeneralTracker) else tracker_class(one)
        if isinstance(one, str) and getattr(kind, "requires_logging_directory", False) and logging_dir is None:
            raise ConfigurationError(f"The tracker {one} writes files, and there is no folder. Give logging_dir.")
        found.append(one)
    return found


def names_of(trackers: Sequence[str | GeneralTracker]) -> list[str]:
    """Return the names of trackers."""
    return [one if isinstance(one, str) else str(getattr(one, "name", type(one).__name__)) for one in trackers]


def _is_installed(name: str) -> bool:
    try:
        tracker_class(name)
    except MissingPackageError:
        return False
    return True


@functools.cache
def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}


def _path(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__
