"""The training loop: read it first.

An epoch is a pass over the data, batch by batch. Some batches make a window, which is one update (a step). After each
update the run does what it was asked to, always in this order: flush, log, evaluate, interrupt, save, stop.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any

from trainer_lib.local_sgd import LocalSGD
from trainer_lib.logging import get_logger
from trainer_lib.modules.module_buffers import buffers_kept, no_gradients_of
from trainer_lib.trainer.checkpoints.overlapped_saves import OverlappedSaves
from trainer_lib.trainer.checkpoints.rewind import Rewind
from trainer_lib.trainer.data.compiled_batches import CompiledBatches
from trainer_lib.trainer.data.train_batches import TrainBatches
from trainer_lib.trainer.fit.actions import Actions
from trainer_lib.trainer.fit.context import FitContext
from trainer_lib.trainer.fit.saving import Saving
from trainer_lib.trainer.fit.train_log import TrainLog
from trainer_lib.trainer.fit.windows.pipeline_window import PipelineWindow
from trainer_lib.trainer.fit.windows.update_window import UpdateWindow
from trainer_lib.trainer.losses.batch_parts import BatchParts
from trainer_lib.trainer.optim.schedules import moves_each_update
from trainer_lib.trainer.safety.error_context import add_note
from trainer_lib.trainer.safety.gradient_check import GradientCheck
from trainer_lib.trainer.safety.micro_batching import TrainingStep
from trainer_lib.trainer.safety.nonfinite_guard import NonFiniteGuard

if TYPE_CHECKING:
    from torch.nn import Module

    from trainer_lib.accelerator.accelerator import Accelerator, AccumulationContext
    from trainer_lib.checkpointing.save.background import BackgroundSaves
    from trainer_lib.events.callback import Callback
    from trainer_lib.events.dispatcher import Dispatcher, Handler
    from trainer_lib.events.run import Run
    from trainer_lib.optimizer import AcceleratedOptimizer
    from trainer_lib.scheduler import AcceleratedScheduler
    from trainer_lib.state.accumulation_window import GradientWindow
    from trainer_lib.state.gradient_state import GradientState

_logger = get_logger(__name__)


class Update(Enum):
    """What became of an update."""

    STEP = "the optimizers stepped"
    SKIP = "no weight changed: the update was not finite, or an earlier rewind skips its samples"
    REWIND = "no weight changed, and the run goes back to its last checkpoint"


class TrainLoop:
    """Trains until a limit is reached or somebody asks for the end.

    Args:
        context: The fit.
        batches: The training batches.
        step: Computes the gradients of a micro-batch.
        guard: Decides which updates may be made.
        log: Records what a step returns.
        saving: Saves the state after an error.
        rewind: Goes back to the last checkpoint.
        actions: Handles requests.
        rounds: The rounds in which each rank trains by itself; not enabled, ranks reduce their gradients.
        parts: The parts of a batch's computation, which a pipeline calls one by one.
    """

    events: "Dispatcher"
    run: "Run"
    batches: TrainBatches
    log: TrainLog
    rewind: Rewind
    saving: Saving
    accelerator: "Accelerator"
    loader: Any
    models: "Sequence[Module]"
    guard: NonFiniteGuard
    training_step: TrainingStep
    actions: Actions
    rounds: LocalSGD
    window: UpdateWindow
    gradients: GradientCheck
    overlapped_saves: OverlappedSaves

    def __init__(
        self,
        context: FitContext,
        *,
        batches: TrainBatches,
        step: TrainingStep,
        guard: NonFiniteGuard,
        log: TrainLog,
        saving: Saving,
        rewind: Rewind,
        actions: Actions,
        rounds: LocalSGD,
        parts: BatchParts,
    ) -> None:
        self.handlers: dict[str, list[tuple[Callback, Handler]]]
        self.recount_steps: Callable[[], None] = context.recount_steps
        self.run, self.events, self.handlers = context.run, context.events, context.events.handlers
        self.batches, self.log, self.saving, self.rewind = batches, log, saving, rewind
        self.accelerator, self.loader, self.models = context.accelerator, context.loader, context.models
        self.accumulating: AccumulationContext = context.accelerator.accumulate(*context.models)
        self.accumulation: GradientWindow = context.accelerator.window
        self.gradient_state: GradientState = context.accelerator.gradient_state
        self.guard, self.training_step = guard, step
        self.optimizers: list[AcceleratedOptimizer] = list(self.run.optimizers.values())
        self.schedulers: list[AcceleratedScheduler] = [
            each for each in self.run.schedulers.values() if moves_each_update(each)
        ]
        self.window, self.actions, self.rounds = UpdateWindow(context), actions, rounds
        self.pipeline: PipelineWindow = PipelineWindow(context, parts)
        self.gradients, self.overlapped_saves = GradientCheck(context), OverlappedSaves(context)
        self.compiled: CompiledBatches = CompiledBatches(context.accelerator.state.dynamo_plugin)
        self.background_saves: BackgroundSaves = context.accelerator.checkpoints.background
        self.is_between_updates = False

    def train(self) -> None:
        """Train; after an error between two updates their state is saved, if that is wanted."""
        if self.actions.is_over:
            _logger.warning("There is nothing left to train: the run is at step %d already.", self.run.state.step)
        try:
            self.actions.run_owed()
            while not self.actions.is_over:
                step = self.run.state.step
                if self.epoch() is Update.REWIND:
                    self.rewind.skip_from(self.window.first_sample)
                elif self.run.state.step == step:
                    self.actions.stop(self.batches.used_up())
        except Exception as error:
            if self.is_between_updates:
                self.saving.save_after(error)
            raise
        finally:
            self.overlapped_saves.end()
        self.gradients.finish()

    def epoch(self) -> Update | None:
        """Train on the data once, from where it was left, until training ends or rewinds; return the last update."""
        update = None
        self.is_between_updates = True
        self.events.fire("on_epoch_begin", self.run)
        with self.batches.of_epoch() as batches:
            for batch in batches:
                self.is_between_updates = False
                update = self.micro_batch(batch)
                if update is Update.REWIND:
                    break
                if update is not None and self.finish_step(update):
                    break
        return update

    def micro_batch(self, batch: Any) -> Update | None:
        """Add the gradients of a batch to those of its window; return what became of the update it completes."""
        run, window, update = self.run, self.window, None
        run.batch = window.read(batch)
        with self.accumulating:
            is_last = self.gradient_state.sync_gradients
            if self.accumulation.micro_batches == 1:
                self.begin_window()
            if not window.is_skipped:
                if "on_micro_batch_begin" in self.handlers:
                    self.events.fire("on_micro_batch_begin", run)
                if is_last:
                    window.write_message()
                self.forward_backward()
            if is_last:
                update = Update.SKIP if window.is_skipped else self.update()
        window.count(is_last)
        return update

    def begin_window(self) -> None:
        """Begin an update, unless an earlier rewind skips its samples."""
        self.window.begin()
        if not self.window.is_skipped:
            self.guard.begin_window()
            if "on_step_begin" in self.handlers:
                self.events.fire("on_step_begin", self.run)

    def forward_backward(self) -> None:
        """Compute the gradients of the micro-batch in hand; a filler or skipped one takes part with weight 0."""
        run, control = self.run, self.run.control
        if self.pipeline.is_on:
            self.collect()
            return
        if self.window.is_filler or control.skip_batch:
            with self.without_trace():
                self.training_step(run.model, run.batch)
            control.skip_batch = False
            return
        try:
            if self.compiled.compiles:
                with self.compiled.stance(run.batch, is_last=self.loader.end_of_dataloader):
                    result = self.training_step(run.model, run.batch)
            else:
                result = self.training_step(run.model, run.batch)
        except Exception as error:
            add_note(error, f"step {run.state.step + 1}", run.batch, self.models)
            raise
        self.log.record(result)
        if "on_micro_batch_end" in self.handlers:
            self.events.fire("on_micro_batch_end", run)
        run.outputs = None  # not kept until the next step, whose activations need the memory

    def collect(self) -> None:
        """Collect the micro-batch in hand for a pipeline, which computes all of them with the last."""
        run, control = self.run, self.run.control
        self.pipeline.add(run.batch, counts=not (self.window.is_filler or control.skip_batch))
        control.skip_batch = False
        if self.gradient_state.sync_gradients:
            try:
                self.log.record(self.pipeline.compute(run.model))
            except Exception as error:
                add_note(error, f"step {run.state.step + 1}", run.batch, self.models)
                raise

    def update(self) -> Update:
        """Clip, step, schedule, zero; unless the gradients are not finite."""
        run, events, optimizers = self.run, self.events, self.optimizers
        self.window.read_message()
        has_stepped = True in [optimizer.has_stepped for optimizer in optimizers]  # in a training_step of the user
        if not self.guard.passes_to_callbacks(has_stepped):
            return self.skip()
        if "on_backward_end" in self.handlers:
            events.fire("on_backward_end", run)
        if not self.gradients.is_done:
            self.gradients.check()
            self.overlapped_saves.begin()
        if not has_stepped:
            if not self.guard.passes():
                return self.skip()
            self.step_optimizers()
        for scheduler in self.schedulers:
            scheduler.step()
        if "on_optimizer_step_end" in self.handlers:
            events.fire("on_optimizer_step_end", run)
        if self.guard.is_scaled and self.accelerator.optimizer_step_was_skipped:
            self.guard.restore_buffers()
            events.fire("on_step_skipped", run)
        for optimizer in optimizers:
            optimizer.zero_grad()
        return Update.STEP

    def step_optimizers(self) -> None:
        """Change the weights, unless this rank trains by itself and had no samples."""
        if not self.window.has_samples:
            return
        if self.background_saves.copies is not None:
            self.background_saves.finish_copies()
        if "on_optimizer_step_begin" in self.handlers:
            self.events.fire("on_optimizer_step_begin", self.run)
        for optimizer in self.optimizers:
            optimizer.step()
        if not self.overlapped_saves.has_memory:
            self.overlapped_saves.allocate()

    def skip(self) -> Update:
        """Leave no trace of an update."""
        self.guard.skip_update()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return Update.REWIND if self.guard.rewinds else Update.SKIP

    def finish_step(self, update: Update) -> bool:
        """Count an update and do what was asked for; return whether to read no further batch of this epoch."""
        run, loader = self.run, self.loader
        if self.rounds.enabled and self.rounds.count_update():
            run.control.sync_across_ranks(self.accelerator.group)
        if update is Update.SKIP:
            self.events.fire("on_step_skipped", run)
        run.state.step += 1
        run.state.steps_in_epoch += 1
        if "on_step_end" in self.handlers:
            self.events.fire("on_step_end", run)
        # After its last batch the loader is read on, to its end: a sampler may draw random numbers there.
        is_read, is_cut = loader.end_of_dataloader and not loader.others_read_on, False
        if not is_read and run.control.end_epoch and self.actions.end_epoch_on_request():
            loader.end_pass()
            is_cut = True
        if is_read or is_cut:
            self.end_epoch(is_cut)
        self.actions.ask()
        self.is_between_updates: bool = True
        return self.actions.handle() or is_cut

    def end_epoch(self, is_cut: bool) -> None:
        """Count an epoch; a callback may have cut it short."""
        run = self.run
        run.control.forget("end_epoch")
        run.state.epoch += 1
        run.state.steps_in_epoch = 0
        self.events.fire("on_epoch_end", run)
        run.control.sync_across_ranks(self.accelerator.group)
        self.log.sync_findings()
        if is_cut:
            self.recount_steps()

    @contextmanager
    def without_trace(self) -> Generator[None]:
        """Return the context in which a batch changes neither gradients nor buffers nor logged means."""
        self.run.weighs_nothing = True
        try:
            kept = buffers_kept(self.models, keeps_new_shapes=self.accelerator.use_distributed)
            with kept, no_gradients_of(self.run.trained_parameters):
                yield
        finally:
            self.run.weighs_nothing = False
