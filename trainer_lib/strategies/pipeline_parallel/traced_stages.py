"""`TracedStages`: a model that is cut by tracing its forward, for models whose blocks do not run in a plain row."""

import copy
import inspect
import logging
import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trainer_lib.foundation.errors import ConfigurationError, PreparationError, TrainerLibError, UnsupportedError
from trainer_lib.modules.block_split import even_bounds, find_blocks, outermost_blocks
from trainer_lib.modules.forwards import replace_forward, unwrap_forward
from trainer_lib.modules.weights.names import class_name
from trainer_lib.options.parallel.pipeline_options import TorchPipelineParallelConfig
from trainer_lib.strategies.pipeline_parallel.model_stages import ModelStages, StageEnd
from trainer_lib.strategies.pipeline_parallel.traced_graph import StageGraph, TracedGraph

_KEPT = 16  # traces


class _Trace(NamedTuple):
    """A forward that was traced, and the structure of its outputs."""

    graph: TracedGraph
    outputs: Any
    stages: list[StageGraph]


class TracedStages(ModelStages):
    """Cuts the operations of a forward, so that the stages of a model may need several values of those before.

    Each call with other shapes, other inputs that are no tensors, in another mode, or with another autocast is traced
    once, without values. Parameters and buffers keep their names, on the stages that use them.

    Args:
        model: The whole model, on any device.
        config: The options, with inputs of a micro-batch.
        num_stages: How many stages there are.
        device: The device of this rank.

    Raises:
        ConfigurationError: If the blocks do not make so many stages.
        PreparationError: If the forward cannot be traced, or not be cut there.
        UnsupportedError: If modules of the model save memory, which tracing loses.
    """

    traces = True

    def __init__(
        self, model: nn.Module, config: TorchPipelineParallelConfig, num_stages: int, device: torch.device
    ) -> None:
        super().__init__()
        _check_forwards(model)
        self._name, self._num_stages = class_name(model), num_stages
        self._whole = _WithoutValues(model, device)
        self._traces: dict[Hashable, _Trace] = {}
        self._first_blocks: list[str] | None = None  # `None`: the forward calls pipe_split()
        self._only_traces = False
        args, kwargs = config.example_call
        if self._whole.takes_cache:
            kwargs.setdefault("use_cache", False)
        graph, outputs = self._whole.traced(model, args, kwargs)
        self._choose_cuts(model, graph, config.blocks)
        first = self._cut(graph, outputs)
        self._traces[self._key(model, args, kwargs)] = first
        self._stages_of_weights = self._whole.stages_of_weights([stage.weights for stage in first.stages])

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return self._num_stages

    def remove_others(self, model: nn.Module, held: Sequence[int]) -> None:
        """Remove the parameters and buffers that stages of this rank do not use."""
        for prefix, module in model.named_modules(remove_duplicate=False):
            for slots in (module._parameters, module._buffers):  # pyright: ignore[reportPrivateUsage] - an attribute cannot be both None and registered
                for name in slots:
                    stages = self._stages_of_weights.get(f"{prefix}.{name}" if prefix else name)
                    if stages is not None and not stages & set(held):
                        slots[name] = None

    def install(self, model: nn.Module, held: Sequence[int]) -> None:
        """Let the forward of the model run the operations of a stage."""
        del held
        original = model.forward

        @wraps(original)
        def traced(*args: Any, **kwargs: Any) -> Any:
            return self._forward(model, args, kwargs)

        replace_forward(model, traced)
        model.forward = self._returning(model.forward)

    def prepare_call(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Trace a call of a new kind, in the context of the model's precision."""
        self._only_traces = True
        try:
            model.forward(*args, **kwargs)
        finally:
            self._only_traces = False

    def parameters_of(self, model: nn.Module, stage: int) -> Iterator[nn.Parameter]:
        """Yield the parameters that a stage of this rank uses."""
        stages = self._stages_of_weights
        return (parameter for name, parameter in model.named_parameters() if stage in stages[name])

    def _forward(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._only_traces:
            self._trace(model, args, kwargs)
            raise StageEnd(())
        if self.stage is None:
            raise PreparationError(
                f"This {self._name} is a part of a pipeline. Call the model that prepare() returned, on all ranks, not "
                "the one inside; generate() does not work with pp_size above 1."
            )
        trace = self._trace(model, args, kwargs)
        stage = trace.stages[self.stage]
        leaves = pytree.tree_leaves((args, _by_name(kwargs)))
        weights = [operator.attrgetter(name)(model) for name in stage.weights]
        results = stage.module(*self.received, *(leaves[number] for number in stage.inputs), *weights)
        if self.stage < self._num_stages - 1:
            raise StageEnd(tuple(results))
        return pytree.tree_unflatten(results, trace.outputs)

    def _trace(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> _Trace:
        key = self._key(model, args, kwargs)
        trace = self._traces.pop(key, None)
        if trace is None:
            trace = self._cut(*self._whole.traced(model, args, kwargs))
            self._check_weights(trace)
        self._traces[key] = trace
        while len(self._traces) > _KEPT:
            self._traces.pop(next(iter(self._traces)))
        return trace

    def _check_weights(self, trace: _Trace) -> None:
        """Raise, on all ranks, if a stage of a call uses weights that its rank does not hold."""
        for number, stage in enumerate(trace.stages):
            for name in stage.weights:
                if number not in self._stages_of_weights[name]:
                    raise PreparationError(
                        f"Stage {number} uses {name} in this call, and not with the example_inputs of "
                        "TorchPipelineParallelConfig, so another rank holds it. Give example_inputs as the model is "
                        "trained with, and call it with the same ones."
                    )

    def _key(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Hashable:
        leaves, structure = pytree.tree_flatten((args, _by_name(kwargs)))
        kinds = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves)
        device = self._whole.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return structure, kinds, tuple(module.training for module in model.modules()), autocast

    def _choose_cuts(self, model: nn.Module, graph: TracedGraph, blocks: str | Sequence[str] | None) -> None:
        splits = graph.pipe_splits()
        if splits and blocks is None:
            return
        if splits:
            raise ConfigurationError(
                f"The forward of {self._name} calls pipe_split(), and blocks={blocks!r} says where to cut it too. "
                "Leave one of them out."
            )
        runs = graph.first_runs()
        names = outermost_blocks(model) if blocks is None else find_blocks(model, blocks)
        missing = [name for name in names if name not in runs]
        if missing and blocks is not None:
            raise ConfigurationError(
                f"blocks={blocks!r} names modules that the forward of {self._name} does not run with these "
                f"example_inputs: {', '.join(missing[:5])}. Name modules that it calls."
            )
        first_of_start = {runs[name]: name for name in names if name in runs}
        starts = sorted(first_of_start)
        sizes, uses = self._whole.sizes, graph.first_uses()
        costs = [
            1 + sum(sizes[name] for name, use in uses.items() if (start <= use or not index) and use < end)
            for index, (start, end) in enumerate(zip(starts, [*starts[1:], graph.length], strict=True))
        ]
        bounds = even_bounds(costs, self._num_stages, self._name)
        self._first_blocks = [first_of_start[starts[bound]] for bound in bounds[1:-1]]

    def _cut(self, graph: TracedGraph, outputs: Any) -> _Trace:
        return _Trace(graph, outputs, graph.stages(self._starts(graph)))

    def _starts(self, graph: TracedGraph) -> list[int]:
        """Return where the stages after the first one begin."""
        if self._first_blocks is None:
            splits = graph.pipe_splits()
            if len(splits) != self._num_stages - 1:
                raise ConfigurationError(
                    f"The forward of {self._name} calls pipe_split() {len(splits)} times, and {self._num_stages} "
                    f"stages need {self._num_stages - 1} calls. Set pp_size or stages_per_rank, or move the calls."
                )
            return splits
        runs = graph.first_runs()
        starts = [runs.get(name, -1) for name in self._first_blocks]
        if starts != sorted(set(starts)) or -1 in starts:
            raise PreparationError(
                f"The stages of {self._name} begin with {', '.join(self._first_blocks)}, and this call of the model "
                "does not run them in this order. A pipeline needs the same order in each call."
            )
        return starts


class _WithoutValues:
    """A model without values, whose forward torch.export traces.

    Args:
        model: The whole model.
        device: The device on which the stages compute.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode  # torch.export takes no other tensors without values

        self.device = device
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        tensors: dict[int, Any] = {id(t): self._like(t) for t in (*model.parameters(), *model.buffers())}
        for parameter in model.parameters():
            tensors[id(parameter)] = nn.Parameter(tensors[id(parameter)], parameter.requires_grad)
        self._model: nn.Module = copy.deepcopy(model, tensors)
        unwrap_forward(self._model)  # the precision's context surrounds a trace as it surrounds a forward
        for hooks in (self._model._forward_hooks, self._model._forward_pre_hooks):  # pyright: ignore[reportPrivateUsage] - those of the model itself run outside of its stages
            hooks.clear()
        self._parameters = dict(self._model.named_parameters(remove_duplicate=False))
        self._buffers = dict(self._model.named_buffers(remove_duplicate=False))
        self.sizes: dict[str, int] = {
            name: tensor.numel() for name, tensor in (*self._parameters.items(), *self._buffers.items())
        }

    @property
    def takes_cache(self) -> bool:
        """Whether the forward takes `use_cache`."""
        return "use_cache" in inspect.signature(self._model.forward).parameters

    def traced(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> tuple[TracedGraph, Any]:
        """Return the operations of a call of the model in the modes of its modules, and the structure of its outputs.

        Raises:
            PreparationError: If the forward cannot be traced.
        """
        for module, like in zip(self._model.modules(), model.modules(), strict=True):
            module.training = like.training
        args, kwargs = pytree.tree_map_only(Tensor, self._like, (args, _by_name(kwargs)))
        try:
            with torch.enable_grad(), _quiet():
                program = torch.export.export(self._model, args, kwargs, strict=False)
                module = program.module(check_guards=False)
        except TrainerLibError:
            raise
        except Exception as error:
            raise _not_traced(class_name(model), error) from error
        graph: Any = module
        return TracedGraph(graph, self._parameters, self._buffers), program.call_spec.out_spec

    def stages_of_weights(self, used: Sequence[Sequence[str]]) -> dict[str, set[int]]:
        """Return the stages that hold each parameter and buffer; those that none uses are beside their neighbors."""
        named = {**self._parameters, **self._buffers}
        by_tensor: dict[int, set[int]] = {}
        for stage, names in enumerate(used):
            for name in names:
                by_tensor.setdefault(id(named[name]), set()).add(stage)
        known = {name: by_tensor[id(tensor)] for name, tensor in named.items() if id(tensor) in by_tensor}
        for name, tensor in named.items():
            if id(tensor) not in by_tensor:
                nearest = max(known, key=lambda other: _common(name, other), default="")
                by_tensor[id(tensor)] = {min(known.get(nearest, {0}))}
        return {name: by_tensor[id(tensor)] for name, tensor in named.items()}

    def _like(self, tensor: Tensor) -> Tensor:
        from torch._subclasses.fake_tensor import FakeTensor

        return FakeTensor(self._mode, torch.empty_like(tensor, device="meta", requires_grad=False), self.device)


def _by_name(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return dict(sorted(kwargs.items()))


def _common(name: str, other: str) -> int:
    """Return how many modules two names have in common."""
    pairs = zip(name.split(".")[:-1], other.split(".")[:-1], strict=False)
    return next((count for count, (one, two) in enumerate(pairs) if one != two), min(name.count("."), other.count(".")))


def _check_forwards(model: nn.Module) -> None:
    """Raise if modules inside the model compute their activations again, or keep them in host memory."""
    for name, module in model.named_modules():
        wraps_block = module is not model and "_original_forward" in module.__dict__
        if wraps_block or getattr(module, "gradient_checkpointing", False):
            raise UnsupportedError(
                f"{name or class_name(model)} saves activation memory (gradient_checkpointing, activation_offload), "
                "which tracing loses. Leave it out, or leave example_inputs out of TorchPipelineParallelConfig."
            )


def _quiet() -> Any:
    """Return a context without what torch logs of a failed trace: the error says it."""
    return _Level(logging.getLogger("torch"), logging.CRITICAL)


class _Level:
    """The context in which a logger has another level."""

    def __init__(self, logger: logging.Logger, level: int) -> None:
        self._logger, self._level, self._before = logger, level, logger.level

    def __enter__(self) -> None:
        self._logger.setLevel(self._level)

    def __exit__(self, *error: object) -> None:
        self._logger.setLevel(self._before)


def _not_traced(model: str, error: Exception) -> PreparationError:
    lines = [line.strip() for line in str(error).splitlines()]
    at = next((i for i, line in enumerate(lines) if line.startswith("The following call raised this error")), None)
    where = "" if at is None else " ".join(lines[at + 1 : at + 3])
    reason = f"{type(error).__name__}: {lines[0] if lines else ''}"
    if "data-dependent" in str(error):
        reason = "it decides by the values of tensors, which tracing does not know"
    return PreparationError(
        f"{model} cannot be cut by tracing: {reason}{f' ({where})' if where else ''}. Leave example_inputs out of "
        "TorchPipelineParallelConfig, so that it is cut between blocks; change that line; or set pp_size=1."
    )
