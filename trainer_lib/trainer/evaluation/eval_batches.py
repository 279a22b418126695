"""The batches of an evaluation: without repeated samples, and split where memory is short."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from trainer_lib.data_loader.prepared_loader import PreparedLoader
from trainer_lib.events import Dispatcher, Run
from trainer_lib.foundation.errors import ConfigurationError, NoExecutableBatchSizeError
from trainer_lib.memory.executable_batch_size import free_memory_of, is_out_of_memory
from trainer_lib.trainer.data.batch_rows import check_splits, count_rows, real_rows, take_rows
from trainer_lib.trainer.data.compiled_batches import CompiledBatches
from trainer_lib.trainer.evaluation.outputs import EvaluationOutput
from trainer_lib.trainer.safety.error_context import add_note

_SMALLER = "Give a smaller per_device_eval_batch_size, or a smaller model."

Step = Callable[[Any, Any], EvaluationOutput]


class EvalBatches:
    """Runs the evaluation step on the batches of evaluation sets.

    Args:
        dispatcher: The callbacks.
        step: Returns an `EvaluationOutput` for a model and a batch.
        step_of_loss: Returns one without predictions.
        in_lockstep: Whether all ranks must make the same number of steps.
        compiled: How a compiled model runs a batch.
    """

    def __init__(
        self, dispatcher: Dispatcher, step: Step, step_of_loss: Step, in_lockstep: bool, compiled: CompiledBatches
    ) -> None:
        self._dispatcher, self._in_lockstep, self._compiled = dispatcher, in_lockstep, compiled
        self._whole_step, self._step_of_loss = step, step_of_loss
        self.is_interrupted = False  # whether the last set was left before its end
        self._current: tuple[Any, PreparedLoader | None] = None, None  # the current batch, and what reads it
        self._fits: int | None = None  # the rows that fit into memory at once; None: all batches fit so far

    def outputs(
        self,
        run: Run,
        model: Any,
        loader: PreparedLoader,
        limit: int | None,
        event: str,
        set_label: str,
        needs_predictions: bool = True,
    ) -> Iterator[list[EvaluationOutput]]:
        """Yield the step's outputs of each batch: one, or several parts if the batch did not fit into memory.

        Errors of the step name the batch, and the set by `set_label`.
        """
        begin, end = f"{event}_batch_begin", f"{event}_batch_end"
        begins, ends = self._dispatcher.listens(begin), self._dispatcher.listens(end)
        # A compiled model would compile once more for outputs that nobody sees.
        is_seen = needs_predictions or end in self._dispatcher.outputs_readers or self._compiled.compiles
        step = self._whole_step if is_seen else self._step_of_loss  # a callback may evaluate in between
        models = [model] if isinstance(model, nn.Module) else list(model.values())
        for number, batch in enumerate(self._real(step, run, model, loader, limit), 1):
            run.batch = batch
            if begins:
                self._dispatcher.fire(begin, run)
            try:
                if self._compiled.compiles:
                    with self._compiled.stance(run.batch, is_last=loader.end_of_dataloader):
                        parts = self._parts(step, run, model, run.batch)
                else:
                    parts = self._parts(step, run, model, run.batch)
            except Exception as error:
                add_note(error, f"batch {number} of {set_label}", run.batch, models, _SMALLER)
                raise
            if ends:
                _publish(run, parts)
                self._dispatcher.fire(end, run)
            yield parts
            run.outputs = None
            parts.clear()  # the next batch needs its memory

    def _real(self, step: Step, run: Run, model: Any, loader: PreparedLoader, limit: int | None) -> Iterator[Any]:
        """Yield this rank's batches without repeated samples, until the run is asked to end."""
        loader.rewind()
        run.eval_loader = loader
        self.is_interrupted, leaves = False, run.control.leaves
        with loader.generators_kept(), _without_repeats(loader, self._in_lockstep):
            for number, batch in enumerate(loader, 1):
                if leaves is not None and leaves():
                    self.is_interrupted: bool = True
                    break
                rows = loader.rows
                if rows is None or rows.real == rows.total:
                    self._current = batch, loader
                    yield batch
                elif rows.real:
                    self._current = real_rows(batch, rows), loader
                    yield self._current[0]
                elif self._in_lockstep:
                    # The other ranks need this one for their forward. Its own output is dropped.
                    step(model, real_rows(batch, rows))
                if number == limit:
                    break

    def _parts(self, step: Step, run: Run, model: Any, batch: Any) -> list[EvaluationOutput]:
        if self._fits is not None and (count_rows(batch) or 0) > self._fits:
            return self._split(step, run, model, batch)
        try:
            return [_checked(step(model, batch))]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._fits = self._half(batch, error)
            free_memory_of(error)
        self._dispatcher.fire("on_batch_size_reduced", run, self._fits)
        return self._split(step, run, model, batch)

    def _split(self, step: Step, run: Run, model: Any, batch: Any) -> list[EvaluationOutput]:
        self._check_splits()
        rows, at_once = count_rows(batch) or 1, self._fits or 1
        cuts = range(0, rows, at_once)
        return [
            p for cut in cuts for p in self._parts(step, run, model, take_rows(batch, cut, min(cut + at_once, rows)))
        ]

    def _half(self, batch: Any, error: BaseException) -> int:
        """Return how many rows to try next, or raise if the batch cannot be split."""
        rows = count_rows(batch)
        if self._in_lockstep:
            raise NoExecutableBatchSizeError(
                f"Evaluation ran out of memory with a batch of {rows} rows. The batches of a sharded model cannot be "
                "split, as all ranks compute together. Give a smaller per_device_eval_batch_size."
            ) from error
        if rows is None or rows < 2:
            raise error
        self._check_splits()
        return -(-rows // 2)

    def _check_splits(self) -> None:
        batch, loader = self._current
        check_splits(batch, None if loader is None else loader.samples_in_batch)


@contextmanager
def _without_repeats(loader: PreparedLoader, in_lockstep: bool) -> Generator[None]:
    """Return a context in which a loader repeats no samples, unless all ranks need the same number of batches."""
    before = loader.even_batches
    if in_lockstep and not before:
        raise ConfigurationError(
            "The ranks of a sharded model need the same number of batches, but this loader was prepared with "
            "even_batches=False. Leave it out: repeated samples are not counted."
        )
    loader.even_batches = in_lockstep
    try:
        yield
    finally:
        loader.even_batches = before


def _publish(run: Run, parts: Sequence[EvaluationOutput]) -> None:
    """Set the run's attributes for callbacks; the outputs only if the batch was not split."""
    run.outputs = parts[0].predictions if len(parts) == 1 else None
    losses = [part.loss_sum for part in parts if part.loss_sum is not None]
    run.loss_sum = sum(losses[1:], start=losses[0]) if losses else None
    run.weight = sum((part.weight for part in parts[1:]), start=parts[0].weight)


def _checked(output: Any) -> EvaluationOutput:
    if not isinstance(output, EvaluationOutput):
        raise ConfigurationError(
            f"evaluation_step returned a {type(output).__name__}. Return an EvaluationOutput(loss_sum, weight, "
            "predictions, labels)."
        )
    return output
