"""Callbacks that report a run to experiment trackers."""

import dataclasses
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import psutil

from trainer_lib.checkpointing.format import layout
from trainer_lib.events import Callback, Run
from trainer_lib.events.constructor_names import raise_unknown
from trainer_lib.foundation import environment
from trainer_lib.foundation.device_types import memory_of
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.foundation.public_names.signatures import parameter_names
from trainer_lib.logging import get_logger
from trainer_lib.tracking.base import BuiltInTracker, GeneralTracker
from trainer_lib.tracking.delivery.plain_values import plain_settings
from trainer_lib.tracking.delivery.queue_worker import Patience
from trainer_lib.tracking.registry import option_names, resolve, tracker_class
from trainer_lib.tracking.tracker_group import Isolation, TrackerGroup, TrackerHandle, finish_groups

_logger = get_logger(__name__)

Artifact = Literal["model", "checkpoint"]
# The parts of a checkpoint that are needed only to resume training.
_FOR_TRAINING = (
    layout.MANIFEST_NAME,
    layout.OPTIMIZER_NAME,
    layout.SCHEDULER_NAME,
    layout.SAMPLER_NAME,
    layout.SCALER_NAME,
    layout.RNG_STATE_NAME,
    layout.CUSTOM_STATE_NAME,
    layout.ENGINE_NAME,
)


class TrackerCallback(Callback):
    """Reports the arguments, the model's size, logs and evaluations to an experiment tracker.

    A failing tracker cannot hurt the run: it sits behind a queue, and a tracker that uses the network runs in a
    separate process. A resumed run continues the tracker's run. Rank 0 reports.

    Args:
        tracker: The tracker's name, or a tracker object of your own class.
        project: The project of the run; by default the tracker's environment variable (`WANDB_PROJECT`), or the name of
            `output_dir`.
        folder: The folder for trackers that write files; by default the run's folder.
        log_arguments: Whether to report the arguments.
        log_model: Whether to report the model's class and number of parameters.
        system_metrics: Whether to add the use of CPU and memory to each log.
        artifact: What to upload at the end: "model" uploads the model files of the last checkpoint (of the best one
            with `load_best_at_end`), "checkpoint" all its files; `None` uploads nothing.
        isolation: "thread" runs the tracker in this process, "process" in a separate one; "auto" lets the tracker
            decide.
        patience: How long to wait for the tracker.
        **options: Further options of the tracker.

    Raises:
        ConfigurationError: If the tracker is unknown or not configured.
        MissingPackageError: If its package is not installed.
        SignatureError: If the tracker does not take an option.

    Example:
        >>> callback = TrackerCallback("mlflow", project="digits", tracking_uri="sqlite:///mlflow.db")
    """

    tracker: str | GeneralTracker
    folder: Path | None
    project: str | None

    order = 100  # after the callbacks that add values to the log
    name: ClassVar[str] = ""  # the tracker's name, in subclasses for one tracker

    def __init__(
        self,
        tracker: str | GeneralTracker,
        project: str | None = None,
        *,
        folder: str | Path | None = None,
        log_arguments: bool = True,
        log_model: bool = True,
        system_metrics: bool = False,
        artifact: Artifact | None = None,
        isolation: Isolation = "auto",
        patience: Patience | None = None,
        **options: Any,
    ) -> None:
        (self.tracker,) = _only_one(tracker)
        self.project, self.folder = project, None if folder is None else Path(folder).expanduser()
        self._log_arguments, self._log_model, self._system_metrics = log_arguments, log_model, system_metrics
        self._artifact, self._patience = artifact, patience
        self._isolation: Isolation = isolation
        self._options = options
        kind = tracker_class(self.tracker) if isinstance(self.tracker, str) else type(self.tracker)
        self._tracker_name = (
            self.tracker if isinstance(self.tracker, str) else str(getattr(kind, "name", kind.__name__))
        )
        self.key: str | None = type(self).__name__ if type(self).name else f"TrackerCallback-{self.tracker_name}"
        if artifact not in (None, "model", "checkpoint"):
            raise ConfigurationError(f'artifact must be "model", "checkpoint" or None (got {artifact!r}).')
        if artifact is not None and not callable(getattr(kind, "log_artifact", None)):
            raise UnsupportedError(
                f"artifact={artifact!r} is not supported: the tracker {self.tracker_name} does not store files."
            )
        if options:
            self._check_names(kind, options)
        if isinstance(self.tracker, str) and issubclass(kind, BuiltInTracker):
            kind.check(project or "", **options)
        self._kind = kind
        self._token = uuid.uuid4().hex
        self._group: TrackerGroup | None = None

    @property
    def tracker_name(self) -> str:
        return self._tracker_name

    @property
    def needs_folder(self) -> bool:
        """Whether the tracker writes files and has no folder."""
        return self.folder is None and bool(getattr(self._kind, "requires_logging_directory", False))

    @property
    def trackers(self) -> list[TrackerHandle]:
        """The tracker of the current run on this rank, for values other than numbers; empty outside a run."""
        return [] if self._group is None else self._group.trackers

    def on_fit_begin(self, run: Run) -> None:
        if (previous := self.release(run)) is not None:  # of an earlier `fit`
            previous.finish("interrupted")
        folder = self.folder or run.folder
        project = self.project or _project_in_environment(self._kind) or _project_of(run)
        options = self._options
        if issubclass(self._kind, BuiltInTracker):
            if self._kind.requires_logging_directory and self.project is None:
                project = self.tracker_name  # its files are in the run's folder already
            options = self._kind.named(run.state.run_id or project) | options
        self._group = TrackerGroup(
            self.tracker,
            project,
            folder,
            {self.tracker_name: options} if isinstance(self.tracker, str) else None,
            isolation=self._isolation,
            spool=None if run.folder is None else run.folder / "spool",
            token=self._token,
            resume_step=run.state.step or None,
            patience=self._patience,
            argument="report_to",
        )
        if run.accelerator is not None:
            run.accelerator.attach_trackers(self._group)
        settings = self._settings(run)
        if settings:
            self._group.store_init_configuration(settings)

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        if self._group is not None:
            system = _system_metrics(run) if self._system_metrics and run.is_main_process else {}
            self._group.log({**values, "epoch": run.state.epochs, **system}, run.state.step)

    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        if self._group is not None:
            self._group.log(metrics, run.state.step)

    def on_fit_end(self, run: Run) -> None:
        # All trackers finish together, so that the waiting times of hanging ones overlap.
        callbacks = _tracker_callbacks(getattr(run.trainer, "events", [self]))
        for callback in callbacks:
            callback.upload_artifact(run)
        groups = [group for callback in callbacks if (group := callback.release(run)) is not None]
        for name, points in finish_groups(groups, _outcome(run)).items():
            run.record_event("points_missing", tracker=name, points=points)

    def state_dict(self) -> dict[str, Any]:
        return {"token": self._token}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._token = state["token"]

    def upload_artifact(self, run: Run) -> None:
        """Upload the files that `artifact` selects."""
        if self._artifact is None or self._group is None or not self._group.trackers:
            return
        checkpoint = _final_checkpoint(run)
        if checkpoint is None:
            _logger.warning("No artifact is uploaded to %s: there is no checkpoint on this machine.", self.tracker_name)
            return
        try:
            folder = checkpoint if self._artifact == "checkpoint" else _model_folder(checkpoint, self._token)
            for handle in self._group.trackers:
                handle.log_artifact(folder, self._artifact)
        except OSError as error:
            _logger.warning("No artifact is uploaded to %s: %s.", self.tracker_name, error)

    def release(self, run: Run) -> TrackerGroup | None:
        """Return the trackers of this `fit` for finishing, and forget them."""
        group, self._group = self._group, None
        if group is not None:
            self._token = uuid.uuid4().hex  # for the next `fit`, unless it resumes
            if run.accelerator is not None:
                run.accelerator.detach_trackers(group)
        return group

    def _check_names(self, kind: type[GeneralTracker], options: Iterable[str]) -> None:
        """Raise for options that the tracker does not take; a tracker object takes none."""
        known = option_names(kind) if isinstance(self.tracker, str) else []
        if known is not None and (unknown := [name for name in options if name not in known]):
            own = [name for name in parameter_names(TrackerCallback) if name != "options"]
            own = own[1:] if type(self).name else own  # a callback for one tracker sets `tracker`
            raise_unknown(type(self), unknown, [*own, *known])

    def _settings(self, run: Run) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        if self._log_arguments and dataclasses.is_dataclass(run.args):
            settings |= plain_settings(run.args)
        if self._log_model:
            settings["model"] = _summary(run)
        return settings


class _Named(TrackerCallback):
    """A callback for one tracker."""

    def __init__(self, project: str | None = None, **options: Any) -> None:
        super().__init__(self.name, project, **options)


class TensorBoardCallback(_Named):
    """Writes TensorBoard files. Arguments as for `TrackerCallback`.

    Example:
        >>> callback = TensorBoardCallback(folder="runs/first")
    """

    name = "tensorboard"


class MLflowCallback(_Named):
    """Reports to MLflow. Arguments as for `TrackerCallback`.

    Example:
        >>> callback = MLflowCallback("digits", tracking_uri="http://127.0.0.1:5000")
    """

    name = "mlflow"


class CometCallback(_Named):
    """Reports to Comet. Arguments as for `TrackerCallback`."""

    name = "comet_ml"


class WandbCallback(_Named):
    """Reports to Weights & Biases. Arguments as for `TrackerCallback`."""

    name = "wandb"


class TrackioCallback(_Named):
    """Reports to trackio. Arguments as for `TrackerCallback`."""

    name = "trackio"


class ClearMLCallback(_Named):
    """Reports to ClearML. Arguments as for `TrackerCallback`."""

    name = "clearml"


class DVCLiveCallback(_Named):
    """Writes DVCLive files for DVC. Arguments as for `TrackerCallback`."""

    name = "dvclive"


class SwanLabCallback(_Named):
    """Reports to SwanLab. Arguments as for `TrackerCallback`."""

    name = "swanlab"


class AimCallback(_Named):
    """Writes to Aim's repository, of this run or in a `folder` of several. Arguments as for `TrackerCallback`."""

    name = "aim"


_CLASSES = {
    callback.name: callback
    for callback in (
        TensorBoardCallback,
        MLflowCallback,
        CometCallback,
        WandbCallback,
        TrackioCallback,
        ClearMLCallback,
        DVCLiveCallback,
        SwanLabCallback,
        AimCallback,
    )
}


def trackers_of(run: Run) -> list[TrackerHandle]:
    """Return the trackers of all callbacks of a run, those behind filters too."""
    callbacks = _tracker_callbacks(getattr(run.trainer, "events", ()))
    return [tracker for callback in callbacks for tracker in callback.trackers]


def _tracker_callbacks(callbacks: Iterable[Callback]) -> list[TrackerCallback]:
    unfiltered = [callback.unfiltered for callback in callbacks]
    return [callback for callback in unfiltered if isinstance(callback, TrackerCallback)]


def callback_for(name: str) -> TrackerCallback:
    """Return the callback for a tracker's name."""
    return _CLASSES[name]() if name in _CLASSES else TrackerCallback(name)


def _only_one(tracker: str | GeneralTracker) -> list[str | GeneralTracker]:
    resolved = resolve(tracker, "tracker")
    if len(resolved) != 1 or tracker == "all":
        raise ConfigurationError(f"tracker must be one tracker, by name or as an object (got {tracker!r}).")
    return resolved


def _project_in_environment(kind: type[GeneralTracker]) -> str | None:
    name = kind.project_variable if issubclass(kind, BuiltInTracker) else ""
    return environment.variable(name) if name else None


def _project_of(run: Run) -> str:
    output_dir = getattr(run.args, "output_dir", None)
    return "trainer_lib" if output_dir is None else Path(str(output_dir).rstrip("/")).name or "trainer_lib"


def _summary(run: Run) -> dict[str, Any]:
    models = list(run.model.values()) if isinstance(run.model, Mapping) else [run.model]
    bare = [model if run.accelerator is None else run.accelerator.unwrap_model(model) for model in models]
    parameters = [parameter for model in bare for parameter in model.parameters()]
    return {
        "class": ", ".join(type(model).__name__ for model in bare),
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trainable_parameters": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
    }


def _system_metrics(run: Run) -> dict[str, float]:
    memory = psutil.virtual_memory()
    metrics = {
        "system/cpu_percent": psutil.cpu_percent(),
        "system/memory_percent": memory.percent,
        "system/process_memory_gb": psutil.Process().memory_info().rss / 1e9,
    }
    device = None if run.accelerator is None else run.accelerator.device
    if device is not None and (memory := memory_of(device)):
        metrics["system/device_memory_gb"] = memory["allocated"] / 1e9
        metrics["system/device_memory_reserved_gb"] = memory["reserved"] / 1e9
    return metrics


def _final_checkpoint(run: Run) -> Path | None:
    """Return the run's final checkpoint: the best one with `load_best_at_end`, otherwise the last."""
    checkpoints = run.state.checkpoints
    if getattr(run.args, "load_best_at_end", False) and run.state.best is not None:
        best = [checkpoint for checkpoint in checkpoints if checkpoint["step"] == run.state.best.step]
        checkpoints = best or checkpoints
    return Path(checkpoints[-1]["path"]) if checkpoints and "://" not in checkpoints[-1]["path"] else None


def _outcome(run: Run) -> str:
    """Return a run's status in the terms of trackers."""
    return "failed" if run.state.status == "unsaved" else run.state.status


def _model_folder(checkpoint: Path, token: str) -> Path:
    """Return a folder of this upload with a checkpoint's model files, as hard links where the file system has them."""
    target = checkpoint.parent.parent / "artifacts" / f"model-{token[:12]}"
    if target.exists():  # of the run that this one resumes
        shutil.rmtree(target)
    target.mkdir(parents=True)
    for file in checkpoint.iterdir():
        if file.is_file() and not file.name.startswith(_FOR_TRAINING):
            try:
                os.link(file, target / file.name)
            except OSError:
                shutil.copy2(file, target / file.name)
    return target
