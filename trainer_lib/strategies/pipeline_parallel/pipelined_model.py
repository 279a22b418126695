"""`PipelinedModel`: a model whose stages are on several ranks; a call runs all, and each rank gets the outputs."""

import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer_lib.foundation.errors import PreparationError
from trainer_lib.foundation.tensors.pytree import tensors
from trainer_lib.strategies.pipeline_parallel.model_stages import Activations, ModelStages, StageEnd
from trainer_lib.strategies.pipeline_parallel.stage_exchange import StageExchange, TensorSpec, with_tensors

_MOST_STAGES = 2**16  # so many numbers lie between two seeds

Specs = tuple[TensorSpec, ...]


class PipelinedModel(nn.Module):
    """Runs the stages of a model one after the other, each on its rank.

    All ranks of a pipeline call it with the same batch, and get the same outputs; `backward` of a loss of them computes
    the gradients of all stages.

    Args:
        module: The model, with the modules of this rank's stages.
        ranks: The rank of the pipeline that holds each stage.
        gates: Where stages begin and end.
        exchange: The messages between the ranks.
        around_backward: Calls the function that computes the gradients of this rank's weights.
    """

    exchange: StageExchange
    gates: ModelStages
    module: nn.Module
    ranks: list[int]

    def __init__(
        self,
        module: nn.Module,
        ranks: Sequence[int],
        gates: ModelStages,
        exchange: StageExchange,
        around_backward: Callable[[Callable[[], None]], None],
    ) -> None:
        super().__init__()
        self.module, self.ranks, self.gates, self.exchange = module, list(ranks), gates, exchange
        self.stages: list[int] = [stage for stage, rank in enumerate(ranks) if rank == exchange.rank]
        self.around_backward = around_backward
        self._in_window: _Place | None = None  # the stage of a window that runs now
        self._calls = 0  # in it
        self._only_prepares = False
        self._takes_cache = "use_cache" in inspect.signature(module.forward).parameters
        self.train(module.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the last stage, on all ranks."""
        if self._takes_cache:
            kwargs.setdefault("use_cache", False)  # keys and values would be sent to all ranks
        if self._only_prepares:
            self.gates.prepare_call(self.module, args, kwargs)
            raise StageEnd(())
        if self._in_window is not None:
            self._calls += 1
            if self._calls > 1:
                raise _other_calls("calls the model several times")
            return self._run_stage(self._in_window, args, kwargs)
        self.gates.prepare_call(self.module, args, kwargs)
        seed = drawn_seed() if self.training else None
        stage_pass = StagePass(self, lambda stage, got: self._run_stage(_Place(stage, got, seed), args, kwargs))
        outputs, last = stage_pass.forward(), self.ranks[-1]
        tree, values, specs = self.exchange.share(outputs, last)
        if torch.is_grad_enabled() and any(spec.has_gradient for spec in specs):
            stage_pass.keep(outputs)
            anchor = torch.ones((), requires_grad=True)
            values = list(_Outputs.apply(anchor, stage_pass, specs, *values))  # type: ignore[no-untyped-call]
        return with_tensors(tree, values)

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.exchange.rank == self.ranks[-1]

    def prepare_window(self, compute: Callable[[], Tensor]) -> None:
        """Raise on all ranks, before one waits for another, if `compute` cannot call this model."""
        devices = [] if self.exchange.device.type == "cpu" else [self.exchange.device]
        self._only_prepares = True
        try:
            with torch.random.fork_rng(devices, device_type=self.exchange.device.type):
                compute()
        except StageEnd:
            pass
        finally:
            self._only_prepares = False

    def in_window(
        self, stage: int, received: Activations, seed: int, compute: Callable[[], Tensor]
    ) -> Tensor | Activations:
        """Return what a stage passes on if `compute` calls this model once: activations, or what `compute` returns."""
        self._in_window, self._calls = _Place(stage, received, seed), 0
        try:
            loss = compute()
        except StageEnd as end:
            return end.activations
        finally:
            self._in_window = None
        if not self._calls:
            raise _other_calls("does not call the model")
        return loss

    def _run_stage(self, place: "_Place", args: Any, kwargs: Any) -> Any:
        """Run a stage; with a seed, it draws random numbers that no other stage draws."""
        stage, received, seed = place
        if seed is None:
            return self.gates.run(self.module, stage, received, args, kwargs)
        with _random_numbers(seed + stage, self.exchange.device):
            return self.gates.run(self.module, stage, received, args, kwargs)


@contextmanager
def _random_numbers(seed: int, device: torch.device) -> Generator[None]:
    """Draw from generators with this seed; afterwards they are as before."""
    generators = [torch.default_generator]
    if device.type != "cpu":
        generators.append(torch.get_device_module(device).default_generators[device.index or 0])
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def drawn_seed() -> int:
    """Draw the seed of a forward, the same on all ranks of a pipeline, whose generators are alike between forwards."""
    return int(torch.randint(2**31, ())) * _MOST_STAGES


def _other_calls(what: str) -> PreparationError:
    return PreparationError(
        f"The loss of a micro-batch {what}, and a schedule of a pipeline needs one call. Give "
        "TorchPipelineParallelConfig(schedule=None), with which stages run one after the other."
    )


class _Place(NamedTuple):
    """The stage that runs, the activations that it received, and the seed of its random numbers."""

    stage: int
    received: Activations
    seed: int | None


class StagePass:
    """One forward through all stages, one after the other, and its backward.

    Args:
        model: The model.
        run: Runs a stage on what it received; it may raise `StageEnd`.
    """

    def __init__(self, model: PipelinedModel, run: Callable[[int, Activations], Any]) -> None:
        self._model, self._run = model, run
        self._received: dict[int, Activations] = {}
        self._activations: dict[int, Activations] = {}
        self._outputs: list[Tensor] = []

    def forward(self) -> Any:
        """Run this rank's stages; return the outputs of the last one, or `None` on the other ranks."""
        model, exchange, outputs = self._model, self._model.exchange, None
        for stage in model.stages:
            if stage > 0:
                self._received[stage] = self._activations_for(stage)
            try:
                outputs = self._run(stage, self._received.get(stage, ()))
            except StageEnd as end:
                outputs = end.activations
            if stage < model.gates.num_stages - 1:
                if stage + 1 not in model.stages:
                    exchange.send_activations(outputs, model.ranks[stage + 1])
                self._activations[stage] = outputs
                outputs = None
        return outputs

    def keep(self, outputs: Any) -> None:
        """Keep the outputs of the last stage for the backward."""
        self._outputs = list(tensors(outputs))

    def backward(self, gradients: Sequence[Tensor | None]) -> None:
        """Compute the gradients of this rank's stages, from those of the outputs."""
        self._model.around_backward(lambda: self.backward_of_stages(gradients))

    def specs(self) -> tuple[dict[int, Specs], dict[int, Specs]]:
        """Return the specs of what this rank's stages received, and of the activations that they passed on."""
        received, passed_on = (
            {
                stage: tuple(TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in ts)
                for stage, ts in held.items()
            }
            for held in (self._received, self._activations)
        )
        return received, passed_on

    def backward_of_stages(self, gradients: Sequence[Tensor | None]) -> None:
        """Compute the gradients of this rank's stages, without what comes before and after a backward."""
        model, of_next_stage = self._model, None
        for stage in reversed(model.stages):
            received = self._received.pop(stage, ())
            outputs, received_gradients = self._differentiated(stage, gradients, of_next_stage)
            of_next_stage = None
            if outputs:
                torch.autograd.backward(outputs, received_gradients)
            of_received = [torch.zeros_like(t) if t.grad is None else t.grad for t in received if t.requires_grad]
            if stage - 1 in model.stages:
                of_next_stage = of_received
            else:
                for gradient in of_received:
                    model.exchange.send(gradient, model.ranks[stage - 1])

    def _activations_for(self, stage: int) -> Activations:
        """Return what the stage before passed on: from its rank, or on this one, cut off from its graph."""
        if stage - 1 not in self._activations:
            return self._model.exchange.receive_activations(self._model.ranks[stage - 1])
        return tuple(t.detach().requires_grad_(t.requires_grad) for t in self._activations[stage - 1])

    def _differentiated(
        self, stage: int, gradients: Sequence[Tensor | None], of_next_stage: list[Tensor] | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return what a stage has computed, and its gradients."""
        activations, model = self._activations.pop(stage, None), self._model
        if activations is None:
            pairs = zip(self._outputs, gradients, strict=True)
            chosen = [(output, g) for output, g in pairs if output.requires_grad and g is not None]
            return [output for output, _ in chosen], [gradient for _, gradient in chosen]
        differentiable = [tensor for tensor in activations if tensor.requires_grad]
        if of_next_stage is not None:
            return differentiable, of_next_stage
        specs = [TensorSpec(tuple(tensor.shape), tensor.dtype, False) for tensor in differentiable]
        return differentiable, [model.exchange.receive(spec, model.ranks[stage + 1]) for spec in specs]


class _Outputs(torch.autograd.Function):
    """The outputs of the last stage, on all ranks; their backward is that of all stages."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, stage_pass: StagePass, specs: Sequence[TensorSpec], *values: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the values."""
        del anchor
        ctx.stage_pass = stage_pass
        ctx.set_materialize_grads(False)
        outputs = tuple(value.detach() for value in values)
        ctx.mark_non_differentiable(*(o for o, spec in zip(outputs, specs, strict=True) if not spec.has_gradient))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Compute the gradients of all stages."""
        ctx.stage_pass.backward(gradients)
        return None, None, None, *(None for _ in gradients)
