"""One call of `fit`: what it prepares before the first step, and how it logs, evaluates, saves, resumes and ends."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer_lib.callbacks.jsonl import JsonlLog
from trainer_lib.events import Best, Run, RunState
from trainer_lib.filesystem.remote_paths import AnyPath, path_at
from trainer_lib.foundation.errors import (
    ConfigurationError,
    NonFiniteError,
    RunInUseError,
    StateError,
    UnreachableError,
    UnwritableError,
    did_you_mean,
)
from trainer_lib.foundation.lengths import length_of
from trainer_lib.foundation.metric_names import greater_is_better_for
from trainer_lib.logging import get_logger
from trainer_lib.modules.names import canonical_name
from trainer_lib.processes.exit_codes import Interruption
from trainer_lib.runs import HISTORY_FILE, IDENTITY_FILE, RunFolder
from trainer_lib.runs.run_lease import Lease
from trainer_lib.seeding import set_seed
from trainer_lib.trainer import defaults
from trainer_lib.trainer.checkpoints import resume_arguments, run_records
from trainer_lib.trainer.checkpoints.manifest_facts import manifest_facts
from trainer_lib.trainer.checkpoints.peft import PeftCheckpoints
from trainer_lib.trainer.checkpoints.resume_schedules import FreshOptimizers
from trainer_lib.trainer.checkpoints.saver import CheckpointSaver
from trainer_lib.trainer.checks import before_fit
from trainer_lib.trainer.data import rank_data_check
from trainer_lib.trainer.evaluation.eval_loop import NOTHING_MEASURED
from trainer_lib.trainer.evaluation.eval_sets import ChosenSets, metrics_over_sets, named_sets, sets_at_intervals
from trainer_lib.trainer.evaluation.interrupted_eval import EvalInterruption, EvaluationInterrupted
from trainer_lib.trainer.fit import start_banner
from trainer_lib.trainer.fit.build_accelerator import accumulation_steps
from trainer_lib.trainer.fit.context import FitContext
from trainer_lib.trainer.fit.triggers import Triggers
from trainer_lib.trainer.losses.loss_checks import check_result
from trainer_lib.trainer.losses.loss_result import LossResult
from trainer_lib.trainer.optim import optimizer_modes
from trainer_lib.trainer.optim.schedules import is_metric_driven, moves_each_update
from trainer_lib.trainer.publish.save_pretrained import write_companion_files
from trainer_lib.trainer.result import FitResult
from trainer_lib.trainer.safety.bad_samples import BadSamples
from trainer_lib.trainer.safety.deadline import AUTO, Deadline, check_ahead, deadline_in
from trainer_lib.trainer.safety.hang_watchdog import watched
from trainer_lib.trainer.safety.micro_batching import MicroBatching
from trainer_lib.trainer.safety.nonfinite_guard import NonFiniteGuard
from trainer_lib.trainer.safety.nonfinite_report import NonFiniteReport
from trainer_lib.trainer.safety.signals import Signals
from trainer_lib.trainer.trainer_interface import TrainerInterface

_logger = get_logger(__name__)

# Errors after which nothing is saved: they say that the state is not good, or cannot be saved.
_SAVED_AFTER_NONE = (NonFiniteError, StateError, RunInUseError)
_PATIENCE_AFTER_ERRORS = 5.0  # seconds that a rank with an error waits for the others to raise theirs


@dataclass(frozen=True)
class Evaluated:
    """What was evaluated at the last step at which anything was: the sets, and their metrics."""

    step: int = -1
    sets: frozenset[str] = frozenset()
    metrics: dict[str, float] = field(default_factory=dict[str, float])


class FitSession:
    """What one `fit` is made of.

    Args:
        trainer: Whose verbs make its parts.
        folder: The run's folder; `None`: nothing is written.
        signals: The signals that ask it to save and end.
        lease: The right to write into the folder; `None`: nothing is written.

    Attributes:
        interruption: What ended it early, known to all processes; `None`: nothing.
        is_cut_short: Whether an error ends it, with what is owed of the last step.
        owed: What is left to do of the last step, before the next one, as `Control` knows it; with reasons.
    """

    def __init__(
        self, trainer: TrainerInterface, folder: RunFolder | None, signals: Signals, lease: Lease | None = None
    ) -> None:
        self.signals, self.lease = signals, lease or Lease(None)
        self.interruption: Interruption | None = None
        self.owed: dict[str, str | None] = {}
        self.is_cut_short = False
        self.deadline: Deadline | None = None
        args, accelerator = trainer.args, trainer.accelerator
        self.trainer, self.folder, self.events = trainer, folder, trainer.events
        if folder is not None and not any(callback.writes_history for callback in self.events):
            skips = accelerator.mixed_precision == "fp16"
            self.events.add(JsonlLog(folder.history_file, skipped_steps=skips))
        steps = accumulation_steps(args, accelerator.num_processes)
        self._plan = next((plan for callback in self.events if (plan := callback.update_plan())), None)
        accelerator.gradient_accumulation_steps = steps if self._plan is None else self._plan.begin(steps)
        if args.seed is not None:
            set_seed(args.seed)
        loader = before_fit.train_loader(trainer)
        self.models = defaults.prepare_models(trainer).listed
        self.loader: Any = accelerator.prepare_data_loader(loader)
        self.loader.trim_repeats()
        before_fit.check_order(accelerator.group, self.loader)
        rank_data_check.check_training_data(accelerator.group, loader.dataset, self.loader)
        self._has_opened = False
        optimizers = _named("configure_optimizer", trainer.configure_optimizer())
        prepared = {name: accelerator.prepare_optimizer(optimizer) for name, optimizer in optimizers.items()}
        optimizer_modes.train(prepared.values())
        state = RunState(run_id="" if folder is None else folder.run_id, status="running")
        self._set_limits(state)
        self.schedule_length = args.schedule_steps or state.max_steps
        self.saved_state: Mapping[str, Any] = {}  # of the checkpoint that the run resumes from
        self.changed: Mapping[str, resume_arguments.Difference] = {}  # the arguments that are others than it has
        schedulers = _schedulers(trainer, optimizers, self.schedule_length)
        self.run = Run(
            trainer=trainer,
            args=args,
            state=state,
            control=signals.control,
            accelerator=accelerator,
            model=trainer.parts.models.model_or_models,
            optimizers=prepared,
            schedulers={name: accelerator.wrap_scheduler(one) for name, one in schedulers.items()},
            folder=None if folder is None else folder.here,
        )
        self.metric_schedulers = [each for each in self.run.schedulers.values() if is_metric_driven(each)]
        self.step_schedulers = [each for each in self.run.schedulers.values() if moves_each_update(each)]
        self.context = context = FitContext(
            run=self.run,
            accelerator=accelerator,
            events=self.events,
            loader=self.loader,
            named_models=trainer.parts.models.named,
            means=trainer.parts.means,
            folder=folder,
            has_own_step=trainer.parts.loss.has_own_step,
            in_sandbox=trainer.parts.in_sandbox,
        )
        self.guard = NonFiniteGuard(context, NonFiniteReport(context, self._loss_again), self._can_rewind)
        self._watching = ExitStack()
        self.bad_samples = BadSamples(context)
        self.micro_batching = MicroBatching(context, self.guard, trainer.training_step)
        accelerator.register_for_checkpointing(_Saved(self))
        accelerator.checkpoints.infinite_buffers = _infinite_buffers(trainer)
        adapters = PeftCheckpoints(accelerator)
        self._handles = [
            accelerator.register_save_state_pre_hook(self._write_beside),
            accelerator.register_save_state_pre_hook(adapters.exclude_base_weights),
            accelerator.register_load_state_pre_hook(adapters.restore_base_weights),
            accelerator.register_state_facts(lambda: manifest_facts(self.trainer, self.run, self.saves.reasons)),
        ]
        self.saves = CheckpointSaver(self)
        self._saved_at = -1
        self.evaluated = Evaluated()
        self._began = time.monotonic()
        self.triggers: Triggers

    @property
    def has_own_step(self) -> bool:
        """Whether the user overrides `training_step`."""
        return self.context.has_own_step

    @property
    def evaluates(self) -> bool:
        """Whether there is data to evaluate on."""
        return self.trainer.eval_dataset is not None

    @property
    def training_step(self) -> Callable[[Any, Any], LossResult | None]:
        """What computes the gradients of a batch: `training_step`, in parts where memory is short."""
        return self.micro_batching.step if self.micro_batching.is_on else self.trainer.training_step

    # -- before the first step -----------------------------------------------------------------------------------

    def _set_limits(self, state: RunState) -> None:
        args = self.trainer.args
        batches = length_of(self.loader)
        if batches is not None:
            if not batches:
                raise ConfigurationError(
                    f"The training data has no batch, of {_size(self.loader)} samples. A loader with drop_last=True "
                    "has to have a whole batch for each process: take smaller ones, or leave drop_last out."
                )
            state.steps_per_epoch = math.ceil(batches / self.trainer.accelerator.gradient_accumulation_steps)
        epochs = args.epoch_limit
        state.max_epochs, state.max_steps, state.max_tokens = epochs, args.max_steps, args.token_limit
        if epochs is not None and state.steps_per_epoch is not None:
            steps = math.ceil(epochs * state.steps_per_epoch - 1e-9)
            if self._plan is not None and batches is not None:
                steps = self._plan.updates(batches, epochs)
            state.max_steps = steps if args.max_steps is None else min(steps, args.max_steps)
        elif epochs is not None and epochs != int(epochs):
            raise ConfigurationError(
                f"num_train_epochs={epochs}: how long an epoch is cannot be known of this data. Give whole epochs, or "
                "max_steps."
            )

    def begin(self, checkpoint: AnyPath | None) -> None:
        """Take up a checkpoint, if there is one, and be ready for the first step."""
        run, args = self.run, self.trainer.args
        if args.seed is not None and run.accelerator.num_processes > 1:
            set_seed(args.seed, device_specific=True)  # dropout draws something else on each process
        if checkpoint is not None:
            self.load(checkpoint)
        if self.trainer.parts.evaluation.best_metric is not None:  # known before it is too late
            self._is_better(0.0, 0.0)
        run.state.status, run.state.reason = "running", None
        self._begin_counting()
        if self.folder is not None and run.is_main_process:
            self.lease.acquire()  # a new run; one that is resumed has it since it was found
            self.folder.download(HISTORY_FILE)
            self._tell_running(self.folder, is_new=checkpoint is None)
        if self.folder is not None and args.save_in_background:
            # Its connections are made now: later the store may be gone, with the launcher.
            run.accelerator.checkpoints.background.group(run.accelerator.group)
        here = None if self.folder is None else self.folder.here
        self._watching.enter_context(watched(run, args.hang_timeout_seconds, here))
        start_banner.show(self)
        self.events.fire("on_fit_begin", run)
        if told := resume_arguments.visible_changes(self.changed):
            run.record_event("arguments", changed=told)
        if args.eval_on_start and not run.state.step:
            self.evaluate()  # left early only by a run that then ends before its first step

    def _begin_counting(self) -> None:
        args = self.trainer.args
        self._begin_counting_tokens()
        by_set = {} if self.trainer.eval_dataset is None else args.eval_intervals
        every = None if by_set else self.trainer.parts.evaluation.interval
        intervals = {"log": args.log_interval, "evaluate": every, "save": args.save_interval}
        self._began = time.monotonic()
        self.deadline = self._deadline()
        self.triggers = Triggers(intervals, args.time_limit, self.run, self.deadline, args.evaluation_delay, by_set)

    def _begin_counting_tokens(self) -> None:
        state = self.run.state
        if not self.trainer.args.counts_tokens:
            state.tokens = None
        elif state.tokens is None:
            if state.step:
                _logger.warning("The checkpoint has no count of tokens: they are counted from step %d.", state.step)
            state.tokens = 0

    def _deadline(self) -> Deadline | None:
        given, accelerator = self.trainer.args.deadline, self.run.accelerator
        if given != AUTO:
            check_ahead(given)
        ends = deadline_in(given)
        if ends is None or ends <= time.time() or not self.run.is_main_process:
            return None
        # Alone it is acted upon at once; on accelerators processes hear of each other an update later.
        steps_ahead = 1 if accelerator.num_processes == 1 else 2 if accelerator.device.type == "cpu" else 3
        return Deadline(ends, self.run, steps_ahead)

    # -- when it is asked for ------------------------------------------------------------------------------------

    def log(self) -> None:
        """Log what was gathered since the last time."""
        run, state = self.run, self.run.state
        self.add_elapsed_time()
        self.guard.flush()
        self.sync_findings()
        values = self.trainer.parts.means.collect()
        state.items += self.trainer.parts.means.items
        if "loss" in self.trainer.parts.means.weightless:
            _logger.warning_once(
                "Nothing in the batches since the last log counts for the loss, so that nothing is learned from them: "
                "all labels are ignored (-100), or num_items and weight are 0."
            )
        if not values:  # nothing since the last time
            return
        if run.grad_norm is not None:
            values["grad_norm"] = float(run.grad_norm)
        self.events.fire("on_log", run, values)
        state.history.append({"step": state.step, "epoch": state.epochs, **values})

    def sync_findings(self) -> None:
        """Synchronize across ranks what each rank found out: bad samples, and how many rows fit into memory."""
        self.bad_samples.agree()
        self.micro_batching.sync_across_ranks()

    def evaluate_due(self, is_last: bool) -> bool:
        """Evaluate all sets, or those whose intervals are over; return whether that was not left before its end.

        Args:
            is_last: Whether the run ends with this step, so that all sets with intervals are due.
        """
        control = self.run.control
        if control.is_due("evaluate"):
            return self.evaluate()
        # Intervals of time go by the clock of the main process.
        (due,) = self.run.accelerator.group.broadcast_objects([sorted(control.sets_due)])
        return self.evaluate(sets_at_intervals(self.trainer) if is_last else due)

    def evaluate(self, names: Collection[str] | None = None) -> bool:
        """Evaluate, and see if it is the best so far; return whether that was not left before its end.

        Args:
            names: The sets, by name; `None`: all.
        """
        run, sets = self.run, named_sets(self.trainer, self.trainer.eval_dataset)
        run.eval_sets = {name: names is None or name in names for name in sets}
        try:
            return not any(run.eval_sets.values()) or self._evaluate(ChosenSets(sets))
        finally:
            run.eval_sets = {}

    def _evaluate(self, sets: ChosenSets) -> bool:
        run, state = self.run, self.run.state
        chosen = ChosenSets((name, data) for name, data in sets.items() if run.eval_sets[name])
        self.add_elapsed_time()
        self.guard.flush()
        run.control.leaves = self._leaving()
        began = time.monotonic()
        try:
            metrics = self.trainer.evaluate() if all(run.eval_sets.values()) else self.trainer.evaluate(chosen)
        except EvaluationInterrupted:
            return False
        finally:
            run.control.leaves = None
            self._began = time.monotonic()  # evaluation does not count as time of training
        if self.deadline is not None:
            self.deadline.end_evaluation(self._began - began)
        self._note_evaluated(chosen, metrics)
        state.history.append({"step": state.step, "epoch": state.epochs, **metrics})
        name = self.trainer.parts.evaluation.best_metric
        if name is None:
            return True
        if not metrics:
            raise ConfigurationError(f"{NOTHING_MEASURED} To train without evaluations leave eval_dataset out.")
        if run.leaves_out(name):
            return True
        if name not in metrics:
            raise ConfigurationError(
                f"metric_for_best={name!r} is no metric of this evaluation. There are: {', '.join(metrics)}."
                f"{did_you_mean(name, metrics)}"
            )
        for scheduler in self.metric_schedulers:
            scheduler.scheduler.step(metrics[name])
        if math.isfinite(metrics[name]) and (state.best is None or self._is_better(metrics[name], state.best.value)):
            state.best = Best(name, metrics[name], state.step)
            self.events.fire("on_best", run, name, metrics[name])
        return True

    def _note_evaluated(self, names: Iterable[str], metrics: Mapping[str, float]) -> None:
        run = self.run
        before = self.evaluated if self.evaluated.step == run.state.step else Evaluated()
        self.evaluated = Evaluated(run.state.step, before.sets | {*names}, {**before.metrics, **metrics})
        run.metrics = self.evaluated.metrics
        run.control.sets_due -= self.evaluated.sets

    def _evaluate_the_rest(self) -> bool:
        """Evaluate the sets with intervals that the last step did not evaluate; return whether that was not left."""
        wanted, is_same = sets_at_intervals(self.trainer), self.evaluated.step == self.run.state.step
        rest = [name for name in wanted if not (is_same and name in self.evaluated.sets)]
        # The mean over sets is computed where one evaluation takes all of them.
        return not rest or self.evaluate(wanted if metrics_over_sets(self.trainer) else rest)

    def save(self) -> None:
        """Save a checkpoint."""
        if self.folder is None and self.trainer.args.dry_run:
            return
        if self.folder is None:
            raise ConfigurationError("A checkpoint was asked for, and there is no folder for it. Give output_dir.")
        state = self.run.state
        if self._saved_at == state.step:
            return
        self.add_elapsed_time()
        self.guard.flush()
        self.sync_findings()
        self._saved_at = state.step
        metrics = dict(self.evaluated.metrics) if self.evaluated.step == state.step else {}
        self.saves.save(self.folder.checkpoint(state.step), metrics)
        self._began = time.monotonic()
        if self.deadline is not None:
            self.deadline.begin_step()

    def rewind(self, first: int) -> None:
        """Go back to the last checkpoint, and skip the samples from `first` to where the run stands."""
        self.saves.flush()
        state, good = self.run.state, self._good_checkpoints()
        if not good:
            raise NonFiniteError("There is no checkpoint with finite weights to rewind to.")
        self.add_elapsed_time()
        left_out = [*state.left_out, [first, state.samples]]
        kept = {"left_out": left_out, "skipped": state.skipped, "seconds": state.seconds}
        self.load(path_at(good[-1]["path"]))
        for name, value in kept.items():
            setattr(state, name, value)
        state.status = "running"
        self._begin_counting()

    @contextlib.contextmanager
    def batches(self) -> Generator[Iterator[Any]]:
        """Return the context of an epoch's batches, in which the death of a data worker is named.

        In the first epoch the ranks compare what a stream begins with.
        """
        batches = iter(self.loader)  # has the workers, and is held until they were asked whether they live
        try:
            if self._has_opened:
                yield batches
            else:
                self._has_opened = True
                yield rank_data_check.checked_stream(self.run.accelerator.group, self.loader, batches)
        except (RuntimeError, OSError, EOFError) as error:
            self.loader.name_dead_workers(error)  # torch raises it wherever training happens to be
            raise
        finally:
            del batches

    def record(self, result: LossResult | None) -> None:
        """Keep what a training step returned, until a log or a callback asks for it."""
        if result is None:  # the step logs for itself
            return
        if type(result) is not LossResult or result.weight is None:
            check_result(result)
        run, means, weight = self.run, self.context.means, result.weight
        run.loss_sum, run.weight = result.loss.detach(), weight  # type: ignore[assignment]  # it has one by now
        means.add_sum("loss", run.loss_sum, run.weight)
        if result.logs is not None:
            for name, value in result.logs.items():
                means.add(name, value, run.weight)
        run.outputs = result.outputs

    def out_of_data(self) -> str:
        """Return why training ends where the data has come to its end.

        Raises:
            ConfigurationError: If there was no batch at all.
        """
        state = self.run.state
        if not state.step:
            raise ConfigurationError(
                "The training data gave no batch. Is the dataset empty, or an iterator that was read before? With "
                "drop_last=True it has to hold a whole batch for each process."
            )
        _logger.warning(
            "Epoch %d gave no batch: an iterator can be read once only. Training ends at step %d.",
            state.epoch + 1,
            state.step,
        )
        return "the data came to an end"

    def best_of(self, checkpoints: Iterable[Mapping[str, Any]]) -> Best | None:
        """Return the best evaluation of those that good checkpoints were saved with; `None` without one."""
        best, name = None, self.trainer.parts.evaluation.best_metric
        if name is None:
            return None
        for entry in checkpoints:
            value = float(entry["metrics"].get(name, math.nan))
            is_good = math.isfinite(value) and not entry.get("nonfinite")
            if is_good and (best is None or self._is_better(value, best.value)):
                best = Best(name, value, entry["step"])
        return best

    def forget_save(self) -> None:
        """Let the same step be saved again."""
        self._saved_at = -1

    def load(self, checkpoint: AnyPath) -> None:
        """Load a checkpoint."""
        self.events.fire("on_load_begin", self.run, checkpoint)
        self.changed = changed = resume_arguments.changed_arguments(
            self.trainer.args, checkpoint, self.run.accelerator.group
        )
        resume_arguments.warn_of_changes(changed, checkpoint)
        fresh = FreshOptimizers(self.run)
        with resume_arguments.naming_group_arguments(changed):
            self.run.accelerator.load_state(checkpoint)
        optimizer_modes.train(self.run.optimizers.values())
        if self.folder is not None:  # another one than the checkpoint's, if that is of another run
            self.run.state.run_id = self.folder.run_id
        self.saves.find(self.folder)
        self._count_anew(fresh, changed)
        self._forget_best_of_another_metric(changed)
        self._saved_at = self.run.state.step
        self.events.fire("on_load_end", self.run, checkpoint)

    def interrupt(self, owed: dict[str, str | None]) -> None:
        """Save, and end for now.

        Args:
            owed: What this step leaves to the resumed run.
        """
        run, state = self.run, self.run.state
        self.interruption, self.owed = self.agreed_interruption(), owed
        assert self.interruption is not None
        state.status, state.reason = "interrupted", self.interruption.reason
        is_asked = run.control.take("save") or "save" in owed
        if self.folder is not None and (self.trainer.args.save_interval is not None or is_asked) and state.step:
            run.control.save_reasons.add("interruption")
            self.save()
        self.saves.flush()
        self.events.fire("on_interrupt", run)
        last = state.checkpoints[-1] if state.checkpoints else None
        _logger.warning(
            "%s: the run ends at step %d, and %s.",
            state.reason,
            state.step,
            "nothing of it is saved"
            if last is None
            else f'resume="auto" resumes it from step {last["step"]}, {last["path"]}',
        )

    def agreed_interruption(self) -> Interruption | None:
        """Return what asked any rank to save and end, by a message of its own."""
        gathered: list[Interruption | None] = self.context.group.all_gather_objects(self.run.control.interruption)
        return next((interruption for interruption in gathered if interruption is not None), None)

    def save_after(self, error: Exception) -> None:
        """Save the state after the last update, which an error did not touch; a failure of that is only warned of.

        On several ranks that takes all of them: an error on some leaves the others where they cannot save.
        """
        run, state, args = self.run, self.run.state, self.trainer.args
        is_wanted = args.on_exception == "save" and self.folder is not None and args.save_interval is not None
        if not is_wanted or isinstance(error, _SAVED_AFTER_NONE):
            return
        if not state.step or self._saved_at == state.step:
            return
        owed = ("evaluate", "evaluate_sets", "stop")
        self.owed = {name: run.control.reason for name in owed if run.control.is_due(name)}
        if not self._all_stand_here():
            error.add_note(
                f"The state after step {state.step} is not saved: within {_PATIENCE_AFTER_ERRORS:g} seconds not all "
                "ranks raised an error after that step and before the next one."
            )
            return
        self.is_cut_short, state.status = True, "running"
        run.control.save_reasons.add("exception")
        try:
            self.save()
            self.saves.flush()
        except Exception as failure:  # noqa: BLE001 - the first error is the one to be told
            _logger.warning("After an error the state of step %d could not be saved: %s", state.step, failure)
            return
        if self.saves.failure is None:
            path = state.checkpoints[-1]["path"]
            error.add_note(f'The state after step {state.step} is saved in {path}; resume="auto" resumes it.')

    def _all_stand_here(self) -> bool:
        """Whether an error left all ranks after the same update, with the same left to do."""
        state = self.run.state
        place = json.dumps([state.step, state.samples, state.status, sorted(self.evaluated.sets), self.owed])
        name = f"after_error/{state.run_id}/{state.step}"
        return self.run.accelerator.group.meet(name, place, _PATIENCE_AFTER_ERRORS)

    def finish(self) -> None:
        """Do what the last step leaves to do: log, evaluate, save; its state survives an error meanwhile."""
        try:
            self._finish()
        except Exception as error:
            self.save_after(error)
            raise

    def _finish(self) -> None:
        run, state, trainer = self.run, self.run.state, self.trainer
        self.log()
        run.control.sync_across_ranks(self.context.group)  # requests of the last step, which no gradients took along
        reason = run.control.reason
        if trainer.parts.evaluation.interval is not None and not self._evaluate_the_rest():
            self.forget_save()  # which does not know what asked for the end
            self.interrupt({"stop": reason} if reason else {})
            return
        state.status, state.reason = ("stopped" if reason else "finished"), reason
        is_best = trainer.args.keep_best > 0 and state.best is not None and state.best.step == state.step
        is_asked = run.control.take("save")
        saves_the_end = self.folder is not None and (trainer.args.save_interval is not None or is_best or is_asked)
        if saves_the_end:
            self.save()
        self.saves.flush()
        if saves_the_end and self.saves.failure is not None:
            state.status = "unsaved"
        if trainer.args.load_best_at_end and state.best is not None:
            self._load_best()
        # Nothing is left undone; but whoever sent a signal gets its exit code.
        self.interruption = self.agreed_interruption()

    def close(self, status: Any) -> None:
        """Write down how it ended, however that was, and let the callbacks know."""
        run = self.run
        self.release()
        self.add_elapsed_time()
        self.bad_samples.tell()
        run.state.status = status
        run.batch = run.outputs = run.loss_sum = None
        self.saves.close()
        if status != "failed":
            optimizer_modes.evaluate(run.optimizers.values())
        try:
            self.events.fire("on_fit_end", run)
        finally:
            if self.folder is not None and run.is_main_process and self.lease.loss() is None:
                try:
                    self.folder.write(status=status, state=run.state.state_dict(), metrics=dict(run.metrics))
                    run_records.write_report(self.folder)
                except (OSError, UnreachableError) as error:  # what was trained is there all the same
                    _logger.warning("How the run ended could not be written to %s: %s.", self.folder.path, error)
                self.upload_logs()

    def release(self) -> None:
        """Take back what was registered with the engine, and stop the watchdog."""
        self._watching.close()
        for handle in self._handles:
            handle.remove()

    def leave_together(self) -> None:
        """Wait for the others: who ends first may be taken for one that failed, and the others be ended for it."""
        with contextlib.suppress(RuntimeError):  # one of them is gone already
            self.run.accelerator.group.barrier()

    def upload_logs(self) -> None:
        """Bring what was logged to where the run is, if that is not this machine."""
        if self.folder is not None and self.run.is_main_process:
            self.folder.upload()

    def result(self) -> FitResult:
        """Return what became of the run."""
        report = None if self.folder is None else run_records.report_of(self.folder)
        return FitResult.of({"state": self.run.state.state_dict(), "metrics": self.run.metrics, "report": report})

    def add_elapsed_time(self) -> None:
        """Count the time of training so far."""
        now = time.monotonic()
        self.run.state.seconds += now - self._began
        self._began = now

    # -- private -------------------------------------------------------------------------------------------------

    def _can_rewind(self) -> bool:
        return bool(self._good_checkpoints()) or self.saves.pending is not None

    def _loss_again(self) -> LossResult:
        """Compute the loss of the last batch once more, to report where NaN or Inf comes from."""
        trainer, run = self.trainer, self.run
        return trainer.parts.loss.as_result(trainer.compute_loss(run.model, run.batch), run.batch)

    def _good_checkpoints(self) -> list[dict[str, Any]]:
        return [entry for entry in self.run.state.checkpoints if not entry.get("nonfinite")]

    def _leaving(self) -> EvalInterruption:
        accelerator = self.run.accelerator
        return EvalInterruption(
            self.run.control,
            accelerator.group,
            accelerator.device,
            in_lockstep=accelerator.strategy.is_in_lockstep,
            look=None if self.deadline is None else self.deadline.look,
        )

    def _count_anew(self, fresh: FreshOptimizers, changed: Collection[str]) -> None:
        """Count in the updates of now, if they are of another size than those of the checkpoint."""
        state, saved, args = self.run.state, self.saved_state, self.trainer.args
        moved, length = 0, state.steps_per_epoch
        if length is not None:
            left = math.ceil(self.loader.batches_left / self.trainer.accelerator.gradient_accumulation_steps)
            state.steps_in_epoch = length - left
            behind = state.epoch * length + state.steps_in_epoch
            if state.max_epochs is not None:
                of_epochs = state.step + math.ceil(state.max_epochs * length - 1e-9) - behind
                is_longest = args.max_steps is None or of_epochs < args.max_steps
                state.max_steps = of_epochs if is_longest else args.max_steps
                if is_longest and args.schedule_steps is None and saved["steps_per_epoch"]:
                    # A schedule of epochs stays where it is in the samples, which are more or fewer updates now.
                    moved = behind - (saved["epoch"] * saved["steps_per_epoch"] + saved["steps_in_epoch"])
        fresh.apply(changed, moved, length != saved["steps_per_epoch"])

    def _forget_best_of_another_metric(self, changed: Collection[str]) -> None:
        state, metric = self.run.state, self.trainer.parts.evaluation.best_metric
        if state.best is None or metric is None:
            return
        if state.best.metric != metric or "greater_is_better" in changed:
            _logger.warning(
                "The best evaluation so far, of step %d, was chosen by %s. From now on the best is chosen by %s.",
                state.best.step,
                state.best.metric,
                metric,
            )
            state.best = None

    def _is_better(self, value: float, than: float) -> bool:
        args, name = self.trainer.args, self.trainer.parts.evaluation.best_metric
        return value > than if greater_is_better_for(name or "", args.greater_is_better) else value < than

    def _tell_running(self, folder: RunFolder, is_new: bool) -> None:
        try:
            folder.write(status="running", **run_records.describe_run(self.trainer.args))
        except OSError as error:
            if is_new:  # nobody would find it
                raise UnwritableError(f"{folder.path} could not be written: {error.strerror or error}.") from error
            _logger.warning('The status "running" could not be written to %s: %s.', folder.path, error)

    def _write_beside(self, models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        del models, weights
        if self.run.is_main_process:
            try:
                write_companion_files(self.trainer, Path(folder))
                if self.folder is not None:
                    Path(folder, IDENTITY_FILE).write_bytes(self.folder.identity())
            except OSError as error:
                raise UnwritableError(f"{folder} could not be written: {error.strerror or error}.") from error

    def _load_best(self) -> None:
        best = self.result().best_checkpoint
        if best is None and self.trainer.args.keep_best == 0:
            raise ConfigurationError("load_best_at_end=True: the best evaluation was not saved. Leave keep_best at 1.")
        if best is None:
            found = self.run.state.best
            assert found is not None
            if found.step != self.run.state.step:  # else these are its weights
                _logger.warning(
                    "load_best_at_end=True: the checkpoint of the best evaluation, of step %d, could not be written. "
                    "The weights are those of the last step.",
                    found.step,
                )
            return
        state = self.run.state.state_dict()
        self.run.accelerator.load_state(best)
        self.run.state.load_state_dict(state)


class _Saved:
    """What of a run survives a restart besides what the engine saves: the run's state and that of its callbacks."""

    def __init__(self, session: FitSession) -> None:
        self._session = session

    def state_dict(self) -> dict[str, Any]:
        """Return the states."""
        session = self._session
        owed = session.owed if session.interruption is not None or session.is_cut_short else {}
        return {
            "run": session.run.state.state_dict(),
            "callbacks": session.events.state_dict(),
            "averages": session.trainer.parts.means.state_dict(),
            "guard": session.guard.state_dict(),
            "bad_samples": session.bad_samples.state_dict(),
            "splitting": session.micro_batching.state_dict(),
            "owed": owed,
            "evaluated": {**vars(session.evaluated), "sets": sorted(session.evaluated.sets)},
            "sets_due": sorted(session.run.control.sets_due) if "evaluate_sets" in owed else [],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them up."""
        self._session.saved_state = state["run"]
        self._session.run.state.load_state_dict(state["run"])
        self._session.events.load_state_dict(state["callbacks"])
        self._session.trainer.parts.means.load_state_dict(state["averages"])
        self._session.owed = dict(state.get("owed", {}))
        self._session.run.control.sets_due.update(state.get("sets_due", ()))
        if "evaluated" in state:
            step, sets, metrics = (state["evaluated"][name] for name in ("step", "sets", "metrics"))
            self._session.evaluated = Evaluated(step, frozenset(sets), dict(metrics))
            self._session.run.metrics = self._session.evaluated.metrics
        self._session.guard.load_state_dict(state.get("guard", {}))  # which older ones do not have
        self._session.bad_samples.load_state_dict(state.get("bad_samples", {}))
        self._session.micro_batching.load_state_dict(state.get("splitting", {}))


def _infinite_buffers(trainer: TrainerInterface) -> frozenset[str]:
    """Return the buffers that a model begins with infinities in, such as masks of attention."""
    buffers = [
        pair
        for model in trainer.parts.models.listed
        for pair in trainer.accelerator.unwrap_model(model).named_buffers()
    ]
    floats = [(name, buffer) for name, buffer in buffers if buffer.is_floating_point() and not buffer.is_meta]
    return frozenset(canonical_name(name) for name, buffer in floats if bool(torch.isinf(buffer).any()))


def _schedulers(
    trainer: TrainerInterface, optimizers: Mapping[str, Optimizer], total_steps: int | None
) -> dict[str, Any]:
    """Return the schedules, by the names of their optimizers."""
    before_fit.check_schedule_names(trainer.scheduler, optimizers)
    schedules = {
        name: trainer.configure_scheduler(optimizer, total_steps, name) for name, optimizer in optimizers.items()
    }
    return {
        name: before_fit.checked_schedule(schedule, optimizers[name])
        for name, schedule in schedules.items()
        if schedule is not None
    }


def _named(verb: str, value: Any) -> dict[str, Any]:
    named = dict(value) if isinstance(value, Mapping) else {"default": value}
    if not named:
        raise ConfigurationError(f"{verb} returned no optimizer. Return one, or a dict of them by name.")
    before_fit.check_optimizers(named)
    return named


def _size(loader: Any) -> Any:
    length = length_of(loader.dataset)
    return "an unknown number of" if length is None else length
