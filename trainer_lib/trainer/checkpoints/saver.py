"""Saving a run's checkpoints, with the events before and after each save."""

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from trainer_lib.collectives.agreement import run_on_main_process
from trainer_lib.filesystem.remote_paths import AnyPath, path_at
from trainer_lib.foundation.errors import CheckpointError, RunInUseError, UnsavedError, UnwritableError
from trainer_lib.foundation.lazy_imports import without_collections
from trainer_lib.logging import get_logger
from trainer_lib.runs.run_lease import Lease
from trainer_lib.trainer.checkpoints.existing_checkpoints import existing_checkpoints, set_other_run_aside
from trainer_lib.trainer.fit.context import FitContext
from trainer_lib.trainer.result import FitResult

_logger = get_logger(__name__)

_SHOWN = 4  # names in a message


class CheckpointSaver:
    """Saves checkpoints, one at a time.

    Args:
        context: The fit.
        lease: The right to write into the run's folder.

    Attributes:
        pending: The entry of a checkpoint that is being written, or is written and not yet announced by `on_save_end`.
        reasons: Why the last checkpoint was saved.
        failure: Why the last checkpoint could not be written; `None` if it could.
        saved_step: The step whose state is saved, so that it is not saved again; -1 without one.
    """

    def __init__(self, context: FitContext, lease: Lease) -> None:
        self._context, self._run, self._lease = context, context.run, lease
        self._background = context.accelerator.checkpoints.background
        self.saved_step = -1
        self._has_asked = False
        self._began = 0.0  # when the last save began, by time.monotonic
        self.pending: dict[str, Any] | None = None
        self.reasons: set[str] = set()
        self._warned_infinite: set[str] = set()
        self.failure: str | None = None  # not the error, whose traceback would keep the process group alive

    def save(self, target: AnyPath, metrics: dict[str, float]) -> None:
        """Save a checkpoint. One that is saved in the background is announced later, by `flush`."""
        with self._training_waits():
            self._save(target, metrics)

    def _save(self, target: AnyPath, metrics: dict[str, float]) -> None:
        self._flush()
        if self.pending is not None:  # the save before hangs
            return
        with without_collections():
            from trainer_lib.accelerator.checkpoints.save_state import save

        self._began, self.failure = time.monotonic(), None
        run, state, accelerator = self._run, self._run.state, self._run.accelerator
        earlier = [checkpoint for checkpoint in state.checkpoints if checkpoint["path"] != str(target)]
        entry = {"path": str(target), "step": state.step, "metrics": metrics, **self._position()}
        self.reasons = self._reasons()
        entry["reasons"] = sorted(self.reasons) or ["asked"]
        self._context.events.fire("on_save_begin", run, target)
        state.checkpoints = [*earlier, entry]  # so that a run that resumes from it lists it
        try:
            run_on_main_process(accelerator.group, "fit", partial(set_other_run_aside, target, state.run_id))
            save(accelerator.checkpoints, target, background=run.args.save_in_background, group=accelerator.group)
        except UnwritableError as error:
            self._handle_failure(error)
            return
        finally:
            state.checkpoints, run.control.pending_elsewhere = earlier, {}
        self.pending, self._has_asked = entry, False
        if not run.args.save_in_background:
            self._flush()

    def forget_step(self) -> None:
        """Let the same step be saved again."""
        self.saved_step: int = -1

    def find(self) -> None:
        """Replace a resumed run's list of checkpoints by those that exist, as the main process sees them."""
        run = self._run
        existing = [None]
        if run.is_main_process:
            existing = [existing_checkpoints(run.state.checkpoints, self._context.folder, run.state.step)]
        (run.state.checkpoints,) = run.accelerator.group.broadcast_objects(existing)

    def request_flush(self) -> None:
        """Ask for `flush`, once, when the checkpoint in the background is written."""
        run = self._run
        if not (self._has_asked or run.control.is_due("flush") or run.accelerator.is_saving):
            self._has_asked = True
            run.control.ask("flush")

    def flush(self) -> None:
        """Wait for the checkpoint in the background, if there is one, and fire `on_save_end`.

        A save that hangs on any rank stays pending on all ranks.

        Raises:
            CheckpointError: If the checkpoint could not be saved, and that ends the run.
        """
        with self._training_waits():
            self._flush()

    def _flush(self) -> None:
        if self.pending is None:
            return
        try:
            self._refuse_hang()
            entry = self._written()
        except UnwritableError as error:
            self._handle_failure(error)
        else:
            self._context.events.fire("on_save_end", self._run, path_at(entry["path"]))
            self._upload_logs()

    @contextmanager
    def _training_waits(self) -> Generator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._run.saving_seconds += time.perf_counter() - begin

    def unsaved_error(self, result: FitResult) -> UnsavedError:
        """Return the error of a run that trained all its steps and whose last checkpoint could not be written."""
        checkpoints = result.state.checkpoints
        newest = f"step {checkpoints[-1]['step']}, {checkpoints[-1]['path']}" if checkpoints else "none"
        error = UnsavedError(
            f"The run trained all its steps, up to step {result.state.step}, but its last checkpoint could not be "
            f"written, so the run is not finished. {self.failure} The newest checkpoint: {newest}. The weights are "
            "still in memory: catch this error and call save_model with a folder that you can write to. Or free disk "
            'space and call fit with resume="auto", which trains the missing steps again.'
        )
        error.result = result
        return error

    def close(self) -> None:
        """Wait for the background save, however the run ended, and free its memory. It fires no event."""
        if self.pending is not None and self._background.hang is None:
            try:
                self._written()
            except CheckpointError as error:
                _logger.error("%s", error)
        self._background.release()

    def _upload_logs(self) -> None:
        if self._context.folder is not None and self._run.is_main_process:
            self._context.folder.upload()

    def _refuse_hang(self) -> None:
        """Raise on all ranks if the save hangs on one of them."""
        run = self._run
        if not run.args.save_in_background:
            return
        saves = self._background
        saves.wait_until_released()
        hang = next((hang for hang in run.accelerator.group.all_gather_objects(saves.hang) if hang is not None), None)
        if hang is not None:
            saves.report_hang(hang)
            raise UnwritableError(hang)

    def _handle_failure(self, error: UnwritableError) -> None:
        if self._run.args.on_save_error == "raise":
            raise error
        self.failure = str(error)
        self.forget_step()
        if not self._run.state.has_ended:  # otherwise the end of the fit warns
            _logger.warning('%s Training continues; on_save_error="raise" would end it.', error)
        self._run.record_event("not_saved", why=str(error))

    def _reasons(self) -> set[str]:
        run = self._run
        reasons = set(run.control.save_reasons)
        run.control.save_reasons.clear()
        return reasons | ({"end"} if run.state.has_ended else set())

    def _position(self) -> dict[str, Any]:
        run, state = self._run, self._run.state
        # Clocks differ, and retention goes by this time: all ranks must keep the same checkpoints.
        local = state.seconds, self._lease.loss(), run.control.pending
        by_rank = run.accelerator.group.all_gather_objects(local)
        seconds, loss, _ = by_rank[0]
        # Rank 0 saves them: those of other ranks travel with the gradients of the next update.
        run.control.pending_elsewhere = {name: reason for *_, asked in by_rank for name, reason in asked.items()}
        if loss is not None:
            raise RunInUseError(f"{loss} Nothing more is saved.")
        return {"epoch": state.epochs, "samples": state.samples, "seconds": seconds}

    def _written(self) -> dict[str, Any]:
        """Wait for the checkpoint, add it to the run's list, and return its entry."""
        entry, self.pending = self.pending, None
        assert entry is not None
        run = self._run
        run.accelerator.wait_for_save()
        in_background = run.args.save_in_background
        ended = self._background.ended_at if in_background else time.monotonic()
        run.state.save_seconds = ended - self._began
        if faults := self._background.nonfinite:
            entry["nonfinite"] = faults
            self._warn_of_nonfinite(entry)
        self._warn_of_infinite_states(entry["path"], self._background.infinite_states)
        run.state.checkpoints = [*run.state.checkpoints, entry]
        return entry

    def _warn_of_nonfinite(self, entry: Mapping[str, Any]) -> None:
        """Warn of a checkpoint with NaN or Inf, and choose the best evaluation without it."""
        run, state = self._run, self._run.state
        fault = f"{entry['path']} has tensors with NaN or Inf: {_some(entry['nonfinite'])}."
        _logger.warning(
            "%s It does not count as a good checkpoint: no older checkpoint is deleted for it, it is never the best, "
            "and no run resumes from it.",
            fault,
        )
        run.record_event("not_finite", why=fault)
        if state.best is not None and state.best.step == entry["step"]:
            state.best = self._context.evaluation.best_of(state.checkpoints)

    def _warn_of_infinite_states(self, path: str, names: Sequence[str]) -> None:
        """Warn of each optimizer state with Inf, once. The checkpoint still counts as good."""
        new = [name for name in names if name not in self._warned_infinite]
        if not new:
            return
        self._warned_infinite.update(new)
        fault = f"{path} has optimizer states with Inf: {_some(new)}."
        _logger.warning(
            "%s It counts as a good checkpoint, as its weights are finite. But where a second moment is infinite, Adam "
            "never changes the weight again: clip gradients (max_grad_norm), lower the learning rate, or train weights "
            "in fp32, from a checkpoint before this one.",
            fault,
        )
        self._run.record_event("infinite_states", why=fault)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
