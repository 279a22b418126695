"""The base classes of callbacks, and the events that a callback can listen to."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

from trainer_lib.events.event import declared_events, event
from trainer_lib.events.run import Run
from trainer_lib.foundation.duration import Every
from trainer_lib.foundation.public_names.signatures import ConstructorSignature, unknown_keywords


class UpdatePlan(Protocol):
    """How many batches make an update, epoch by epoch."""

    def begin(self, base: int) -> int:
        """Store the arguments' accumulation steps, and return those of the first epoch."""
        ...

    def updates(self, batches: int, epochs: float) -> int:
        """Return the number of updates in `epochs` epochs of `batches` batches."""
        ...


class Callback:
    """Observes a run, and can make requests through `run.control`.

    An error in a callback does not stop training: a warning names the callback, the event and the step once, and the
    callback is switched off. Only a `ConfigurationError` ends the run, because it reports a wrong setup. A callback of
    this class leaves model, batch and gradients alone and sends nothing to other ranks. For anything more, derive from
    `Modifier`.

    To listen to an event, override its method; an event without listeners costs nothing.

    Attributes:
        order: Callbacks with a lower order are called first; callbacks with the same order, in the order given.
        key: The name under which `state_dict` is saved; by default the class name.
        exclusive_group: What only one callback of a run can do, in words for the error; `None`: no restriction.
        is_display: Whether it shows the run in a terminal or a notebook. A run without a display prints no banner.
        writes_history: Whether it writes a run's history file; the trainer then adds no history writer.
        saves_checkpoints: Whether it requests checkpoints, which need an `output_dir`.
        needs_evaluation: Whether the run has to evaluate; its `monitored_metric` is then checked before training.
        supports_batch_splitting: Whether it works with batches that are split because they do not fit into memory.
        freezes_weights: Whether it freezes weights while training runs; unless you give options of DDP, DDP then does
            not wait for their gradients.
        saves_memory: Whether parts of the run need less memory with it than the rest; the batch-size finder trains
            without it.
        runs_on_all_ranks: Whether all ranks need it. A `Modifier` that some ranks lack is an error when a fit begins,
            since it changes their training alone, unless its class sets this to `False`.
        runs_in_sandbox: Whether tools such as the learning-rate finder train with a copy of it, if it is a `Modifier`.
        reads_outputs: Whether its methods read `run.outputs`; where none do, outputs are freed early. It holds for the
            class that declares it, not for classes derived from it.
        changes_weights: Whether a callback that may change training changes weights other than by gradients, before the
            next update; background saves then copy all weights before training continues.

    Example:
        >>> class StopAtStep(Callback):
        ...     def on_step_end(self, run: Run) -> None:
        ...         run.control.stop = run.state.step >= 100
    """

    __signature__: ClassVar[ConstructorSignature] = ConstructorSignature()

    order: int = 0
    key: str | None = None
    exclusive_group: ClassVar[str | None] = None
    may_change_training: ClassVar[bool] = False
    is_display: ClassVar[bool] = False
    writes_history: ClassVar[bool] = False
    saves_checkpoints: ClassVar[bool] = False
    needs_evaluation: ClassVar[bool] = False
    supports_batch_splitting: ClassVar[bool] = True
    freezes_weights: ClassVar[bool] = False
    saves_memory: ClassVar[bool] = False
    runs_on_all_ranks: ClassVar[bool] = False
    runs_in_sandbox: ClassVar[bool] = True
    reads_outputs: ClassVar[bool] = True
    changes_weights: ClassVar[bool] = True

    # Runs before __init__, which would raise a TypeError for an unknown name and could not suggest a known one.
    def __new__(cls, *positional: Any, **named: Any) -> Self:
        """Check the names of the arguments of a shipped callback."""
        del positional
        if named and (unknown := unknown_keywords(cls.__init__, named)):
            from trainer_lib.events.constructor_names import check_constructor

            check_constructor(cls, unknown)
        return super().__new__(cls)

    @property
    def unfiltered(self) -> "Callback":
        """The callback itself; of one behind a filter such as `every(…)`, the callback there."""
        return self

    @property
    def monitored_metric(self) -> str | None:
        """The evaluation metric that the callback reads; `None`: no metric, or the trainer's default."""
        return None

    @property
    def save_interval(self) -> Every | None:
        """The interval at which the callback requests checkpoints."""
        return None

    @property
    def tracker_name(self) -> str | None:
        """The tracker that the callback logs to; `report_to` adds no second callback for that tracker."""
        return None

    def update_plan(self) -> UpdatePlan | None:
        """Return the plan of batches per update, if their number changes during the run."""
        return None

    # -- a run ---------------------------------------------------------------------------------------------------

    @event()
    def on_fit_begin(self, run: Run) -> None:
        """Everything is prepared, and the checkpoint is loaded if the run is resumed."""

    @event()
    def on_epoch_begin(self, run: Run) -> None:
        """An epoch begins, or continues after a resume."""

    # -- an update -----------------------------------------------------------------------------------------------

    @event(per_update=True)
    def on_step_begin(self, run: Run) -> None:
        """The first batch of an update is loaded."""

    @event(per_update=True, changes="`run.batch`")
    def on_micro_batch_begin(self, run: Run) -> None:
        """A micro-batch is loaded, as `run.batch`."""

    @event(per_update=True, changes="`run.loss_sum`, `run.weight`")
    def on_loss(self, run: Run) -> None:
        """The loss of a micro-batch is computed; its gradients are not yet.

        `run.loss_sum`, a sum over `run.weight` items, still has its graph.
        """

    @event(per_update=True)
    def on_micro_batch_end(self, run: Run) -> None:
        """The gradients of a micro-batch are accumulated; `run.loss` and `run.outputs` are available."""

    @event(per_update=True, changes="the gradients")
    def on_backward_end(self, run: Run) -> None:
        """The gradients of an update are complete, but not clipped yet."""

    @event(per_update=True)
    def on_optimizer_step_begin(self, run: Run) -> None:
        """The gradients are clipped; `run.grad_norm` is their norm before clipping."""

    @event(per_update=True)
    def on_optimizer_step_end(self, run: Run) -> None:
        """The weights are updated; the gradients are not zeroed yet."""

    @event(per_update=True)
    def on_step_skipped(self, run: Run) -> None:
        """The update was skipped, because gradients overflowed (fp16) or were NaN or Inf."""

    @event(per_update=True)
    def on_step_end(self, run: Run) -> None:
        """An update is complete or skipped, and is counted."""

    # -- after an update -----------------------------------------------------------------------------------------

    @event()
    def on_epoch_end(self, run: Run) -> None:
        """The last update of an epoch is complete; requests made here take effect with those of that step."""

    @event()
    def on_batch_size_reduced(self, run: Run, batch_size: int) -> None:
        """A batch did not fit into memory; batches are split from now on."""

    @event()
    def on_log(self, run: Run, values: dict[str, float]) -> None:
        """Values are logged; you can add values for the callbacks that are called later."""

    @event()
    def on_event(self, run: Run, name: str, facts: Mapping[str, Any]) -> None:
        """A callback recorded an event for the history with `run.record_event`."""

    # -- an evaluation -------------------------------------------------------------------------------------------

    @event()
    def on_evaluate_begin(self, run: Run) -> None:
        """An evaluation of all its sets begins."""

    @event()
    def on_evaluate_set_begin(self, run: Run, name: str, batches: int | None) -> None:
        """The evaluation of one set begins; `batches` is the number per rank, if it is known."""

    @event(changes="`run.batch`")
    def on_evaluate_batch_begin(self, run: Run) -> None:
        """A batch of an evaluation is loaded."""

    @event()
    def on_evaluate_batch_end(self, run: Run) -> None:
        """A batch of an evaluation is done."""

    @event()
    def on_evaluate_set_end(self, run: Run, name: str, metrics: dict[str, float]) -> None:
        """The evaluation of one set is done."""

    @event()
    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        """An evaluation is done; `metrics` are those of all its sets, the same on all ranks."""

    @event()
    def on_best(self, run: Run, metric: str, value: float) -> None:
        """An evaluation gave a better value than all before."""

    # -- a prediction --------------------------------------------------------------------------------------------

    @event()
    def on_predict_begin(self, run: Run, batches: int | None) -> None:
        """Prediction begins."""

    @event(changes="`run.batch`")
    def on_predict_batch_begin(self, run: Run) -> None:
        """A batch of a prediction is loaded."""

    @event()
    def on_predict_batch_end(self, run: Run) -> None:
        """A batch of a prediction is done."""

    @event()
    def on_predict_end(self, run: Run) -> None:
        """Prediction is done."""

    # -- a checkpoint --------------------------------------------------------------------------------------------

    @event()
    def on_save_begin(self, run: Run, folder: Path) -> None:
        """A checkpoint is about to be written."""

    @event()
    def on_save_end(self, run: Run, folder: Path) -> None:
        """A checkpoint is written."""

    @event()
    def on_load_begin(self, run: Run, folder: Path) -> None:
        """A checkpoint is about to be loaded."""

    @event()
    def on_load_end(self, run: Run, folder: Path) -> None:
        """A checkpoint is loaded."""

    # -- the end -------------------------------------------------------------------------------------------------

    @event()
    def on_interrupt(self, run: Run) -> None:
        """Training ends early, at a signal or before a deadline; the checkpoint is saved."""

    @event()
    def on_exception(self, run: Run, error: BaseException) -> None:
        """Training ends with an error."""

    @event()
    def on_fit_end(self, run: Run) -> None:
        """Training ended, with or without an error."""

    # -- what survives a restart ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save with a checkpoint: plain values and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned."""


class Modifier(Callback):
    """A callback that may change model, batch, loss or gradients. Its errors end the run."""

    may_change_training: ClassVar[bool] = True
    runs_on_all_ranks: ClassVar[bool] = True

    def eval_weights(self, run: Run) -> AbstractContextManager[Any]:
        """Return a context, such as one with averaged weights, in which models evaluate, predict and are saved."""
        del run
        return nullcontext()


EVENTS = declared_events(Callback)


def overrides(callback: Callback, event: str) -> bool:
    """Whether a callback listens to an event."""
    return getattr(getattr(callback, event), "__func__", None) is not getattr(Callback, event)
