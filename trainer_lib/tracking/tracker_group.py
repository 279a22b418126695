"""The trackers of a run: created, logged to and finished together."""

import atexit
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError, unknown
from trainer_lib.tracking.base import BuiltInTracker, GeneralTracker, check_folder, is_main_process
from trainer_lib.tracking.delivery.entries import Entry
from trainer_lib.tracking.delivery.images import drawn
from trainer_lib.tracking.delivery.plain_values import plain_settings, snapshot
from trainer_lib.tracking.delivery.queue_worker import Patience, Worker
from trainer_lib.tracking.delivery.sender import ChildDelivery, LocalDelivery, TrackerSpec
from trainer_lib.tracking.delivery.spool import Spool
from trainer_lib.tracking.registry import check_options, names_of, resolve, tracker_class
from trainer_lib.tracking.secrets import masked
from trainer_lib.tracking.table import table_of

Isolation = Literal["auto", "thread", "process"]
_ISOLATIONS = ("auto", "thread", "process")

_open: "weakref.WeakSet[TrackerGroup]" = weakref.WeakSet()


class TrackerHandle(GeneralTracker):
    """A tracker as scripts use it: calls go into a queue and return immediately.

    Other attributes are the tracker's own, unless it runs in another process.
    """

    delivery_worker: Worker

    def __init__(self, name: str, kind: type[GeneralTracker], worker: Worker) -> None:
        super().__init__(_blank=True)
        self.name = name
        self.requires_logging_directory: bool = bool(getattr(kind, "requires_logging_directory", False))
        self.main_process_only: bool = kind.main_process_only
        self._kind, self.delivery_worker = kind, worker

    @property
    def __class__(self) -> type[GeneralTracker]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The tracker's class, so that `isinstance` says which tracker it is."""
        return self._kind

    @property
    def tracker(self) -> Any:
        """The backend's object; for a tracker in another process, a proxy that forwards calls."""
        if isinstance(self.delivery_worker.delivery, ChildDelivery):
            return RemoteObject(self, ("tracker",))
        tracker: Any = self._local_tracker()
        return tracker.tracker

    @property
    def runs_apart(self) -> bool:
        """Whether it runs in another process."""
        return isinstance(self.delivery_worker.delivery, ChildDelivery)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Report the settings of the run, with secrets masked."""
        self._put(
            "settings", masked(plain_settings(values) if issubclass(self._kind, BuiltInTracker) else values), None, {}
        )

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log the values of a step."""
        self.delivery_worker.put(Entry("log", snapshot(values), step, time.time(), kwargs))

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images by name: arrays, tensors, images of Pillow, figures of matplotlib, or lists of these."""
        self._require("log_images")
        if not issubclass(self._kind, BuiltInTracker):
            self._put("images", snapshot(values), step, kwargs)
            return
        for name, image in snapshot(drawn(values)).items():  # one entry each: an image that fails hurts no other
            self._put("images", {name: image}, step, kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table: rows with column names, or a data frame."""
        self._require("log_table")
        if not issubclass(self._kind, BuiltInTracker):
            content = {"table_name": table_name, "columns": columns, "data": data, "dataframe": dataframe}
        else:
            columns, data = table_of(columns, data, dataframe)
            content = {"table_name": table_name, "columns": columns, "data": plain_settings(data)}
        self._put("table", content, step, kwargs)

    def log_artifact(self, local_path: str | Path, artifact_path: str | None = None, **kwargs: Any) -> None:
        """Upload a file or a folder.

        Args:
            local_path: The file or folder; keep it until the end of the run.
            artifact_path: Its name in the backend.
            **kwargs: Further arguments of the backend.
        """
        self._require("log_artifact")
        path = Path(local_path).expanduser().absolute()
        if not path.exists():
            raise ConfigurationError(f"The artifact {path} does not exist.")
        self._put("artifact", {"local_path": str(path), "artifact_path": artifact_path}, None, kwargs)

    def finish(self) -> None:
        """Finish the tracker, and wait at most `Patience.finish`."""
        finish_all([self], "finished")

    def call(self, path: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Queue a call of a method of the tracker, or of an object in it."""
        self._put("call", {"path": list(path), "args": list(args)}, None, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"The tracker {self.__dict__.get('name')} has no attribute {name!r}.")
        if not self.runs_apart:
            return getattr(self._local_tracker(), name)
        if callable(getattr(self._kind, name, None)):
            return RemoteObject(self, (name,))
        raise AttributeError(
            f"The tracker {self.name} runs in a separate process, so {name!r} is not accessible. To run it in this "
            "process, "
            f'give init_trackers(…, isolation={{"{self.name}": "thread"}}).'
        )

    def _local_tracker(self) -> GeneralTracker:
        delivery = self.delivery_worker.delivery
        assert isinstance(delivery, LocalDelivery)
        if delivery.tracker is None:
            self.delivery_worker.wait_for_start(60.0)
        if delivery.tracker is None:
            raise UnsupportedError(
                f"The tracker {self.name} has not started: {self.delivery_worker.last_error or 'no answer'}."
            )
        return delivery.tracker

    def takes(self, method: str) -> bool:
        """Whether the tracker has an optional method, such as "log_table"."""
        return callable(getattr(self._kind, method, None))

    def _require(self, method: str) -> None:
        if not self.takes(method):
            raise UnsupportedError(f"The tracker {self.name} has no {method}.")

    def _put(self, kind: str, content: Mapping[str, Any], step: int | None, kwargs: Mapping[str, Any]) -> None:
        self.delivery_worker.put(Entry(kind, content, step, time.time(), kwargs))


class RemoteObject:
    """A proxy for an object in a tracker's process: calls are forwarded and return `None`."""

    def __init__(self, handle: TrackerHandle, path: tuple[str, ...]) -> None:
        self._handle, self._path = handle, path

    def __getattr__(self, name: str) -> "RemoteObject":
        if name.startswith("__"):
            raise AttributeError(name)
        return RemoteObject(self._handle, (*self._path, name))

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Forward a call."""
        self._handle.call(self._path, args, kwargs)


class TrackerGroup:
    """The trackers of a run.

    Attributes:
        names: The names of the trackers, on ranks that do not report too.

    Args:
        wanted: Names, "all" and tracker objects.
        project: The project of the run.
        folder: The folder for trackers that write files, and for undelivered values; `None` for no folder.
        options: Further arguments by tracker name.
        isolation: "auto", "thread" or "process", for all trackers or by tracker name.
        spool: The folder for undelivered values; by default `spool` in `folder`.
        token: An identifier of the run that stays the same across resumes; by default a new one.
        resume_step: The step that training resumes from; `None` for a new run.
        patience: How long to wait for the trackers.
        argument: The name of the argument, for errors.

    Raises:
        ConfigurationError: If a tracker is unknown or not configured.
        MissingPackageError: If a tracker's package is not installed.
    """

    folder: str | Path | None
    project: str
    token: str

    def __init__(
        self,
        wanted: Any,
        project: str,
        folder: str | Path | None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        isolation: Isolation | Mapping[str, Isolation] = "auto",
        spool: Path | None = None,
        token: str | None = None,
        resume_step: int | None = None,
        patience: Patience | None = None,
        argument: str = "log_with",
    ) -> None:
        self.project, self.folder = project, folder
        self.spool_folder: Path | None = spool or (None if folder is None else Path(folder).expanduser() / "spool")
        self.token, self._resume_step = token or uuid.uuid4().hex, resume_step
        self._patience = patience or Patience()
        self._isolation = isolation
        self._handles: list[TrackerHandle] = []
        trackers = resolve(wanted, argument)
        self._options = dict(options or {})
        check_options(self._options, trackers)
        plans = [self._plan(tracker) for tracker in trackers]  # all are checked before the first starts
        self.names: list[str] = [name for name, *_ in plans]
        is_main = is_main_process()
        for name, kind, delivery, header in plans:
            if is_main or not kind.main_process_only:
                path = None if self.spool_folder is None else self.spool_folder / f"{name}.jsonl"
                worker = Worker(name, kind, delivery, Spool(path, header), self._patience)
                self._handles.append(TrackerHandle(name, kind, worker))
        if self._handles:
            _open.add(self)

    @property
    def trackers(self) -> list[TrackerHandle]:
        """The trackers of this rank."""
        return list(self._handles)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Report the settings of the run to all trackers."""
        for handle in self._handles:
            handle.store_init_configuration(values)

    def log(
        self, values: Mapping[str, Any], step: int | None = None, kwargs: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Log the values of a step to all trackers.

        Args:
            values: The values, by name.
            step: The step.
            kwargs: Further arguments by tracker name.
        """
        if not self._handles:
            return
        copied, now = snapshot(values), time.time()
        for handle in self._handles:
            extra = {} if kwargs is None else kwargs.get(handle.name, {})
            handle.delivery_worker.put(Entry("log", copied, step, now, extra))

    def finish(self, outcome: str = "finished") -> None:
        """Finish all trackers, and wait at most `Patience.finish` for all together."""
        finish_groups([self], outcome)

    def release(self) -> list[TrackerHandle]:
        """Return the trackers for finishing, and remove them from the group."""
        handles, self._handles = self._handles, []
        _open.discard(self)
        return handles

    def _plan(
        self, tracker: str | GeneralTracker
    ) -> tuple[str, type[GeneralTracker], LocalDelivery | ChildDelivery, Any]:
        if isinstance(tracker, GeneralTracker):
            name = names_of([tracker])[0]
            return name, type(tracker), LocalDelivery(None, tracker), self._header(name, {})
        kind, user_options = tracker_class(tracker), dict(self._options.get(tracker, {}))
        arguments: tuple[Any, ...] = (self.project,)
        if getattr(kind, "requires_logging_directory", False):
            if self.folder is None:
                raise ConfigurationError(
                    f"The tracker {tracker} writes files and needs a folder for them. Give Accelerator(project_dir=…) "
                    "or "
                    "ProjectConfiguration(logging_dir=…)."
                )
            arguments = (self.project, str(check_folder(self.folder, tracker)))
        prefers_process = False
        options = user_options
        if issubclass(kind, BuiltInTracker):
            if self.folder is not None:
                user_options = kind.with_folder(Path(self.folder).expanduser(), user_options)
            kind.check(self.project, **user_options)
            options = kind.continuing(self.token, self._resume_step) | user_options
            prefers_process = kind.runs_apart(**options)
        isolation = self._isolation if isinstance(self._isolation, str) else self._isolation.get(tracker, "auto")
        if isolation not in _ISOLATIONS:
            raise ConfigurationError(unknown("isolation", isolation, _ISOLATIONS))
        spec = TrackerSpec(kind, arguments, options)
        header = self._header(tracker, user_options)
        if isolation == "process" or (isolation == "auto" and prefers_process):
            log = None if self.spool_folder is None else self.spool_folder / f"{tracker}.log"
            return tracker, kind, ChildDelivery(spec, log), header
        return tracker, kind, LocalDelivery(spec), header

    def _header(self, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "format": "trainer_lib.spool",
            "tracker": name,
            "project": self.project,
            "folder": None if self.folder is None else str(self.folder),
            "options": masked(plain_settings(options)),
            "token": self.token,
        }


def finish_all(handles: Sequence[TrackerHandle], outcome: str) -> dict[str, int]:
    """Finish trackers together, within one deadline; return the number of undelivered points by tracker, if any."""
    if not handles:
        return {}
    workers = [handle.delivery_worker for handle in handles]
    deadline = time.monotonic() + max(worker.patience.finish for worker in workers)
    for worker in workers:
        worker.ask_to_finish(outcome)
    for worker in workers:
        worker.finish_by(deadline)
    return {worker.name: worker.missing for worker in workers if worker.missing}


def finish_groups(groups: Sequence[TrackerGroup], outcome: str = "finished") -> dict[str, int]:
    """Finish the trackers of several groups together, like `finish_all`."""
    return finish_all([handle for group in groups for handle in group.release()], outcome)


@atexit.register
def _finish_open_groups() -> None:
    """Finish groups that the script left open, so that their last values are delivered."""
    finish_groups(list(_open))
