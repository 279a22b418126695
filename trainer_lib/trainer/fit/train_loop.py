"""This file is the training loop: read it first.

A pass over the data is made of batches; some batches make a window, which is one update (a step). After each update,
what was asked for is done, always in this order: log, evaluate, save, stop.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainer_lib.foundation.errors import ConfigurationError, DistributedOperationException
from trainer_lib.logging import get_logger
from trainer_lib.trainer.data.batch_rows import real_rows
from trainer_lib.trainer.fit.sample_counts import Counts
from trainer_lib.trainer.losses.loss_checks import check_result, no_gradients
from trainer_lib.trainer.losses.loss_result import LossResult
from trainer_lib.trainer.losses.unused_parameters import check_all_used
from trainer_lib.trainer.safety.error_context import add_note
from trainer_lib.trainer.safety.module_buffers import buffers_kept, no_gradients_of

if TYPE_CHECKING:
    from trainer_lib.trainer.fit.session import Fitting

_logger = get_logger(__name__)

_EVALUATIONS = ("evaluate", "evaluate_sets")  # of all sets, and of those whose intervals are over
_IN_VAIN = 10  # updates without any gradient before that is an error


class Loop:
    """Trains until a limit is reached or somebody asks for the end.

    Args:
        fitting: What is trained, with what, and where that stands.
    """

    def __init__(self, fitting: "Fitting") -> None:
        self.fitting, self.trainer, self.run, self.events = fitting, fitting.trainer, fitting.run, fitting.events
        self.loader, self.models = fitting.loader, fitting.models
        self.accelerator = self.run.accelerator
        self.window, self.gradients = self.accelerator._window, self.accelerator.gradient_state
        self.optimizers, self.schedulers = list(self.run.optimizers.values()), fitting.step_schedulers
        self.parameters = [p for one in self.optimizers for group in one.param_groups for p in group["params"]]
        self.is_alone = self.accelerator.num_processes == 1
        self.counts = Counts(fitting)
        self.guard = fitting.guard
        self.compute = fitting.splitting.step if fitting.splitting.is_on else self.trainer.training_step
        self.began = 0  # the samples before this window
        self.is_left_out = self.goes_back = False
        self.is_stopped = self.has_gradients = self.is_pass_over = False
        self.is_settled = False  # whether an update is complete, and the next one has not begun
        self.updates_in_vain = 0
        # Numbers on an accelerator are read an update later, when they are there: nothing waits for its backward.
        self.hears_late = self.accelerator.device.type != "cpu"
        self.heard: Sequence[float | Tensor] = ()

    def train(self) -> None:
        """Go over the data until training is over; the state after the last update survives an error."""
        try:
            self.go_over_data()
        except Exception as error:
            if self.is_settled:
                self.fitting.save_after(error)
            raise

    def go_over_data(self) -> None:
        """Train until a limit is reached."""
        state = self.run.state
        if self.is_over:
            _logger.warning("There is nothing left to train: the run is at step %d already.", state.step)
        self.catch_up()
        while not self.is_over:
            before = state.step
            self.one_pass()
            if self.goes_back:
                self.goes_back = False
                self.fitting.go_back(self.began)
            elif state.step == before:
                self.no_data()
        if self.updates_in_vain and not self.has_gradients:
            no_gradients(self.trainer.has_own_step)

    def catch_up(self) -> None:
        """Do what the run still owed to its last step when it was interrupted; unless it is to end again."""
        fitting, control = self.fitting, self.run.control
        if fitting.heard_of() is not None:
            control.agree("interrupt")
        if fitting.owed or (self.is_over and fitting.saved_state.get("status") == "interrupted"):
            fitting.forget_save()  # which was before that
        can = {"save": fitting.folder is not None, "stop": True}
        can |= dict.fromkeys(_EVALUATIONS, self.trainer.eval_dataset is not None)
        for name, reason in fitting.owed.items():
            if can[name]:  # with what is given now
                control.agree(name)
                control.reason = control.reason or reason
        if not control.is_empty:
            self.act()

    def one_pass(self) -> None:
        """Go over the data once, from where it was left."""
        self.is_settled, self.is_pass_over = True, False
        self.events.fire("on_epoch_begin", self.run)
        batches = iter(self.loader)  # has the workers, and is held until they were asked whether they live
        try:
            for batch in self.fitting.opened(batches):
                self.is_settled = False
                self.micro_batch(batch)
                if self.gradients.sync_gradients:
                    self.finish_step()
                    if self.goes_back or self.is_over or self.is_pass_over:
                        return
        except RuntimeError as error:
            self.loader.name_dead_workers(error)  # whose death torch raises wherever training is just then
            raise
        finally:
            del batches

    def micro_batch(self, batch: Any) -> None:
        """Add the gradients of a batch to those of its window, and update with the last one."""
        run, events, loader = self.run, self.events, self.loader
        rows, is_filler = loader.rows, False
        if rows is not None and rows.real < rows.total:  # the rest repeats samples, to make the processes even
            is_filler = rows.real == 0
            batch = real_rows(batch, rows)
        if not is_filler:
            self.counts.read(batch)
        run.batch = batch
        with self.accelerator.accumulate(*self.models):
            if self.window.size == 1:
                self.begin_window()
            if self.is_left_out:
                self.count()
                return
            events.fire("on_micro_batch_begin", run)
            if self.gradients.sync_gradients and not self.is_alone:
                is_end = float(loader.end_of_dataloader)
                self.window.notes, self.window.heard = [*run.control.send(), is_end, *self.counts.pending], ()
            if is_filler or run.control.skip_batch:
                self.run_along()
                run.control.skip_batch = False
            else:
                try:
                    result = self.compute(run.model, run.batch)
                except Exception as error:
                    add_note(error, f"step {run.state.step + 1}", run.batch, self.models)
                    raise
                self.note(result)
            if self.gradients.sync_gradients:
                self.update()
        self.count()

    def begin_window(self) -> None:
        """Begin an update, unless it is one of the samples that are left out."""
        state = self.run.state
        self.began = began = state.samples
        self.is_left_out = bool(state.left_out) and any(first <= began < end for first, end in state.left_out)
        if not self.is_left_out:
            self.guard.begin_window()
            self.events.fire("on_step_begin", self.run)

    def run_along(self) -> None:
        """Take part in an update without data of one's own: it weighs nothing and leaves no trace."""
        self.trainer.weighs_nothing = True
        try:
            with buffers_kept(self.models), no_gradients_of(self.parameters):
                self.compute(self.run.model, self.run.batch)
        finally:
            self.trainer.weighs_nothing = False

    def note(self, result: LossResult | None) -> None:
        """Keep what a step tells, until somebody asks."""
        if result is not None:
            if type(result) is not LossResult or result.weight is None:
                check_result(result)
            run, averages, weight = self.run, self.trainer.averages, result.weight
            run.loss_sum, run.weight = result.loss.detach(), weight  # type: ignore[assignment]  # it has one by now
            averages.add_sum("loss", run.loss_sum, run.weight)
            if result.logs is not None:
                for name, value in result.logs.items():
                    averages.add(name, value, run.weight)
            run.outputs = result.outputs
        self.events.fire("on_micro_batch_end", self.run)
        self.run.outputs = None  # not kept until the next step, whose activations want the memory

    def update(self) -> None:
        """Clip, step, schedule, zero."""
        run, events, optimizers = self.run, self.events, self.optimizers
        if not self.is_alone:
            self.listen()
        steps_itself = any(optimizer.has_stepped for optimizer in optimizers)  # in training_step
        if (events.listens("on_backward_end") or events.listens("on_optimizer_step_begin")) and not self.show_gradients(
            steps_itself
        ):
            self.leave_out()
            return
        events.fire("on_backward_end", run)
        if not self.has_gradients:
            self.look_for_gradients()
        if not steps_itself:
            if not self.guard.passes(self.parameters):
                self.leave_out()
                return
            events.fire("on_optimizer_step_begin", run)
            for optimizer in optimizers:
                optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()
        events.fire("on_optimizer_step_end", run)
        if self.guard.is_scaled and self.accelerator.optimizer_step_was_skipped:
            self.guard.undo_overflow()
            events.fire("on_step_skipped", run)
        for optimizer in optimizers:
            optimizer.zero_grad()

    def show_gradients(self, steps_itself: bool) -> bool:
        """Prepare gradients for callbacks, and say whether they may have them: none modifies what is not finite."""
        self.accelerator.unscale_gradients()  # who looks at gradients sees their true size
        return (
            steps_itself or not self.events.modifies("on_backward_end") or self.guard.passes_unmodified(self.parameters)
        )

    def leave_out(self) -> None:
        """Have the update be as if its samples had not been there, or go back to where they do less harm."""
        self.is_left_out, self.goes_back = True, self.guard.policy == "rewind" and self.fitting.can_go_back
        self.guard.leave_out()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def look_for_gradients(self) -> None:
        """See that what is trained gets gradients at all; a step of one's own may leave out some batches."""
        stepped = any(optimizer.has_stepped for optimizer in self.optimizers)
        self.has_gradients = stepped or any(parameter.grad is not None for parameter in self.parameters)
        if not stepped:
            check_all_used(self.models)
        self.updates_in_vain += not self.has_gradients
        if self.updates_in_vain > (_IN_VAIN if self.trainer.has_own_step else 0):
            no_gradients(self.trainer.has_own_step)

    def listen(self) -> None:
        """Take up what any process asks for, which came along with the gradients."""
        heard, control = self.window.heard, self.run.control
        if not heard:  # a step of one's own that weighs nothing, so that nothing came along
            control.unsend()
        elif (not self.hears_late or self.loader.end_of_dataloader) and 0 < heard[control.COUNT] < 1:
            self.end_apart(float(heard[control.COUNT]))
        if heard:
            self.counts.add(mean * self.accelerator.num_processes for mean in heard[control.COUNT + 1 :])
        if self.hears_late:
            heard, self.heard = self.heard, heard
        control.hear([float(number) for number in heard])

    def end_apart(self, share: float) -> None:
        """Raise where the data ends on a share of the processes only: the others would wait for them."""
        if self.loader.even_batches:
            processes = self.accelerator.num_processes
            ended = round(share * processes)
            here = "is at its end" if self.loader.end_of_dataloader else "goes on"
            raise DistributedOperationException(
                f"In step {self.run.state.step + 1} the training data of {ended} of {processes} processes is at its "
                f"end, and that of the others goes on; here, on process {self.accelerator.process_index}, it {here}. "
                "All processes have to be given the same samples, which are shared out here; a dataset that gives each "
                "its own says so by an attribute is_split_between_processes = True."
            )

    def count(self) -> None:
        """Count a micro-batch."""
        state = self.run.state
        state.micro_batches += 1
        state.samples += self.loader.samples_in_round or 0
        if self.gradients.sync_gradients and (self.is_alone or self.is_left_out):
            self.counts.gather()

    def finish_step(self) -> None:
        """Count an update, and do what was asked for."""
        run, events, loader = self.run, self.events, self.loader
        if self.goes_back:
            return
        if self.is_left_out:
            events.fire("on_step_skipped", run)
        run.state.step += 1
        run.state.steps_in_epoch += 1
        events.fire("on_step_end", run)
        self.is_pass_over = loader.end_of_dataloader and not loader.others_read_on
        if self.is_pass_over or (run.control.end_epoch and self.ends_epoch()):
            self.finish_pass()
        self.fitting.cadences.ask(run)
        if self.fitting.saves.pending is not None:
            self.fitting.saves.request_flush()
        if self.is_alone:
            run.control.agree_alone()
        self.is_settled = True
        if not run.control.is_empty or self.is_over:
            self.act()

    def ends_epoch(self) -> bool:
        """Whether all ranks know that somebody asked for the end of this epoch."""
        if self.is_alone:
            self.run.control.agree_alone()
        self.is_pass_over = self.run.control.take("end_epoch")
        if self.is_pass_over:
            self.loader.end_pass()
        return self.is_pass_over

    def finish_pass(self) -> None:
        """Count a pass."""
        state = self.run.state
        self.run.control.forget("end_epoch")
        state.epoch += 1
        state.steps_in_epoch = 0
        self.events.fire("on_epoch_end", self.run)
        self.agree()
        self.fitting.agree()

    def act(self) -> None:
        """Do what was asked for."""
        fitting, control = self.fitting, self.run.control
        if control.take("flush"):
            fitting.saves.flush()
        if control.take("log") or control.is_due("stop") or self.is_over:
            fitting.log()
        if any(map(control.is_due, _EVALUATIONS)) and not control.is_due("interrupt"):
            if fitting.evaluate_due(is_last=self.is_over or control.is_due("stop")):
                for name in _EVALUATIONS:
                    control.take(name)
                self.agree()
            else:
                control.agree("interrupt")
        if control.take("interrupt"):
            self.interrupt()
            return
        if control.take("save"):
            fitting.save()
            if fitting.heard_of() is not None:  # meanwhile: what is saved need not be saved again
                self.interrupt()
                return
        if control.take("stop"):
            self.is_stopped = True
            control.reason = control.reason or "a callback asked for it"

    def interrupt(self) -> None:
        """Save and end; what else was asked for is kept for when the run goes on, so that it does not take time now."""
        control = self.run.control
        due = [name for name in (*_EVALUATIONS, "save", "stop") if control.take(name)]
        is_before_save = not set(due).isdisjoint(_EVALUATIONS)
        owed = [name for name in due if name == "stop" or is_before_save]
        self.fitting.interrupt({name: control.reason if name == "stop" else None for name in owed})
        self.is_stopped = True

    def agree(self) -> None:
        """Have all processes know what any of them asked for, by a message of its own: where there is time for it."""
        control, group = self.run.control, self.accelerator.group
        if self.is_alone:
            control.agree_alone()
        else:
            asked = group.all_gather_objects(control.send())
            control.hear([sum(numbers) for numbers in zip(*asked, strict=True)])

    @property
    def is_over(self) -> bool:
        """Whether a limit is reached or somebody asked for the end."""
        state = self.run.state
        return (
            self.is_stopped
            or (state.max_steps is not None and state.step >= state.max_steps)
            or (state.max_epochs is not None and state.epoch >= state.max_epochs)
            or (state.max_tokens is not None and (state.tokens or 0) >= state.max_tokens)
        )

    def no_data(self) -> None:
        """End training where the data came to nothing; before the first step that is an error."""
        if not self.run.state.step:
            raise ConfigurationError(
                "The training data gave no batch. Is the dataset empty, or an iterator that was read before? With "
                "drop_last=True it has to hold a whole batch for each process."
            )
        self.run.control.reason = "the data came to an end"
        _logger.warning(
            "Pass %d over the data gave no batch: an iterator can be read once only. Training ends at step %d.",
            self.run.state.epoch + 1,
            self.run.state.step,
        )
        self.is_stopped = True
