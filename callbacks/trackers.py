"""This file is a run as trackers see it: one callback that tells a tracker all, and its short forms by name."""

import dataclasses
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import psutil
import torch

from trainer_lib.checkpointing.format import layout
from trainer_lib.events import Callback, Run
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.logging import get_logger
from trainer_lib.tracking.base import BuiltInTracker, GeneralTracker
from trainer_lib.tracking.delivery.plain_values import plain_settings
from trainer_lib.tracking.delivery.queue_worker import Patience
from trainer_lib.tracking.registry import resolve, tracker_class
from trainer_lib.tracking.tracker_group import Isolation, TrackerGroup, TrackerHandle, finish_groups

_logger = get_logger(__name__)

Artifact = Literal["model", "checkpoint"]
# What in a checkpoint is only needed to go on training.
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
    """Tells a tracker the arguments, the size of the model, and all that is logged and evaluated.

    The tracker cannot hurt the run: it sits behind a queue, and one that talks to a network in a process of its own. A
    resumed run goes on in the tracker's run, too. The main process reports.

    Args:
        tracker: Its name, or an object of a class of one's own.
        project: What the run belongs to; by default the name of `output_dir`.
        folder: Where it writes, if it writes files; by default the folder of the run.
        log_arguments: Whether to tell it the arguments.
        log_model: Whether to tell it the class of the model and how many parameters it has.
        system_metrics: Whether to add to each log what processor and memory are at.
        artifact: What to hand it at the end: "model" is what of the last checkpoint is needed to use the model (of the
            best one with `load_best_at_end`), "checkpoint" all of it; `None` nothing.
        isolation: Where it lives: "thread" is this process, "process" one of its own; "auto" leaves that to it.
        patience: How long to wait for it.
        **options: What the tracker takes besides.

    Raises:
        ConfigurationError: If there is no such tracker, or it is not configured.
        MissingPackageError: If its package is not installed.

    Example:
        >>> callback = TrackerCallback("mlflow", project="digits", tracking_uri="sqlite:///mlflow.db")
    """

    order = 100  # after those who add to what is logged
    name: ClassVar[str] = ""  # of the tracker, where the class is for one

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
        self.key = type(self).__name__ if type(self).name else f"TrackerCallback-{self.tracker_name}"
        if artifact not in (None, "model", "checkpoint"):
            raise ConfigurationError(f'artifact={artifact!r} must be "model", "checkpoint" or None.')
        if artifact is not None and not callable(getattr(kind, "log_artifact", None)):
            raise UnsupportedError(f"artifact={artifact!r}: the tracker {self.tracker_name} takes no files.")
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
        """Whether it writes files, and was not told where."""
        return self.folder is None and bool(getattr(self._kind, "requires_logging_directory", False))

    @property
    def trackers(self) -> list[TrackerHandle]:
        """The tracker of the run under way on this process, for what is not a number; empty where there is none."""
        return [] if self._group is None else self._group.trackers

    def on_fit_begin(self, run: Run) -> None:
        if (left := self.release()) is not None:  # by an earlier `fit`
            left.finish("interrupted")
        folder = self.folder or run.folder
        project = self.project or _project_of(run)
        options = self._options
        if issubclass(self._kind, BuiltInTracker):
            if self._kind.requires_logging_directory and self.project is None:
                project = self.tracker_name  # files lie in the folder of the run already
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
        settings = self._settings(run)
        if settings:
            self._group.store_init_configuration(settings)

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        if self._group is not None:
            more = _of_the_system(run) if self._system_metrics and run.is_main_process else {}
            self._group.log({**values, "epoch": run.state.epochs, **more}, run.state.step)

    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        if self._group is not None:
            self._group.log(metrics, run.state.step)

    def on_fit_end(self, run: Run) -> None:
        # All at once, so that those that hang are waited for once.
        others = [one for one in getattr(run.trainer, "events", [self]) if isinstance(one, TrackerCallback)]
        for one in others:
            one.hand_over_artifact(run)
        groups = [group for one in others if (group := one.release()) is not None]
        for name, points in finish_groups(groups, _outcome(run)).items():
            run.record_event("points_missing", tracker=name, points=points)

    def state_dict(self) -> dict[str, Any]:
        return {"token": self._token}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._token = state["token"]

    def hand_over_artifact(self, run: Run) -> None:
        """Give the tracker what `artifact` names."""
        if self._artifact is None or self._group is None or not self._group.trackers:
            return
        checkpoint = _final_checkpoint(run)
        if checkpoint is None:
            _logger.warning("%s gets no artifact: there is no checkpoint on this machine.", self.tracker_name)
            return
        try:
            folder = checkpoint if self._artifact == "checkpoint" else _model_of(checkpoint)
            for handle in self._group.trackers:
                handle.log_artifact(folder, self._artifact)
        except OSError as error:
            _logger.warning("%s gets no artifact: %s.", self.tracker_name, error)

    def release(self) -> TrackerGroup | None:
        """Return the trackers of this `fit`, to end them; it is over."""
        group, self._group = self._group, None
        if group is not None:
            self._token = uuid.uuid4().hex  # of the next `fit`, unless it takes up a checkpoint
        return group

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
    """Writes what TensorBoard reads; it takes what `TrackerCallback` takes.

    Example:
        >>> callback = TensorBoardCallback(folder="runs/first")
    """

    name = "tensorboard"


class MLflowCallback(_Named):
    """Reports to MLflow; it takes what `TrackerCallback` takes.

    Example:
        >>> callback = MLflowCallback("digits", tracking_uri="http://127.0.0.1:5000")
    """

    name = "mlflow"


class CometCallback(_Named):
    """Reports to Comet; it takes what `TrackerCallback` takes."""

    name = "comet_ml"


class WandbCallback(_Named):
    """Reports to Weights & Biases; it takes what `TrackerCallback` takes."""

    name = "wandb"


class TrackioCallback(_Named):
    """Reports to trackio; it takes what `TrackerCallback` takes."""

    name = "trackio"


class ClearMLCallback(_Named):
    """Reports to ClearML; it takes what `TrackerCallback` takes."""

    name = "clearml"


class DVCLiveCallback(_Named):
    """Writes what DVC reads; it takes what `TrackerCallback` takes."""

    name = "dvclive"


class SwanLabCallback(_Named):
    """Reports to SwanLab; it takes what `TrackerCallback` takes."""

    name = "swanlab"


_CLASSES = {
    one.name: one
    for one in (
        TensorBoardCallback,
        MLflowCallback,
        CometCallback,
        WandbCallback,
        TrackioCallback,
        ClearMLCallback,
        DVCLiveCallback,
        SwanLabCallback,
    )
}


def callback_for(name: str) -> TrackerCallback:
    """Return the callback for the tracker of a name."""
    return _CLASSES[name]() if name in _CLASSES else TrackerCallback(name)


def _only_one(tracker: str | GeneralTracker) -> list[str | GeneralTracker]:
    found = resolve(tracker, "tracker")
    if len(found) != 1 or tracker == "all":
        raise ConfigurationError(f"tracker={tracker!r} must be one tracker: its name, or an object.")
    return found


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


def _of_the_system(run: Run) -> dict[str, float]:
    memory = psutil.virtual_memory()
    found = {
        "system/cpu_percent": psutil.cpu_percent(),
        "system/memory_percent": memory.percent,
        "system/process_memory_gb": psutil.Process().memory_info().rss / 1e9,
    }
    device = None if run.accelerator is None else run.accelerator.device
    if device is not None and device.type == "cuda":
        found["system/device_memory_gb"] = torch.cuda.memory_allocated(device) / 1e9
        found["system/device_memory_reserved_gb"] = torch.cuda.memory_reserved(device) / 1e9
    return found


def _final_checkpoint(run: Run) -> Path | None:
    """Return the checkpoint that stands for the run: the best one where that is what is loaded, else the last."""
    checkpoints = run.state.checkpoints
    if getattr(run.args, "load_best_at_end", False) and run.state.best is not None:
        best = [one for one in checkpoints if one["step"] == run.state.best.step]
        checkpoints = best or checkpoints
    return Path(checkpoints[-1]["path"]) if checkpoints and "://" not in checkpoints[-1]["path"] else None


def _outcome(run: Run) -> str:
    """Return how a run ended, as trackers know it."""
    return "failed" if run.state.status == "unsaved" else run.state.status


def _model_of(checkpoint: Path) -> Path:
    """Return a folder with what of a checkpoint is needed to use the model: links, where the disk has them."""
    target = checkpoint.parent.parent / "model"
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    for file in checkpoint.iterdir():
        if file.is_file() and not file.name.startswith(_FOR_TRAINING):
            try:
                os.link(file, target / file.name)
            except OSError:
                shutil.copy2(file, target / file.name)
    return target
