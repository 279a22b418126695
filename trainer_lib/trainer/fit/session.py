"""One call of `fit`: makes its parts, hands them to the loop, and begins the run."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import UnwritableError
from trainer_lib.logging import get_logger
from trainer_lib.modules.weights.tensor_slots import non_persistent_buffers
from trainer_lib.runs import HISTORY_FILE, IDENTITY_FILE, RunFolder
from trainer_lib.runs.run_lease import Lease
from trainer_lib.seeding import set_seed
from trainer_lib.trainer.checkpoints import resume_arguments, run_records
from trainer_lib.trainer.checkpoints.manifest_facts import manifest_facts
from trainer_lib.trainer.checkpoints.owed_requests import OwedRequests
from trainer_lib.trainer.checkpoints.peft import PeftCheckpoints
from trainer_lib.trainer.checkpoints.rewind import Rewind
from trainer_lib.trainer.checkpoints.run_loading import RunLoading
from trainer_lib.trainer.checkpoints.run_state_part import RunStatePart
from trainer_lib.trainer.checkpoints.saver import CheckpointSaver
from trainer_lib.trainer.data.train_batches import TrainBatches
from trainer_lib.trainer.evaluation.fit_evaluations import FitEvaluations
from trainer_lib.trainer.fit import start_banner
from trainer_lib.trainer.fit.actions import Actions
from trainer_lib.trainer.fit.context import FitContext
from trainer_lib.trainer.fit.fit_end import FitEnd
from trainer_lib.trainer.fit.fit_setup import infinite_buffers, set_up
from trainer_lib.trainer.fit.local_rounds import local_rounds
from trainer_lib.trainer.fit.saving import Saving
from trainer_lib.trainer.fit.train_clock import TrainClock
from trainer_lib.trainer.fit.train_log import TrainLog
from trainer_lib.trainer.fit.train_loop import TrainLoop
from trainer_lib.trainer.fit.triggers import Triggers
from trainer_lib.trainer.losses.batch_parts import BatchParts, WholeBatches
from trainer_lib.trainer.publish.save_pretrained import write_companion_files
from trainer_lib.trainer.safety.bad_samples import BadSamples
from trainer_lib.trainer.safety.deadline import Deadline, check_ahead, deadline_of
from trainer_lib.trainer.safety.micro_batching import MicroBatching
from trainer_lib.trainer.safety.nonfinite_guard import NonFiniteGuard
from trainer_lib.trainer.safety.nonfinite_report import NonFiniteReport
from trainer_lib.trainer.safety.signals import Signals
from trainer_lib.trainer.trainer_interface import TrainerInterface

if TYPE_CHECKING:
    from trainer_lib.events.run import Run
    from trainer_lib.local_sgd import LocalSGD

_logger = get_logger(__name__)

_Loop = TypeVar("_Loop", bound=TrainLoop)
_BUFFERS = "changed_buffers"  # the part of the run's state that holds them


class FitSession:
    """The parts of one `fit`; each owns its own state, and knows the parts that it needs.

    Args:
        trainer: The trainer, whose methods make what is trained.
        folder: The run's folder; `None`: nothing is written.
        signals: The signals that ask the run to save and end.
        lease: The right to write into the folder; `None`: nothing is written.
    """

    context: FitContext
    run: "Run"
    deadline: Deadline
    owed: OwedRequests
    batches: TrainBatches

    def __init__(
        self, trainer: TrainerInterface, folder: RunFolder | None, signals: Signals, lease: Lease | None = None
    ) -> None:
        self._trainer, self._signals, self._lease = trainer, signals, lease or Lease(None)
        self.context = context = set_up(trainer, folder, signals.control)
        self.run = run = context.run
        self.owed, self.deadline = OwedRequests(), deadline_of(run)
        self._clock, self.batches = TrainClock(run), TrainBatches(context)
        self.saver: CheckpointSaver = CheckpointSaver(context, self._lease)
        self.rounds: LocalSGD = local_rounds(context)
        self.guard: NonFiniteGuard = NonFiniteGuard(context, NonFiniteReport(context), lambda: self.rewind.is_possible)
        self._bad_samples = BadSamples(context)
        self._parts = trainer.parts.batches = _batch_parts(trainer)
        self._training_step = self._parts.training_step
        self.micro_batching: MicroBatching = MicroBatching(context, self.guard, self._training_step)
        self.log: TrainLog = TrainLog(context, self._clock, self.guard, self._bad_samples, self.micro_batching)
        self.evaluations: FitEvaluations = FitEvaluations(
            context, trainer.evaluate, self.log, self._clock, self.deadline
        )
        self._buffers = _changed_buffers(context)
        self.part: RunStatePart = RunStatePart(
            context,
            self.owed,
            self.evaluations,
            {
                "guard": self.guard,
                "log": self.log,
                "bad_samples": self._bad_samples,
                "splitting": self.micro_batching,
                **({"local_rounds": self.rounds} if self.rounds.enabled else {}),
                **self._buffers,
            },
        )
        self.loading: RunLoading = RunLoading(context, self.part, self.saver)
        self.rewind: Rewind = Rewind(context, self.loading, self.saver, self._clock, self._begin_counting)
        self.saving: Saving = Saving(
            context, self.saver, self.log, self.evaluations, self.owed, self._clock, self.deadline
        )
        self.end: FitEnd = FitEnd(context, self.log, self.evaluations, self.saving, self.saver, self.owed, self._lease)
        self.triggers: Triggers = _triggers(context, self._clock, self.deadline)
        self._registered = ExitStack()
        self._register()

    def _register(self) -> None:
        """Have the accelerator save and load the run's state with its own."""
        accelerator = self.context.accelerator
        adapters = PeftCheckpoints(accelerator)
        accelerator.register_for_checkpointing(self.part)
        accelerator.checkpoints.infinite_buffers = infinite_buffers(self.context)
        accelerator.checkpoints.holders = self._generator_holders
        self._registered.callback(setattr, accelerator.checkpoints, "holders", dict)
        accelerator.checkpoints.prefix_of_buffers = f"{_BUFFERS}." if self._buffers else ""
        for handle in (
            accelerator.register_save_state_pre_hook(self._write_companions),
            accelerator.register_save_state_pre_hook(adapters.exclude_base_weights),
            accelerator.register_load_state_pre_hook(adapters.restore_base_weights),
            accelerator.register_state_facts(lambda: manifest_facts(self.context, self.saver.reasons)),
        ):
            self._registered.callback(handle.remove)
        if self.rounds.enabled:
            self._registered.callback(self.rounds.leave)
            self._registered.callback(setattr, self.run, "averaged_weights", self.run.averaged_weights)
            self.rounds.__enter__()
            self.run.averaged_weights = self.rounds.averaged

    def _generator_holders(self) -> Mapping[str, Any]:
        from trainer_lib.trainer.checkpoints.generator_holders import generator_holders  # for saves and loads

        return generator_holders(self._trainer)

    def begin(self, checkpoint: AnyPath | None, *, is_unfinished: bool = False) -> None:
        """Resume from a checkpoint, if there is one, and be ready for the first step.

        Args:
            checkpoint: The checkpoint.
            is_unfinished: Whether its run did not record an end.
        """
        context, run, args = self.context, self.run, self.run.args
        if args.seed is not None and run.accelerator.data_group.size > 1:
            set_seed(args.seed, device_specific=True)  # dropout draws other numbers for each batch
        if checkpoint is not None:
            self.loading.load(checkpoint)
        if is_unfinished and run.state.status == "stopped":  # and was killed before it recorded that
            self.owed.requests["stop"] = run.state.reason
        if context.evaluation.best_metric is not None:
            _ = context.evaluation.greater_is_better  # an error comes before it is too late
        run.state.status, run.state.reason = "running", None
        check_ahead(args.deadline)
        self._begin_counting()
        if context.folder is not None and run.is_main_process:
            self._lease.acquire()  # a new run; one that is resumed has it since it was found
            context.folder.download(HISTORY_FILE)
            run_records.write_running(context.folder, args, is_new=checkpoint is None)
        if context.folder is not None and args.save_in_background:
            # Its connections are made now: later the store may be gone, with the launcher.
            run.accelerator.checkpoints.background.group(context.group)
        start_banner.show(context, self._signals, self.deadline)
        context.events.fire("on_fit_begin", run)
        if changes := resume_arguments.visible_changes(self.loading.changed):
            run.record_event("arguments", changed=changes)
        if args.eval_on_start and not run.state.step:
            self.evaluations.evaluate()  # left early only by a run that then ends before its first step

    def loop(self, kind: type[_Loop]) -> _Loop:
        """Return the training loop over these parts."""
        actions = Actions(
            self.context,
            triggers=self.triggers,
            saver=self.saver,
            saving=self.saving,
            log=self.log,
            evaluations=self.evaluations,
            end=self.end,
            owed=self.owed,
            was_unfinished=self.part.loaded.get("status") in ("interrupted", "running"),
        )
        return kind(
            self.context,
            batches=self.batches,
            step=self.micro_batching.step if self.micro_batching.is_on else self._training_step,
            guard=self.guard,
            log=self.log,
            saving=self.saving,
            rewind=self.rewind,
            actions=actions,
            rounds=self.rounds,
            parts=self._parts,
        )

    def close(self, status: Any) -> None:
        """Record how the run ended, and let the callbacks know."""
        self.release()
        self._clock.add()
        self._bad_samples.tell()
        self.average_at_end(status)
        self.end.close(status)
        self.average_at_end(status)  # what callbacks left, such as an average over updates

    def average_at_end(self, status: Any) -> None:
        """Average the weights of ranks that trained by themselves, if the run has ended."""
        if self.rounds.enabled and self.run.state.has_ended and status != "failed":
            self.rounds.average()

    def release(self) -> None:
        """Take back what was registered with the accelerator."""
        self._registered.close()

    def _begin_counting(self) -> None:
        """Begin to count tokens, time and intervals, from the state that the run has now."""
        state = self.run.state
        if not self.run.args.counts_tokens:
            state.tokens = None
        elif state.tokens is None:
            if state.step:
                _logger.warning("The checkpoint has no count of tokens: they are counted from step %d.", state.step)
            state.tokens = 0
        self._clock.restart()
        self.deadline.begin_step()
        self.triggers.restart()

    def _write_companions(self, models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        del models, weights
        if self.run.is_main_process:
            try:
                write_companion_files(self._trainer, Path(folder))
                if self.context.folder is not None:
                    Path(folder, IDENTITY_FILE).write_bytes(self.context.folder.identity())
            except OSError as error:
                raise UnwritableError(f"{folder} could not be written: {error.strerror or error}.") from error


def _changed_buffers(context: FitContext) -> dict[str, Any]:
    """Return the part that saves non-persistent buffers, if a model has some."""
    models = {name: context.accelerator.unwrap_model(model) for name, model in context.named_models.items()}
    if not any(non_persistent_buffers(module) for model in models.values() for module in model.modules()):
        return {}
    from trainer_lib.trainer.checkpoints.changed_buffers import ChangedBuffers

    return {_BUFFERS: ChangedBuffers(models)}


def _batch_parts(trainer: TrainerInterface) -> BatchParts:
    """Return what a rank computes of each batch.

    Raises:
        UnsupportedError: If ranks share sequences, and something else that is asked for needs whole ones.
    """
    if trainer.accelerator.sequence_split.ranks is None:
        return WholeBatches(trainer.training_step)
    from trainer_lib.trainer.losses.sequence_parts import sequence_parts

    return sequence_parts(trainer)


def _triggers(context: FitContext, clock: TrainClock, deadline: Deadline) -> Triggers:
    run, args = context.run, context.run.args
    by_set = args.eval_intervals if context.evaluation.sets else {}
    every = None if by_set else context.evaluation.interval
    intervals = {"log": args.log_interval, "evaluate": every, "save": args.save_interval}
    return Triggers(intervals, args.time_limit, run, clock, deadline, args.evaluation_delay, by_set)
