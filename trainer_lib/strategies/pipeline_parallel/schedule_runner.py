"""Pipeline schedules (1F1B and others): the micro-batches of a window, computed so that stages overlap."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from trainer_lib.options.parallel.pipeline_options import scheduled
from trainer_lib.strategies.base import Surroundings, no_surroundings
from trainer_lib.strategies.pipeline_parallel.model_stages import Activations
from trainer_lib.strategies.pipeline_parallel.pipelined_model import PipelinedModel, Specs, StagePass, drawn_seed
from trainer_lib.strategies.pipeline_parallel.stage_exchange import TensorSpec

_FROM_LAST = "LoopedBFS"  # the schedule that computes the gradients of the last micro-batch first
_KEPT = 4  # schedules, with the buffers of their messages

Compute = Callable[[int], Tensor]


class _Layout(NamedTuple):
    """What a stage receives and passes on for micro-batches of one shape, by stage, and whether a schedule takes it."""

    received: dict[int, Specs]
    passed_on: dict[int, Specs]
    fits: bool


class ScheduleRunner:
    """Computes the gradients of windows.

    One micro-batch of new shapes runs by itself, through one stage after the other: it shows what stages pass on. It is
    the one whose gradients the schedule adds first. So each window adds gradients in the same order, also the first one
    of a resumed run, which does not know the shapes yet.

    Args:
        model: The model.
        schedule: The schedule; `None`: micro-batches run one after the other.
    """

    def __init__(self, model: PipelinedModel, schedule: str | None) -> None:
        self._model, self._schedule = model, schedule
        self._layouts: dict[Hashable, _Layout] = {}
        self._built: dict[Hashable, Any] = {}
        self._compute: Compute | None = None
        self._around: Surroundings = no_surroundings
        self._seeds: list[int] = []
        self._offset = 0

    def run(self, compute: Compute, shapes: Sequence[Hashable], around: Surroundings) -> None:
        """Compute the gradients of a window.

        Args:
            compute: Returns the loss of a micro-batch; it calls the model once. Only the last stage gets to its end.
            shapes: What decides the shapes of activations, for each micro-batch.
            around: Returns the context in which forward and backward of a micro-batch run.
        """
        self._compute, self._seeds, self._around = compute, [drawn_seed() for _ in shapes], around
        try:
            self._model.around_backward(lambda: self._run(shapes))
        finally:
            self._compute, self._around = None, no_surroundings

    def parameters_of(self, stage: int) -> Iterator[nn.Parameter]:
        """Yield the parameters of a stage of this rank."""
        return self._model.gates.parameters_of(self._model.module, stage)

    def stage_forward(self, stage: int, index: int, received: Activations) -> Tensor | Activations:
        """Return what a stage passes on for a micro-batch: activations, or the loss."""
        compute = self._compute
        assert compute is not None
        index += self._offset
        with self._around(index):
            return self._model.in_window(stage, received, self._seeds[index], lambda: compute(index))

    def _run(self, shapes: Sequence[Hashable]) -> None:
        begin = 0
        for shape, group in groupby(shapes):
            end = begin + len(list(group))
            self._run_equal(shape, begin, end)
            begin = end

    def _run_equal(self, shape: Hashable, begin: int, end: int) -> None:
        """Run micro-batches of one shape."""
        from_last = self._schedule == _FROM_LAST
        while begin < end:
            name, fitting = self._scheduled(end - begin)
            layout = self._layouts.get(shape)
            if layout is not None and layout.fits and fitting and (fitting == end - begin or not from_last):
                self._run_schedule(name, fitting, shape, begin)
                begin += fitting
            elif from_last:
                end -= 1
                self._run_alone(shape, end)
            else:
                self._run_alone(shape, begin)
                begin += 1

    def _scheduled(self, count: int) -> tuple[str, int]:
        """Return the schedule for up to `count` micro-batches, and how many of them it takes."""
        return ("", 0) if self._schedule is None else scheduled(self._schedule, count, self._model.exchange.size)

    def _run_alone(self, shape: Hashable, index: int) -> None:
        """Run one micro-batch through one stage after the other."""
        compute, self._offset = self._compute, index
        if shape not in self._layouts and self._model.gates.traces and compute is not None:
            with self._around(index):
                self._model.prepare_window(lambda: compute(index))
        stage_pass = StagePass(self._model, lambda stage, received: self.stage_forward(stage, 0, received))
        loss = stage_pass.forward()
        if shape not in self._layouts:
            received, passed_on = stage_pass.specs()
            fits = all(any(spec.has_gradient for spec in specs) for specs in passed_on.values())
            everywhere = all(self._model.exchange.gather_objects(fits))
            self._layouts[shape] = _Layout(received, passed_on, everywhere)
        stage_pass.keep(loss)
        with self._around(index):
            stage_pass.backward_of_stages([None if loss is None else torch.ones_like(loss)])

    def _run_schedule(self, name: str, count: int, shape: Hashable, begin: int) -> None:
        self._offset = begin
        key = (name, count, shape)
        schedule = self._built.pop(key, None) or self._build(name, count, self._layouts[shape])
        self._built[key] = schedule
        while len(self._built) > _KEPT:
            self._built.pop(next(iter(self._built)))
        index, last = torch.arange(count), {}
        if self._model.is_last:
            last = {"target": index}
        try:
            schedule.step(index=index, return_outputs=False, **last)
        except RuntimeError as error:
            cause: Any = error.__cause__  # torch says which stage failed, and prints all tensors
            raise cause if cause is not None else error from None

    def _build(self, name: str, count: int, layout: _Layout) -> Any:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        model, exchange = self._model, self._model.exchange
        loss = (TensorSpec((), torch.float32, True),)
        stages = [
            PipelineStage(
                _StageModule(self, stage),
                stage,
                model.gates.num_stages,
                exchange.device,
                input_args=_examples(layout.received.get(stage, ())),
                output_args=_examples(layout.passed_on.get(stage, loss)),
                group=exchange.group,
            )
            for stage in model.stages
        ]
        for stage in stages:
            for backward in (stage.backward_one_chunk, stage.backward_weight_one_chunk):
                setattr(stage, backward.__name__, self._surrounded(backward))
        schedule = cast(Callable[..., Any], get_schedule_class(name))
        held = stages[0] if len(stages) == 1 and name in ("GPipe", "1F1B") else stages
        return schedule(held, n_microbatches=count, loss_fn=_loss, scale_grads=False)

    def _surrounded(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the backward of a micro-batch of a schedule, in the context of the micro-batch."""

        def surrounded(index: int, *args: Any, **kwargs: Any) -> Any:
            with self._around(self._offset + index):
                return backward(index, *args, **kwargs)

        return surrounded


class _StageModule(nn.Module):
    """A stage, as torch's schedules call it."""

    def __init__(self, runner: ScheduleRunner, stage: int) -> None:
        super().__init__()
        self._runner, self._stage = runner, stage

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters of the stage, which are not registered: torch would drop the gradients of FSDP's."""
        del recurse
        return self._runner.parameters_of(self._stage)

    def forward(self, *received: Tensor, index: Tensor) -> Tensor | Activations:
        """Run the stage on a micro-batch."""
        outputs = self._runner.stage_forward(self._stage, int(index), received)
        if isinstance(outputs, Tensor):
            return _detachable(outputs)
        return tuple(map(_detachable, outputs))


def _detachable(output: Tensor) -> Tensor:
    """Return a tensor that zero-bubble schedules, which detach outputs in place, can detach."""
    return output.clone() if output._is_view() else output


def _examples(specs: Specs) -> tuple[Tensor, ...]:
    return tuple(spec.empty(torch.device("meta")).requires_grad_(spec.has_gradient) for spec in specs)


def _loss(output: Tensor, index: Tensor) -> Tensor:
    del index
    return output
