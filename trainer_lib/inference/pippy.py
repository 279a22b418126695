"""`prepare_pippy`: inference with a model whose layers are spread over all processes."""

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError, did_you_mean
from trainer_lib.foundation.tensors.pytree import concatenate, map_tensors, tensors
from trainer_lib.inference.pippy_names import find_pippy_batch_size
from trainer_lib.modules.weights.names import class_name
from trainer_lib.options.base import check_count
from trainer_lib.state import PartialState
from trainer_lib.strategies.pipeline_parallel.model_stages import StageEnd
from trainer_lib.strategies.pipeline_parallel.stage_exchange import StageExchange, with_tensors
from trainer_lib.strategies.pipeline_parallel.stage_gates import Cut, StageGates


def prepare_pippy(
    model: nn.Module,
    split_points: str | Sequence[str] = "auto",
    no_split_module_classes: Sequence[str] | None = None,
    example_args: Sequence[Any] | None = (),
    example_kwargs: Mapping[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> Any:
    """Spread the layers of a model over all processes, and return the model.

    A call cuts the batch of rank 0 into chunks, which run through the processes one behind the other. All ranks have to
    call the model; inputs of other ranks than 0 are ignored. The last rank gets the outputs, the others get `None`.
    There are no gradients. The model of a single process is returned as it is.

    Args:
        model: The whole model, in evaluation mode. Each rank keeps the layers it runs and gives up the others.
        split_points: The names of the modules with which the parts after the first begin, or "auto" for parts as equal
            as possible.
        no_split_module_classes: With "auto", the classes of the blocks between which the model may be cut. By default
            the model is cut between the blocks of its longest row of equal ones.
        example_args: Inputs for a first call, which checks that the model can be cut there.
        example_kwargs: Keyword inputs for it.
        num_chunks: Into how many chunks a batch is cut; by default as many as there are processes.
        gather_output: Whether all ranks get the outputs.

    Example:
        >>> import torch
        >>> model = prepare_pippy(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)).eval())
        >>> model(torch.zeros(3, 4)).shape
        torch.Size([3, 2])

    Raises:
        ConfigurationError: If the model cannot be cut so.
    """
    state = PartialState()
    count = state.num_processes if num_chunks is None else num_chunks
    check_count("num_chunks", count)
    if getattr(model, "hf_device_map", None):
        raise ConfigurationError(
            f"The {class_name(model)} has a device map: its layers lie on the devices of one process. Leave out the "
            "device map, or prepare_pippy."
        )
    parts = cast(Any, model)
    parts.hf_split_points = []
    if state.use_distributed:
        cut = _cut(model, split_points, no_split_module_classes, state.num_processes)
        parts.hf_split_points = [cut.blocks[start] for start in cut.bounds[1:-1]]
        pipeline = _InferencePipeline(model, cut, count, gather_output, state.device)
        parts.forward = functools.wraps(model.forward)(pipeline)
        if hasattr(model, "generate"):
            parts.generate = _refuse_generate
    model.to(state.device)
    if example_args or example_kwargs:
        model(*(example_args or ()), **(example_kwargs or {}))
    return model


def _refuse_generate(*args: Any, **kwargs: Any) -> Any:
    del args, kwargs
    raise UnsupportedError(
        "generate does not work after prepare_pippy: each rank has the keys and values of its own layers only. Leave "
        "the model whole and share out the prompts with map_between_processes, or give it a device map."
    )


class _InferencePipeline:
    """Runs chunks of a batch through the stages of a model."""

    def __init__(self, model: nn.Module, cut: Cut, num_chunks: int, gather_output: bool, device: torch.device) -> None:
        self._model, self._original, self._gates = model, model.forward, StageGates(cut)
        self._num_chunks, self._gather_output = num_chunks, gather_output
        self._exchange = StageExchange(cast(dist.ProcessGroup, dist.group.WORLD), device)
        self._rank, self._last = self._exchange.rank, self._exchange.size - 1
        self._without_cache = "use_cache" in inspect.signature(model.forward).parameters
        self._gates.remove_others(model, [self._rank])
        self._gates.install(model, [self._rank])

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs for the inputs of rank 0: on the last rank, or on all."""
        if self._gates.stage is not None:  # a stage calls the model
            return self._original(*args, **kwargs)
        tree, values, _ = self._exchange.share((args, kwargs) if self._rank == 0 else None, 0)
        args, kwargs = with_tensors(tree, values)
        if self._without_cache:
            kwargs.setdefault("use_cache", False)  # a rank has the keys and values of its own layers only
        outputs = [self._run_stage(*chunk) for chunk in self._chunks(args, kwargs)]
        joined = _joined(outputs) if self._rank == self._last else None
        if not self._gather_output:
            return joined
        tree, values, _ = self._exchange.share(joined, self._last)
        return with_tensors(tree, values)

    def _chunks(self, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
        size = find_pippy_batch_size(args, kwargs)
        if not size:
            raise ConfigurationError(
                f"The inputs of rank 0 hold no batch to cut into chunks (got {len(args)} positional inputs and "
                f"{sorted(kwargs)}). Give tensors whose first dimension is the batch, on rank 0."
            )
        count = min(self._num_chunks, size)
        for index in range(count):
            rows = slice(size * index // count, size * (index + 1) // count)
            yield map_tensors(lambda tensor, rows=rows: _rows(tensor, rows, size), (args, kwargs))

    def _run_stage(self, args: Any, kwargs: Any) -> Any:
        """Run this rank's layers on a chunk; return the outputs of the last ones."""
        received = self._exchange.receive_activations(self._rank - 1) if self._rank else ()
        try:
            return self._gates.run(self._model, self._rank, received, args, kwargs)
        except StageEnd as end:
            self._exchange.send_activations(end.activations, self._rank + 1)
            return None


def _cut(
    model: nn.Module, split_points: str | Sequence[str], no_split_module_classes: Sequence[str] | None, count: int
) -> Cut:
    if split_points == "auto":
        classes = set(no_split_module_classes or ())
        blocks = [name for name, module in model.named_modules() if type(module).__name__ in classes]
        if classes and not blocks:
            raise ConfigurationError(
                f"no_split_module_classes={sorted(classes)} names no class of a module of the {class_name(model)}. "
                "Leave it out, or name the class of its blocks."
            )
        return Cut.of(model, blocks or None, count)
    points = [split_points] if isinstance(split_points, str) else list(split_points)
    if len(points) != count - 1:
        raise ConfigurationError(
            f"split_points must name the first module of each part but the first: {count - 1} for {count} processes "
            f'(got {len(points)}: {points}). Name as many, or give split_points="auto".'
        )
    return Cut.of(model, _row_of(model, points), count, points)


def _row_of(model: nn.Module, points: Sequence[str]) -> list[str]:
    """Return the names of the modules beside the first split point, in order."""
    parent = points[0].rpartition(".")[0]
    known = [name for name, _ in model.named_modules()]
    if parent not in known:
        raise ConfigurationError(f"The split point {points[0]!r} is no module.{did_you_mean(points[0], known)}")
    return [f"{parent}.{name}".lstrip(".") for name, _ in model.get_submodule(parent).named_children()]


def _rows(tensor: Tensor, rows: slice, size: int) -> Tensor:
    return tensor[rows] if tensor.ndim and len(tensor) == size else tensor


def _joined(outputs: list[Any]) -> Any:
    if any(tensor.ndim == 0 for tensor in tensors(outputs)):
        raise ConfigurationError(
            "The model returns a single number for a chunk of the batch, such as a loss, and outputs of chunks are "
            "joined row by row. Leave out the labels, and compute the loss from the outputs."
        )
    return concatenate(outputs)
