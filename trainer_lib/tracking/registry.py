"""Trackers by name, including those registered by other packages."""

import functools
import importlib
import importlib.metadata
import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from trainer_lib.foundation.errors import ConfigurationError, MissingPackageError, unknown
from trainer_lib.foundation.imports import pip_install
from trainer_lib.foundation.public_names.signatures import keywords_in_source
from trainer_lib.logging import get_logger
from trainer_lib.tracking.base import BuiltInTracker, GeneralTracker

_logger = get_logger(__name__)

ENTRY_POINTS = "trainer_lib.trackers"
ALL = "all"

# Imported on first use.
_BUILT_IN = {
    "tensorboard": "trainer_lib.tracking.adapters.tensorboard:TensorBoardTracker",
    "mlflow": "trainer_lib.tracking.adapters.mlflow:MLflowTracker",
    "comet_ml": "trainer_lib.tracking.adapters.comet:CometMLTracker",
    "wandb": "trainer_lib.tracking.adapters.wandb:WandBTracker",
    "trackio": "trainer_lib.tracking.adapters.trackio:TrackioTracker",
    "clearml": "trainer_lib.tracking.adapters.clearml:ClearMLTracker",
    "dvclive": "trainer_lib.tracking.adapters.dvclive:DVCLiveTracker",
    "swanlab": "trainer_lib.tracking.adapters.swanlab:SwanLabTracker",
    "aim": "trainer_lib.tracking.adapters.aim:AimTracker",
    "jsonl": "trainer_lib.tracking.adapters.jsonl_file:JsonlTracker",
}
_OTHER_NAMES = {"comet": "comet_ml", "dvc": "dvclive"}
# Trackers of other libraries that are not supported, with the reason.
_REFUSED = {
    "neptune": "its service ended on 5 March 2026 and deleted all runs, and nothing else reads what its package writes",
}
_KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_IN_ALL = frozenset(_BUILT_IN) - {"jsonl"}  # always available, so it would be part of every "all"

_registered: dict[str, type[GeneralTracker]] = {}


def register_tracker_class(tracker_class: type[GeneralTracker]) -> type[GeneralTracker]:
    """Register your own tracker class under its name. Works as a decorator.

    A name that is in use gets a warning, and the new class.

    Raises:
        ConfigurationError: If it is not a tracker class, or has no name, or its name means all or no trackers.

    Example:
        >>> @register_tracker_class
        ... class Printing(GeneralTracker):
        ...     name, requires_logging_directory, tracker = "printing", False, None
        ...     def log(self, values, step=None, **kwargs):
        ...         print(step, values)
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise ConfigurationError(f"A tracker class must be a subclass of GeneralTracker (got {tracker_class!r}).")
    name = getattr(tracker_class, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigurationError(
            f"The tracker {tracker_class.__name__} has no name. Give the class an attribute `name`."
        )
    if name in (ALL, "none"):
        raise ConfigurationError(f"The tracker name {name!r} of {tracker_class.__name__} is taken. Use another name.")
    existing = _registered.get(name)
    if name in _BUILT_IN if existing is None else _path(existing) != _path(tracker_class):
        before = "this library" if existing is None else existing.__name__
        warnings.warn(
            f"The tracker name {name!r} was that of {before}, and is that of {tracker_class.__name__} now.",
            stacklevel=2,
        )
    _registered[name] = tracker_class
    return tracker_class


def known_names() -> list[str]:
    """Return all known tracker names, installed or not."""
    return sorted({*_BUILT_IN, *_registered, *_entry_points()})


def canonical(name: Any) -> str:
    """Return the canonical name of a tracker.

    Raises:
        ConfigurationError: If the name is unknown.
    """
    text = str(getattr(name, "value", name))
    text = _OTHER_NAMES.get(text.lower(), text)
    known = known_names()
    if text not in known:
        if (reason := _REFUSED.get(text.lower())) is not None:
            raise ConfigurationError(
                f"The tracker {text} is not supported: {reason}. Use one of {', '.join(known)}, or pass an object of "
                "your "
                "own class derived from GeneralTracker."
            )
        raise ConfigurationError(unknown("tracker", text, [*known, "all"]))
    return text


def tracker_class(name: Any) -> type[GeneralTracker]:
    """Return the tracker class of a name.

    Raises:
        ConfigurationError: If the name is unknown.
        MissingPackageError: If its package is not installed.
    """
    name = canonical(name)
    if name in _registered:
        return _registered[name]
    if name in _BUILT_IN:
        built_in = _built_in(name)
        if not built_in.is_installed():
            raise MissingPackageError(
                f"The tracker {name} needs the package {built_in.module}, which is not installed. Install it with "
                f"{pip_install(f'trainer_lib[{built_in.extra}]')}."
            )
        return built_in
    loaded = _entry_points()[name].load()
    if not (isinstance(loaded, type) and issubclass(loaded, GeneralTracker)):
        raise ConfigurationError(f"The entry point {name!r} of {ENTRY_POINTS} must be a subclass of GeneralTracker.")
    return loaded


def available_names() -> list[str]:
    """Return the names of all installed and configured trackers: the meaning of "all"."""
    available: list[str] = []
    for name in sorted(_IN_ALL):
        try:
            kind = tracker_class(name)
        except MissingPackageError:
            continue
        if issubclass(kind, BuiltInTracker) and kind.is_configured():
            available.append(name)
    others = _entry_points().keys() - _BUILT_IN.keys()
    return [name for name in available if name not in _registered] + sorted(_registered.keys() | others)


def resolve(wanted: Any, argument: str) -> list[str | GeneralTracker]:
    """Return the requested trackers: canonical names and objects.

    Args:
        wanted: A name, "all", an object, or a list of these; `None` for no tracker.
        argument: The name of the argument, for errors.
    """
    items: Iterable[Any] = wanted if isinstance(wanted, (list, tuple, set)) else [] if wanted is None else [wanted]
    resolved: list[str | GeneralTracker] = []
    for item in items:
        if isinstance(item, GeneralTracker):
            resolved.append(item)
        elif isinstance(item, type):
            raise ConfigurationError(f"{argument} must hold names or objects (got the class {item.__name__}).")
        elif str(getattr(item, "value", item)) == "all":
            resolved += [name for name in available_names() if name not in resolved]
        else:
            resolved.append(canonical(item))
    names = [item if isinstance(item, str) else str(getattr(item, "name", "")) for item in resolved]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise ConfigurationError(f"{argument} has the tracker {duplicate!r} twice. Give it once.")
    return resolved


def option_names(kind: type[GeneralTracker]) -> list[str] | None:
    """Return the names of a tracker's options, without importing its package; `None` if it takes any, or is unknown."""
    try:
        parameters = list(inspect.signature(kind).parameters.values())
    except (TypeError, ValueError):
        return None
    names = [parameter.name for parameter in parameters if parameter.kind in _KEYWORDS]
    names = names[2 if getattr(kind, "requires_logging_directory", False) else 1 :]  # the project, and the folder
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return names
    options_of = vars(kind).get("options_of")  # of its own class: a class derived from it may take others
    further = None if options_of is None else keywords_in_source(*options_of)
    if further is None or not issubclass(kind, BuiltInTracker):
        return None
    return [*names, *(name for name in further if name not in kind.set_options)]


def check_options(options: Mapping[str, Mapping[str, Any]], trackers: Sequence[str | GeneralTracker]) -> None:
    """Warn about options of trackers that are not used, as scripts with a choice of trackers give them.

    Raises:
        ConfigurationError: If there is no tracker of a name, or a tracker does not take an option.
    """
    used = names_of(trackers)
    for name in options:
        if name in used:
            continue
        if name not in known_names():
            raise ConfigurationError(unknown("tracker in init_kwargs", name, {*used, *known_names()}))
        _logger.warning_once("init_kwargs has options for the tracker %s, which is not used. They are left out.", name)
    for tracker in trackers:
        if isinstance(tracker, str) and options.get(tracker):
            _check_names(tracker_class(tracker), tracker, options[tracker])


def get_available_trackers() -> list[str]:
    """Return the names of the trackers whose packages are installed."""
    return [name for name in known_names() if _is_installed(name)]


def filter_trackers(log_with: Any, logging_dir: Any = None) -> list[str | GeneralTracker]:
    """Return the installed trackers of a list (or "all"); warn about the others.

    Args:
        log_with: Names and objects.
        logging_dir: The folder for logs.

    Raises:
        ConfigurationError: For unknown names, and for a tracker that needs a folder without `logging_dir`.
    """
    trackers = installed_trackers(log_with)
    for item in trackers:
        if (
            isinstance(item, str)
            and getattr(tracker_class(item), "requires_logging_directory", False)
            and logging_dir is None
        ):
            raise ConfigurationError(f"The tracker {item} writes files and needs a folder. Give logging_dir.")
    return trackers


def installed_trackers(log_with: Any) -> list[str | GeneralTracker]:
    """Return the installed trackers of a list (or "all"), each once; warn about the others.

    Raises:
        ConfigurationError: For unknown names.
    """
    trackers: list[str | GeneralTracker] = []
    for item in log_with if isinstance(log_with, (list, tuple, set)) else [log_with]:
        for tracker in resolve(item, "log_with"):
            if tracker in trackers:
                _logger.warning_once("log_with names the tracker %s twice. It gets each value once.", tracker)
            elif isinstance(tracker, GeneralTracker) or _is_installed(tracker, warn=True):
                trackers.append(tracker)
    return resolve(trackers, "log_with")  # two objects may have one name


def names_of(trackers: Sequence[str | GeneralTracker]) -> list[str]:
    """Return the names of trackers."""
    return [item if isinstance(item, str) else str(getattr(item, "name", type(item).__name__)) for item in trackers]


def _check_names(kind: type[GeneralTracker], tracker: str, options: Iterable[str]) -> None:
    known = option_names(kind)
    for name in options:
        if known is not None and name not in known:
            message = unknown(f"option of {tracker} in init_kwargs", name, known)
            if issubclass(kind, BuiltInTracker) and name in kind.set_options:
                message = f"init_kwargs must not have {name!r}: the tracker {tracker} gets it from project_name"
                message += " and project_dir." if kind.requires_logging_directory else "."
            raise ConfigurationError(message)


def _built_in(name: str) -> type[BuiltInTracker]:
    module, _, attribute = _BUILT_IN[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def _is_installed(name: str, warn: bool = False) -> bool:
    try:
        tracker_class(name)
    except MissingPackageError as error:
        if warn:
            _logger.warning_once("log_with: %s It is left out.", error)
        return False
    return True


@functools.cache
def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}


def _path(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


class _TrackerClasses(MutableMapping[str, type[Any]]):
    """The classes of the trackers by name, imported when they are looked up. Only registered ones can be removed."""

    def __getitem__(self, name: str) -> type[Any]:
        name = str(getattr(name, "value", name))
        if name in _registered:
            return _registered[name]
        return _built_in(name)

    def __setitem__(self, name: str, kind: type[Any]) -> None:
        _registered.pop(name, None)
        if name not in self or self[name] is not kind:
            _registered[name] = kind

    def __delitem__(self, name: str) -> None:
        del _registered[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*_registered, *_BUILT_IN]))

    def __len__(self) -> int:
        return len({*_registered, *_BUILT_IN})


LOGGER_TYPE_TO_CLASS: MutableMapping[str, type[Any]] = _TrackerClasses()
