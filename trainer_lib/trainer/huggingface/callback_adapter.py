"""Adapter for callbacks of Hugging Face's Trainer.

Each event is forwarded as the equivalent Hugging Face event, with a state and arguments of Hugging Face's classes;
requests in their control become requests of the run.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from trainer_lib.events import Modifier, Run
from trainer_lib.events.callback import EVENTS
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.logging import get_logger
from trainer_lib.trainer.huggingface.callback_views import arguments_view, new_state, update_state

_logger = get_logger(__name__)

_Handler = TypeVar("_Handler", bound=Callable[..., None])

_FLAGS = {
    "should_log": "log",
    "should_evaluate": "evaluate",
    "should_save": "save",
    "should_training_stop": "stop",
    "should_epoch_stop": "end_epoch",
}


def adapt_callback(callback: Any) -> Any:
    """Return an adapter for a callback of Hugging Face's Trainer.

    Raises:
        ConfigurationError: If it is a callback's class instead of an object.
    """
    kind = callback if isinstance(callback, type) else type(callback)
    if isinstance(callback, type):
        raise ConfigurationError(
            f"callbacks has the class {callback.__name__}. Give an object: {callback.__name__}(…)."
        )
    return IntegrationCallback(callback) if _is_integration(kind) else AdaptedCallback(callback)


def _fires(*events: str) -> Callable[[_Handler], _Handler]:
    """Mark the handler of one of our events with the Hugging Face events that it fires."""

    def mark(handler: _Handler) -> _Handler:
        handler.fires = events  # type: ignore[attr-defined]
        return handler

    return mark


class AdaptedCallback(Modifier):
    """Runs a `transformers.TrainerCallback` as a callback.

    A trainer adapts each one in its `callbacks`. As such a callback may change the model, its errors end the run.

    Args:
        callback: The callback.
    """

    callback: Any
    key: str | None

    runs_on_all_ranks: ClassVar[bool] = False  # what it does is unknown, and most only observe
    runs_in_sandbox: ClassVar[bool] = False
    reads_outputs: ClassVar[bool] = False  # callbacks of transformers are given none

    def __init__(self, callback: Any) -> None:
        from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerControl

        self.callback, self.key = callback, type(callback).__name__
        self._has_state = isinstance(callback, ExportableState)
        self._control, self._state, self._args = TrainerControl(), None, None
        events = [name for name in vars(TrainerCallback) if name.startswith("on_")]
        self._told = {name for name in events if getattr(type(callback), name) is not getattr(TrainerCallback, name)}
        if "on_push_begin" in self._told:
            _logger.warning("%s has on_push_begin, which is never called here.", self.key)
        for event in EVENTS:
            handler = getattr(self, f"_{event}", None)
            if handler is not None and self._told.intersection(handler.fires):  # others cost nothing
                setattr(self, event, handler)

    # -- events --------------------------------------------------------------------------------------------------

    @_fires("on_init_end", "on_train_begin")
    def _on_fit_begin(self, run: Run) -> None:
        is_first = self._args is None
        self._look_at(run)
        if is_first:
            self._tell("on_init_end", run)
        self._tell("on_train_begin", run)

    @_fires("on_log", "on_train_end")
    def _on_fit_end(self, run: Run) -> None:
        totals = _totals(run) if run.state.has_ended else None
        if totals is not None:
            self._tell("on_log", run, totals, logs=totals)
        self._tell("on_train_end", run, totals)

    @_fires("on_epoch_begin")
    def _on_epoch_begin(self, run: Run) -> None:
        self._tell("on_epoch_begin", run)

    @_fires("on_epoch_end")
    def _on_epoch_end(self, run: Run) -> None:
        self._tell("on_epoch_end", run)

    @_fires("on_step_begin")
    def _on_step_begin(self, run: Run) -> None:
        self._tell("on_step_begin", run)

    @_fires("on_substep_end")
    def _on_micro_batch_end(self, run: Run) -> None:
        if not run.accelerator.gradient_state.sync_gradients:  # the last one of a window ends the step
            self._tell("on_substep_end", run)

    @_fires("on_pre_optimizer_step")
    def _on_optimizer_step_begin(self, run: Run) -> None:
        self._tell("on_pre_optimizer_step", run)

    @_fires("on_optimizer_step")
    def _on_optimizer_step_end(self, run: Run) -> None:
        self._tell("on_optimizer_step", run)

    @_fires("on_step_end")
    def _on_step_end(self, run: Run) -> None:
        self._tell("on_step_end", run)

    @_fires("on_log")
    def _on_log(self, run: Run, values: dict[str, float]) -> None:
        logs: dict[str, Any] = {**values, "epoch": run.state.epochs}
        self._tell("on_log", run, logs, logs=logs)
        values.update({name: value for name, value in logs.items() if name not in values and name != "epoch"})

    @_fires("on_log", "on_evaluate")
    def _on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        logs = {**metrics, "epoch": run.state.epochs}
        self._tell("on_log", run, logs, logs=logs)  # Hugging Face logs an evaluation's metrics first
        with_epoch = {**metrics, "epoch": run.state.epochs} if run.trainer.parts.has_fitted else metrics
        self._tell("on_evaluate", run, logs, metrics=with_epoch)
        metrics.update({name: value for name, value in with_epoch.items() if name != "epoch"})

    @_fires("on_prediction_step")
    def _on_evaluate_batch_end(self, run: Run) -> None:
        self._tell("on_prediction_step", run)

    @_fires("on_prediction_step")
    def _on_predict_batch_end(self, run: Run) -> None:
        self._tell("on_prediction_step", run)

    @_fires("on_predict")
    def _on_predict_end(self, run: Run) -> None:
        self._tell("on_predict", run, metrics={})

    @_fires("on_save")
    def _on_save_end(self, run: Run, folder: Any) -> None:
        saved = next((checkpoint for checkpoint in run.state.checkpoints if checkpoint["path"] == str(folder)), None)
        self._tell("on_save", run, saved=saved)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's state, if it is an `ExportableState`."""
        return self.callback.state() if self._has_state else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the callback's attributes; its constructor arguments stay those of this program."""
        for name, value in state["attributes"].items():
            setattr(self.callback, name, value)

    # -- private -------------------------------------------------------------------------------------------------

    def _look_at(self, run: Run) -> None:
        self._args, self._state = arguments_view(run), new_state(run)

    def _tell(
        self,
        event: str,
        run: Run,
        logged: Mapping[str, Any] | None = None,
        saved: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        if event not in self._told:
            return
        if self._args is None:  # an evaluation before any training
            self._look_at(run)
        update_state(self._state, run, logged, saved)
        asked = {ours: getattr(run.control, ours) for ours in _FLAGS.values()}
        for theirs, ours in _FLAGS.items():
            setattr(self._control, theirs, asked[ours])
        result = getattr(self.callback, event)(self._args, self._state, self._control, **_handed(run), **more)
        self._control = self._control if result is None else result
        self._ask(run, asked)

    def _ask(self, run: Run, asked: Mapping[str, bool]) -> None:
        """Forward the callback's new requests to the run."""
        for theirs, ours in _FLAGS.items():
            if getattr(self._control, theirs) and not asked[ours]:
                if ours == "stop":
                    run.control.reason = run.control.reason or f"{self.key} asked for it"
                setattr(run.control, ours, True)


class IntegrationCallback(AdaptedCallback):
    """An adapter for transformers' integrations, which only report: one that raises is switched off."""

    may_change_training: ClassVar[bool] = False
    reads_outputs: ClassVar[bool] = False


def _is_integration(kind: type) -> bool:
    return kind.__module__.startswith("transformers.integrations.")


def _handed(run: Run) -> dict[str, Any]:
    return {
        "model": run.modules.get("", run.modules),
        "processing_class": run.trainer.processing_class,
        "optimizer": _only(run.optimizers),
        "lr_scheduler": _only(run.schedulers),
        "train_dataloader": next(iter(run.accelerator.prepared.dataloaders), None),
        "eval_dataloader": run.eval_loader,
    }


def _only(named: Mapping[str, Any]) -> Any:
    return next(iter(named.values())) if len(named) == 1 else dict(named) or None


def _totals(run: Run) -> dict[str, Any]:
    """Return the values that Hugging Face's Trainer logs at the end of training."""
    state = run.state
    totals: dict[str, Any] = {"train_runtime": state.seconds}
    if state.seconds:
        totals["train_samples_per_second"] = state.samples / state.seconds
        totals["train_steps_per_second"] = state.step / state.seconds
    logs = [entry for entry in state.history if "loss" in entry]
    if logs and state.step:
        begins = [0, *(entry["step"] for entry in logs)]
        total = sum(entry["loss"] * (entry["step"] - begin) for entry, begin in zip(logs, begins, strict=False))
        totals["train_loss"] = total / state.step
    return {**totals, "epoch": state.epochs}
