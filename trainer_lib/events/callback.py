"""This file is the list of events: what a callback may listen to."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Protocol

from trainer_lib.events.run import Run
from trainer_lib.foundation.duration import Every


class UpdatePlan(Protocol):
    """How many batches make an update, epoch by epoch."""

    def begin(self, base: int) -> int:
        """Store the arguments' accumulation steps, and return those of the first epoch."""
        ...

    def updates(self, batches: int, epochs: float) -> int:
        """Return the number of updates in `epochs` epochs of `batches` batches."""
        ...


class Callback:
    """Listens to a run, and may ask it for something through `run.control`.

    A callback of this kind observes. If it raises, it is named once, with the event and the step, and switched off, and
    training goes on; only a `ConfigurationError` ends the run, since it says that something was set up wrongly. An
    observer leaves model, batch and gradients alone and sends nothing to other processes. What does more is a
    `Modifier`.

    Overriding is all that it takes to listen; an event nobody listens to costs nothing.

    Attributes:
        order: Callbacks of a lower order are called first; those of the same in the order given.
        key: The name under which `state_dict` is saved; by default that of the class.
        exclusive_group: What no other callback of the run may do besides, in words; `None`: there may be any number.
        is_display: Whether it shows the run in a terminal or a notebook. A run without a display prints no banner.
        writes_history: Whether it writes a run's history file; the trainer then adds no writer of its own.
        saves_checkpoints: Whether it asks for checkpoints, which need an `output_dir`.
        needs_evaluation: Whether the run has to evaluate; its `monitored_metric` is then checked before training.
        supports_batch_splitting: Whether it works with batches that are split because they do not fit into memory.
        saves_memory: Whether parts of the run need less memory with it than the rest; the search for a batch size
            leaves it out.
        runs_in_sandbox: Whether tools such as the learning-rate finder train with a copy of it, if it is a `Modifier`.

    Example:
        >>> class StopAtStep(Callback):
        ...     def on_step_end(self, run: Run) -> None:
        ...         run.control.stop = run.state.step >= 100
    """

    order: int = 0
    key: str | None = None
    exclusive_group: ClassVar[str | None] = None
    may_change_training: ClassVar[bool] = False
    is_display: ClassVar[bool] = False
    writes_history: ClassVar[bool] = False
    saves_checkpoints: ClassVar[bool] = False
    needs_evaluation: ClassVar[bool] = False
    supports_batch_splitting: ClassVar[bool] = True
    saves_memory: ClassVar[bool] = False
    runs_in_sandbox: ClassVar[bool] = True

    @property
    def monitored_metric(self) -> str | None:
        """The evaluation metric it goes by; `None`: none, or the trainer's."""
        return None

    @property
    def save_interval(self) -> Every | None:
        """The interval at which it asks for checkpoints."""
        return None

    @property
    def tracker_name(self) -> str | None:
        """The tracker it logs to; `report_to` adds no second callback for that tracker."""
        return None

    def update_plan(self) -> UpdatePlan | None:
        """Return the plan of how many batches make an update, if it changes during the run."""
        return None

    # -- a run ---------------------------------------------------------------------------------------------------

    def on_fit_begin(self, run: Run) -> None:
        """Everything is prepared, and loaded if the run is resumed."""

    def on_fit_end(self, run: Run) -> None:
        """Training is over, however it ended."""

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Training ends with an error."""

    def on_interrupt(self, run: Run) -> None:
        """Training ends early, at a signal or before a deadline; what there is to save is saved."""

    def on_epoch_begin(self, run: Run) -> None:
        """A pass over the data begins, or goes on after a restart."""

    def on_epoch_end(self, run: Run) -> None:
        """The last update of a pass is made; what is asked for here is done with what its step asked for."""

    # -- a step --------------------------------------------------------------------------------------------------

    def on_step_begin(self, run: Run) -> None:
        """The first batch of an update is in hand."""

    def on_micro_batch_begin(self, run: Run) -> None:
        """A batch is in hand (`run.batch`, which a transformer may replace)."""

    def on_loss(self, run: Run) -> None:
        """The loss of a batch is there, and its gradients are not yet.

        `run.loss_sum` has its graph here, and a transformer may replace it and `run.weight`.
        """

    def on_micro_batch_end(self, run: Run) -> None:
        """Its gradients are added to the others'; `run.loss` and `run.outputs` are known."""

    def on_backward_end(self, run: Run) -> None:
        """The gradients of an update are complete, and not yet clipped."""

    def on_optimizer_step_begin(self, run: Run) -> None:
        """The gradients are clipped; `run.grad_norm` is what their norm was."""

    def on_optimizer_step_end(self, run: Run) -> None:
        """The weights are updated, the gradients not yet dropped."""

    def on_step_skipped(self, run: Run) -> None:
        """Gradients overflowed (fp16), so the weights were left alone. Told when it is known without waiting."""

    def on_step_end(self, run: Run) -> None:
        """An update is made and counted."""

    def on_batch_size_reduced(self, run: Run, batch_size: int) -> None:
        """A batch did not fit into memory, and is split from now on."""

    # -- evaluation ----------------------------------------------------------------------------------------------

    def on_evaluate_begin(self, run: Run) -> None:
        """An evaluation of all its sets begins."""

    def on_evaluate_set_begin(self, run: Run, name: str, batches: int | None) -> None:
        """The evaluation of one set begins, of so many batches a process, if that is known."""

    def on_evaluate_batch_begin(self, run: Run) -> None:
        """A batch of an evaluation is in hand."""

    def on_evaluate_batch_end(self, run: Run) -> None:
        """A batch of an evaluation is through."""

    def on_evaluate_set_end(self, run: Run, name: str, metrics: dict[str, float]) -> None:
        """The evaluation of one set is through."""

    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        """An evaluation is through; the metrics are those of all its sets, and the same on all processes."""

    def on_best(self, run: Run, metric: str, value: float) -> None:
        """An evaluation was better than all before."""

    def on_predict_begin(self, run: Run, batches: int | None) -> None:
        """Prediction begins."""

    def on_predict_batch_end(self, run: Run) -> None:
        """A batch of a prediction is through."""

    def on_predict_end(self, run: Run) -> None:
        """Prediction is through."""

    # -- what leaves the run -------------------------------------------------------------------------------------

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        """Values are logged; one may add some, for the callbacks that come later."""

    def on_event(self, run: Run, name: str, facts: Mapping[str, Any]) -> None:
        """Something happened that belongs into the run's history: what `run.record_event` was told."""

    def on_save_begin(self, run: Run, folder: Path) -> None:
        """A checkpoint is about to be written."""

    def on_save_end(self, run: Run, folder: Path) -> None:
        """A checkpoint is there."""

    def on_load_begin(self, run: Run, folder: Path) -> None:
        """A checkpoint is about to be loaded."""

    def on_load_end(self, run: Run, folder: Path) -> None:
        """A checkpoint is loaded."""

    # -- what survives a restart ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what is saved with a checkpoint: plain values and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned."""


class Modifier(Callback):
    """A callback that takes part in training: it may change model, batch, loss or gradients. Its errors end the run."""

    may_change_training: ClassVar[bool] = True

    def eval_weights(self, run: Run) -> AbstractContextManager[Any]:
        """Return the context in which models evaluate, predict and are saved for use, such as one of other weights."""
        del run
        return nullcontext()


EVENTS: tuple[str, ...] = tuple(name for name in vars(Callback) if name.startswith("on_"))
# From the first batch of an update to the update itself: the class lists them one after the other.
UPDATE_EVENTS = EVENTS[EVENTS.index("on_step_begin") : EVENTS.index("on_step_end") + 1]


def overrides(callback: Callback, event: str) -> bool:
    """Whether a callback listens to an event."""
    return getattr(getattr(callback, event), "__func__", None) is not getattr(Callback, event)
