"""This file is the trackers of a run: made, told everything, and ended together."""

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
from trainer_lib.tracking.delivery.plain_values import kept, plain_settings
from trainer_lib.tracking.delivery.queue_worker import Patience, Worker
from trainer_lib.tracking.delivery.sender import ChildDelivery, LocalDelivery, Making
from trainer_lib.tracking.delivery.spool import Spool
from trainer_lib.tracking.registry import names_of, resolve, tracker_class
from trainer_lib.tracking.secrets import masked

Isolation = Literal["auto", "thread", "process"]
_ISOLATIONS = ("auto", "thread", "process")

_open: "weakref.WeakSet[TrackerGroup]" = weakref.WeakSet()


class TrackerHandle(GeneralTracker):
    """A tracker, as a script has it in hand: its calls go into a queue, and cost nothing.

    What else the tracker has, it has too, unless it lives in another process.
    """

    def __init__(self, name: str, kind: type[GeneralTracker], worker: Worker) -> None:
        super().__init__(_blank=True)
        self.name = name
        self.requires_logging_directory = bool(getattr(kind, "requires_logging_directory", False))
        self.main_process_only = kind.main_process_only
        self._kind, self._worker = kind, worker

    @property
    def tracker(self) -> Any:
        """The object behind it, once it is there; where it lives in another process, one that passes calls on."""
        if isinstance(self._worker.delivery, ChildDelivery):
            return Elsewhere(self, ("tracker",))
        own: Any = self._own()
        return own.tracker

    @property
    def runs_apart(self) -> bool:
        """Whether it lives in another process."""
        return isinstance(self._worker.delivery, ChildDelivery)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Tell it the settings of the run, without the secrets among them."""
        self._put(
            "settings", masked(plain_settings(values) if issubclass(self._kind, BuiltInTracker) else values), None, {}
        )

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Tell it values of a step."""
        self._worker.put(Entry("log", kept(values), step, time.time(), kwargs))

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Show it pictures, by name: arrays, tensors or lists of them."""
        self._needs("log_images")
        self._put("images", kept(values), step, kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Show it a table: rows with the names of their columns, or a data frame."""
        self._needs("log_table")
        if not issubclass(self._kind, BuiltInTracker):
            content = {"table_name": table_name, "columns": columns, "data": data, "dataframe": dataframe}
        else:
            if dataframe is not None:
                columns, data = [str(name) for name in dataframe.columns], dataframe.to_numpy().tolist()
            if columns is None or data is None:
                raise ConfigurationError("log_table needs columns and data, or a dataframe.")
            content = {"table_name": table_name, "columns": list(columns), "data": plain_settings(data)}
        self._put("table", content, step, kwargs)

    def log_artifact(self, local_path: str | Path, artifact_path: str | None = None, **kwargs: Any) -> None:
        """Give it a file or a folder.

        Args:
            local_path: The file or folder; it has to stay until the end of the run.
            artifact_path: What it is called there.
            **kwargs: What the backend takes besides.
        """
        self._needs("log_artifact")
        path = Path(local_path).expanduser().absolute()
        if not path.exists():
            raise ConfigurationError(f"The artifact {path} is not there.")
        self._put("artifact", {"local_path": str(path), "artifact_path": artifact_path}, None, kwargs)

    def finish(self) -> None:
        """End it, and wait for that as long as `Patience.finish` says."""
        finish_all([self], "finished")

    def call(self, path: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Call a method of the tracker, or of what is in it, when its turn comes."""
        self._put("call", {"path": list(path), "args": list(args)}, None, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"The tracker {self.__dict__.get('name')} has no attribute {name!r}.")
        if not self.runs_apart:
            return getattr(self._own(), name)
        if callable(getattr(self._kind, name, None)):
            return Elsewhere(self, (name,))
        raise AttributeError(
            f"The tracker {self.name} lives in a process of its own, where {name!r} is out of reach. To have it in "
            f'this one: init_trackers(…, isolation={{"{self.name}": "thread"}}).'
        )

    def _own(self) -> GeneralTracker:
        delivery = self._worker.delivery
        assert isinstance(delivery, LocalDelivery)
        if delivery.tracker is None:
            self._worker.wait_for_start(60.0)
        if delivery.tracker is None:
            raise UnsupportedError(f"The tracker {self.name} has not begun: {self._worker.last_error or 'no answer'}.")
        return delivery.tracker

    def takes(self, method: str) -> bool:
        """Whether the tracker has a method beyond those that all have, such as "log_table"."""
        return callable(getattr(self._kind, method, None))

    def _needs(self, method: str) -> None:
        if not self.takes(method):
            raise UnsupportedError(f"The tracker {self.name} has no {method}.")

    def _put(self, kind: str, content: Mapping[str, Any], step: int | None, kwargs: Mapping[str, Any]) -> None:
        self._worker.put(Entry(kind, content, step, time.time(), kwargs))


class Elsewhere:
    """The object behind a tracker in another process: calls are passed on, and return nothing."""

    def __init__(self, handle: TrackerHandle, path: tuple[str, ...]) -> None:
        self._handle, self._path = handle, path

    def __getattr__(self, name: str) -> "Elsewhere":
        if name.startswith("__"):
            raise AttributeError(name)
        return Elsewhere(self._handle, (*self._path, name))

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Pass a call on."""
        self._handle.call(self._path, args, kwargs)


class TrackerGroup:
    """The trackers of a run.

    Args:
        wanted: Names, "all" and objects.
        project: What the runs belong to.
        folder: Where those write that write files, and where is kept what others do not take; `None`: nowhere.
        options: Further arguments of trackers, by their names.
        isolation: Where they live: "auto", "thread" or "process", for all or by their names.
        spool: The folder of what they do not take; by default `spool` in `folder`.
        token: A name for the run that is the same in all programs that it is trained by; a new one by default.
        resume_step: The step that training goes on from; `None` for a new run.
        patience: How long to wait for them.
        argument: What they are given as, for errors.

    Raises:
        ConfigurationError: For what can be known now not to work.
        MissingPackageError: If a package is not installed.
    """

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
        self.spool_folder = spool or (None if folder is None else Path(folder).expanduser() / "spool")
        self.token, self._resume_step = token or uuid.uuid4().hex, resume_step
        self._patience = patience or Patience()
        self._isolation = isolation
        self._handles: list[TrackerHandle] = []
        trackers = resolve(wanted, argument)
        self._options = dict(options or {})
        for name in self._options:
            if name not in names_of(trackers):
                raise ConfigurationError(unknown("tracker in init_kwargs", name, names_of(trackers)))
        made = [self._plan(one) for one in trackers]  # all are checked before the first begins
        is_main = is_main_process()
        for name, kind, delivery, header in made:
            if is_main or not kind.main_process_only:
                path = None if self.spool_folder is None else self.spool_folder / f"{name}.jsonl"
                worker = Worker(name, kind, delivery, Spool(path, header), self._patience)
                self._handles.append(TrackerHandle(name, kind, worker))
        if self._handles:
            _open.add(self)

    @property
    def trackers(self) -> list[TrackerHandle]:
        """The trackers of this process."""
        return list(self._handles)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Tell all of them the settings of the run."""
        for handle in self._handles:
            handle.store_init_configuration(values)

    def log(
        self, values: Mapping[str, Any], step: int | None = None, kwargs: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Tell all of them values of a step.

        Args:
            values: The values, by name.
            step: The step.
            kwargs: What some take besides, by their names.
        """
        if not self._handles:
            return
        copied, now = kept(values), time.time()
        for handle in self._handles:
            more = {} if kwargs is None else kwargs.get(handle.name, {})
            handle._worker.put(Entry("log", copied, step, now, more))

    def finish(self, outcome: str = "finished") -> None:
        """End all of them, and wait for that, but not longer than `Patience.finish` says for all together."""
        finish_groups([self], outcome)

    def release(self) -> list[TrackerHandle]:
        """Return the trackers, to end them; the group has none any more."""
        handles, self._handles = self._handles, []
        _open.discard(self)
        return handles

    def _plan(self, one: str | GeneralTracker) -> tuple[str, type[GeneralTracker], LocalDelivery | ChildDelivery, Any]:
        if isinstance(one, GeneralTracker):
            name = names_of([one])[0]
            return name, type(one), LocalDelivery(None, one), self._header(name, {})
        kind, given = tracker_class(one), dict(self._options.get(one, {}))
        arguments: tuple[Any, ...] = (self.project,)
        if getattr(kind, "requires_logging_directory", False):
            if self.folder is None:
                raise ConfigurationError(
                    f"The tracker {one} writes files, and there is no folder for them. Give Accelerator(project_dir=…) "
                    "or ProjectConfiguration(logging_dir=…)."
                )
            arguments = (self.project, str(check_folder(self.folder, one)))
        apart = False
        options = given
        if issubclass(kind, BuiltInTracker):
            if self.folder is not None:
                given = kind.with_folder(Path(self.folder).expanduser(), given)
            kind.check(self.project, **given)
            options = kind.continuing(self.token, self._resume_step) | given
            apart = kind.runs_apart(**options)
        where = self._isolation if isinstance(self._isolation, str) else self._isolation.get(one, "auto")
        if where not in _ISOLATIONS:
            raise ConfigurationError(unknown("isolation", where, _ISOLATIONS))
        making = Making(kind, arguments, options)
        if where == "process" or (where == "auto" and apart):
            log = None if self.spool_folder is None else self.spool_folder / f"{one}.log"
            return one, kind, ChildDelivery(making, log), self._header(one, given)
        return one, kind, LocalDelivery(making), self._header(one, given)

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
    """End trackers together, within one deadline; return how many points each has not got, of those that miss some."""
    if not handles:
        return {}
    workers = [handle._worker for handle in handles]
    deadline = time.monotonic() + max(worker.patience.finish for worker in workers)
    for worker in workers:
        worker.ask_to_finish(outcome)
    for worker in workers:
        worker.finish_by(deadline)
    return {worker.name: worker.missing for worker in workers if worker.missing}


def finish_groups(groups: Sequence[TrackerGroup], outcome: str = "finished") -> dict[str, int]:
    """End the trackers of groups together, as `finish_all` does."""
    return finish_all([handle for group in groups for handle in group.release()], outcome)


@atexit.register
def _finish_what_is_open() -> None:
    """End what a script did not, so that what it logged last arrives."""
    finish_groups(list(_open))
