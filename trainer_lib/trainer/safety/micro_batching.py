"""Batches that do not fit into memory, computed in parts, so that the update is that of the whole batch.

Ranks send nothing while they compute a window, so one that runs out of memory can restart its window while the others
wait where gradients are reduced.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

from trainer_lib.checkpointing.format.rng_state import Generators
from trainer_lib.foundation.errors import ConfigurationError, NoExecutableBatchSizeError, UnsupportedError
from trainer_lib.foundation.tensors.kept_state import attributes_kept
from trainer_lib.logging import get_logger
from trainer_lib.memory.executable_batch_size import free_memory_of, is_out_of_memory
from trainer_lib.modules.module_buffers import Buffers
from trainer_lib.trainer.arguments.value_checks import AUTO
from trainer_lib.trainer.data.batch_rows import check_splits, count_rows, take_rows
from trainer_lib.trainer.fit.context import FitContext
from trainer_lib.trainer.losses.loss_result import LossResult
from trainer_lib.trainer.safety.nonfinite_guard import NonFiniteGuard

_logger = get_logger(__name__)

TrainingStep = Callable[[Any, Any], LossResult | None]


class _Taken(NamedTuple):
    """A batch of a window."""

    batch: Any
    weighs_nothing: bool  # it is a filler batch: this rank only takes part in collectives
    samples: int | None  # None: unknown


class MicroBatching:
    """Computes the batches of a window, in parts where they do not fit.

    Args:
        context: What is trained.
        guard: The guard of the updates.
        training_step: Computes the gradients of a batch.

    Attributes:
        is_on: Whether `per_device_train_batch_size="auto"` asks for it.
        size: How many rows fit, as far as is known; `None`: all did so far.
    """

    def __init__(self, context: FitContext, guard: NonFiniteGuard, training_step: TrainingStep) -> None:
        self._context, self._guard, self._training_step = context, guard, training_step
        run = context.run
        self._accelerator, self._events = context.accelerator, context.events
        self._strategy, self._window = run.accelerator.strategy, run.accelerator.window
        self._is_local = self._window.is_local  # outside of a step
        self.is_on: bool = run.args.per_device_train_batch_size == AUTO
        self.size: int | None = None
        self._generators = Generators(run.accelerator.device)
        self._buffers = Buffers(context.models)
        self._batches: list[_Taken] = []  # of this window
        self._drawn: dict[str, Any] = {}
        self._mark: Any = None
        self._is_fresh = True
        self._at_once = 0  # the rows that are being computed
        if self.is_on:
            self._check()

    def step(self, model: Any, batch: Any) -> LossResult:
        """Do what `training_step` does, in parts if need be; with the last batch of a window put it together."""
        if self._window.micro_batches == 1:
            self._begin()
        taken = _Taken(batch, self._context.run.weighs_nothing, self._context.loader.samples_in_batch)
        self._batches.append(taken)
        self._window.is_local = True  # parts send nothing to the other ranks
        try:
            result = self._computed(model, taken)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            result = self._restarted(model, error)
        finally:
            self._window.is_local = self._is_local
        if self._accelerator.sync_gradients:
            self._batches.clear()
            if not self._is_local:
                self._put_together()
        return result

    def sync_across_ranks(self) -> None:
        """Have all ranks compute as many rows at once as fit on each of them. All of them have to call it."""
        if self.is_on:
            sizes: list[int | None] = self._accelerator.group.all_gather_objects(self.size)
            self.size = min((size for size in sizes if size is not None), default=None)

    def state_dict(self) -> dict[str, Any]:
        """Return how many rows fit."""
        return {"size": self.size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it up."""
        self.size = state.get("size")

    # -- a window ------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._strategy.begin_local_backwards(self._context.models)
        self._batches.clear()
        self._drawn = self._generators.state_dict()
        self._mark = self._context.means.mark()
        self._buffers.copy()
        self._is_fresh = self._window.is_fresh

    def _computed(self, model: Any, taken: "_Taken") -> LossResult:
        batch = taken.batch
        rows, size = count_rows(batch), self.size
        with ExitStack() as local, attributes_kept([self._context.run], ["batch"]):
            for module in self._context.models:
                local.enter_context(self._strategy.no_sync(module))
            if size is None or rows is None or rows <= size:
                self._at_once = rows or 1
                return self._step(model, batch)
            check_splits(batch, taken.samples)
            self._at_once = size
            cuts = range(0, rows, size)
            return self._summed([self._step(model, take_rows(batch, at, min(at + size, rows), rows)) for at in cuts])

    def _step(self, model: Any, batch: Any) -> LossResult:
        self._context.run.batch = batch  # callbacks compare it with the outputs
        result = self._training_step(model, batch)
        self._window.is_fresh = False
        assert result is not None  # since no subclass has a step of its own
        return result

    def _summed(self, parts: list[LossResult]) -> LossResult:
        averages, totals = self._context.means, [part.loss.detach() for part in parts]
        weights: list[Any] = [0.0 if part.weight is None else part.weight for part in parts]
        if not self._context.run.weighs_nothing:
            for part, weight in zip(parts, weights, strict=True):
                averages.add_all(part.logs, weight)
        return LossResult(sum(totals[1:], start=totals[0]), sum(weights[1:], start=weights[0]))

    def _put_together(self) -> None:
        share, message = self._window.only_share(), self._window.message
        assert message is not None
        share.total, *means = self._strategy.end_local_backwards(
            self._context.models, [share.local, *message.to_floats()]
        )
        message.receive(means)

    # -- out of memory -------------------------------------------------------------------------------------

    def _restarted(self, model: Any, error: Exception) -> LossResult:
        """Restart the window, in smaller parts, from the state before it."""
        while True:
            self._reduce(error)
            free_memory_of(error)
            try:
                if self._batches[-1].weighs_nothing:  # it adds nothing to the window
                    return self._computed(model, self._batches[-1])
                self._undo()
                return self._again(model)
            except (RuntimeError, MemoryError) as failure:
                if not is_out_of_memory(failure):
                    raise
                error = failure

    def _again(self, model: Any) -> LossResult:
        *earlier, last = self._batches
        for taken in earlier:
            if not taken.weighs_nothing:
                result = self._computed(model, taken)
                self._context.means.add_sum("loss", result.loss.detach(), result.weight or 0.0)
                self._context.means.add_all(result.logs, result.weight or 0.0)
        return self._computed(model, last)

    def _undo(self) -> None:
        run = self._context.run
        for optimizer in run.optimizers.values():
            optimizer.restart_window()
        for model in self._context.models:
            model.zero_grad()  # parameters without an optimizer have gradients too
        self._context.means.go_back(self._mark)
        self._mark = self._context.means.mark()
        self._generators.load_state_dict(self._drawn)
        self._buffers.restore()
        self._guard.begin_window()  # it copies the buffers
        self._window.is_fresh = self._is_fresh

    def _reduce(self, error: Exception) -> None:
        run, tried = self._context.run, self._at_once
        step = run.state.step + 1
        if tried < 2:
            raise NoExecutableBatchSizeError(
                f"In step {step} a single sample did not fit into memory, and there is nothing left to split. Take "
                "shorter or smaller samples, gradient_checkpointing=True, mixed_precision, or several processes with "
                "fsdp=True."
            ) from error
        check_splits(self._batches[-1].batch, self._batches[-1].samples)
        of_round: int | None = self._context.loader.total_batch_size
        size = self.size or (of_round or 0) // self._accelerator.data_group.size or tried
        while size >= tried:
            size = -(-size // 2)
        self.size = size
        if not self._context.in_sandbox:
            _logger.warning(
                "In step %d, a batch of %d samples did not fit into memory of process %d. From now on, batches are "
                "computed in parts of %d; the updates stay those of whole batches.",
                step,
                tried,
                self._accelerator.process_index,
                size,
                main_process_only=False,
            )
        self._events.fire("on_batch_size_reduced", run, size)

    # -- what cannot be split ------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._context.has_own_step:
            raise ConfigurationError(
                'per_device_train_batch_size="auto" computes a batch in several parts, so your training_step would run '
                "once for each part. Override compute_loss instead, or give a number."
            )
        if self._strategy.is_in_lockstep:
            raise UnsupportedError(
                'per_device_train_batch_size="auto" lets each process split its own batches, and the processes of a '
                "sharded model must compute together. Give a number."
            )
        if not self._is_local:
            self._strategy.check_local_backwards()
