"""Evaluate the checkpoints of a run in a program of its own, while the run trains or later."""

import json
import signal
import time
from collections.abc import Iterator

from trainer_lib.callbacks.jsonl import JsonlLog
from trainer_lib.events import Control
from trainer_lib.filesystem.remote_paths import AnyPath, path_at
from trainer_lib.foundation.errors import CheckpointError, ConfigurationError
from trainer_lib.logging import get_logger
from trainer_lib.processes.exit_codes import by_signal
from trainer_lib.runs import CHECKPOINTS, EVALUATIONS_FILE, RunFolder, read_run
from trainer_lib.trainer.checkpoints.finished_runs import fire_modifiers
from trainer_lib.trainer.checks import before_fit
from trainer_lib.trainer.fit.session import FitSession
from trainer_lib.trainer.safety.signals import Signals
from trainer_lib.trainer.trainer_interface import TrainerInterface

_logger = get_logger(__name__)

_PAUSE = 2.0  # seconds between two looks for a new checkpoint


def evaluate_run(trainer: TrainerInterface, path: str, is_watched: bool) -> None:
    """Evaluate each checkpoint of a run that is not evaluated yet, and write its metrics into the run's folder.

    Weights are those of an evaluation within the run: the averages of `EMA`, for instance. Callbacks that observe are
    called at no event, as those of the run write to the same files and trackers.

    Args:
        trainer: A trainer with the model, the evaluation sets and the callbacks of the run.
        path: The folder of the run.
        is_watched: Whether to wait for further checkpoints until the run is finished.

    Raises:
        ConfigurationError: If there is nothing to evaluate on.
    """
    if trainer.eval_dataset is None:
        raise ConfigurationError("trainer-lib evaluate needs data to evaluate on: Trainer(eval_dataset=…).")
    before_fit.check(trainer)
    folder = path_at(path).resolve()
    events, is_main = trainer.events, trainer.accelerator.is_main_process
    events.silence_observers()
    local = RunFolder(folder).here
    events.add(JsonlLog(local / EVALUATIONS_FILE))
    session = FitSession(trainer, None, Signals((), Control(), is_main))
    trainer.run = session.run
    count = 0
    try:
        for checkpoint in _checkpoints(trainer, folder, is_watched):
            if not _is_loaded(session, trainer, checkpoint):
                continue
            if not count:
                fire_modifiers(session, "on_fit_begin")
            count += 1
            metrics = trainer.evaluate()
            if is_main:
                RunFolder(folder).upload()
            shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            trainer.accelerator.print(f"{checkpoint.name}: {shown}")
    except KeyboardInterrupt:  # how `--watch` is ended where the run is not
        raise SystemExit(by_signal(signal.SIGINT).exit_code) from None
    finally:
        session.release()
    if not count:
        trainer.accelerator.print(f"{folder} has no checkpoint that is not evaluated yet.")


def _checkpoints(trainer: TrainerInterface, folder: AnyPath, is_watched: bool) -> Iterator[AnyPath]:
    """Return the checkpoints that are not evaluated yet, the same on all ranks, as they appear."""
    group = trainer.accelerator.group
    tried = _evaluated(folder) if trainer.accelerator.is_main_process else set[str]()
    while True:
        name, is_last = None, False
        if trainer.accelerator.is_main_process:
            run = read_run(folder, None)  # its status first: nothing is saved after the run has finished
            name = next((state.name for state in run.checkpoints() if state.name not in tried), None)
            is_last = run.is_finished or not is_watched
        name, is_last = group.broadcast_objects([name, is_last])
        if name is not None:
            tried.add(name)
            yield folder / CHECKPOINTS / name
        elif is_last:
            return
        else:
            time.sleep(_PAUSE)


def _evaluated(folder: AnyPath) -> set[str]:
    """Return the names of the checkpoints that an earlier call has evaluated."""
    run = RunFolder(folder)
    run.download(EVALUATIONS_FILE)
    file = run.here / EVALUATIONS_FILE
    lines = file.read_text("utf-8").splitlines() if file.is_file() else []
    return {run.checkpoint(json.loads(line)["step"]).name for line in lines if line.endswith("}")}


def _is_loaded(session: FitSession, trainer: TrainerInterface, checkpoint: AnyPath) -> bool:
    """Load a checkpoint; return False if the run has deleted it meanwhile."""
    try:
        session.loading.load(checkpoint)
    except (CheckpointError, OSError):
        if any(trainer.accelerator.group.all_gather_objects(checkpoint.is_dir())):
            raise
        _logger.warning(
            "%s was deleted before it was evaluated. A larger keep_last of the run keeps its checkpoints for longer.",
            checkpoint,
        )
        return False
    return True
