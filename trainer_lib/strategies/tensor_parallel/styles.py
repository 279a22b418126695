"""The styles of tensor parallelism: which dimension of a module's weights is split, and what goes in and out."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.pytree import map_tensors
from trainer_lib.strategies.tensor_parallel import experts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

# What each rank has of a tensor: all of it, or its part of the last dimension, of the sequence, or of the heads.
WHOLE, SPLIT, SEQUENCE, HEADS = "whole", "split", "sequence", "heads"
LOGITS = "logits"  # the part of the last dimension while training, all of it in an evaluation
_DIMENSIONS = {SPLIT: -1, SEQUENCE: 1, HEADS: -2, LOGITS: -1}


class Style(NamedTuple):
    """How a module is split.

    Args:
        splits: "out" or "in", the dimension of the matrix, or "experts"; `None`: weights stay whole.
        takes: What each rank has of the input.
        uses: What the module computes with.
        gives: What each rank gets of the output; `None`: the module's inner modules decide.
    """

    splits: str | None
    takes: str
    uses: str
    gives: str | None


STYLES: Mapping[str, Style] = {
    "colwise": Style("out", WHOLE, WHOLE, SPLIT),
    "colwise_gather_output": Style("out", WHOLE, WHOLE, WHOLE),
    "colwise_rep": Style("out", WHOLE, WHOLE, WHOLE),
    "colwise_loss_parallel": Style("out", WHOLE, WHOLE, LOGITS),
    "rowwise": Style("in", SPLIT, SPLIT, WHOLE),
    "rowwise_split_input": Style("in", WHOLE, SPLIT, WHOLE),
    "rowwise_rep": Style("in", WHOLE, SPLIT, WHOLE),
    "rowwise_scatter_sequence": Style("in", SPLIT, SPLIT, SEQUENCE),
    "embedding_rowwise": Style("in", WHOLE, WHOLE, WHOLE),
    "embedding_colwise": Style("out", WHOLE, WHOLE, WHOLE),
    "experts": Style("experts", WHOLE, WHOLE, WHOLE),
    "replicated_with_grad_allreduce": Style(None, HEADS, HEADS, HEADS),
    "sequence_parallel": Style(None, SEQUENCE, SEQUENCE, SEQUENCE),
    "sequence_parallel_gather": Style(None, SEQUENCE, SEQUENCE, WHOLE),
    "scatter_sequence": Style(None, WHOLE, SEQUENCE, None),
    "gather_sequence": Style(None, SEQUENCE, WHOLE, None),
}


def is_matrix(module: nn.Module) -> bool:
    """Whether a module has a weight that styles can split: a linear layer, an embedding, transformers' Conv1D."""
    return isinstance(module, (nn.Linear, nn.Embedding)) or _is_conv1d(module)


def style_of(name: str, module: nn.Module) -> Style:
    """Return the style for a module; an embedding takes whole indices."""
    style = STYLES[name]
    return style._replace(takes=WHOLE, uses=WHOLE) if isinstance(module, nn.Embedding) else style


def features(module: nn.Module) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a matrix."""
    weight: Any = module.weight
    inputs, outputs = weight.shape if isinstance(module, nn.Embedding) or _is_conv1d(module) else weight.shape[::-1]
    return inputs, outputs


def placements(module: nn.Module, style: Style) -> "dict[str, Placement]":
    """Return how each of a module's own parameters is split, by name."""
    from torch.distributed.tensor import Replicate, Shard

    names = [name for name, _ in module.named_parameters(recurse=False)] if style.gives is not None else []
    if style.splits is None:
        return dict.fromkeys(names, Replicate())
    if style.splits == "experts":
        return dict.fromkeys(names, Shard(0))
    transposed = isinstance(module, nn.Embedding) or _is_conv1d(module)  # a linear layer has (outputs, inputs)
    of_weight = Shard(int((style.splits == "in") != transposed))
    of_bias = Replicate() if style.splits == "in" else Shard(0)
    return {name: of_weight if name == "weight" else of_bias for name in names}


def install(module: nn.Module, style: Style, mesh: "DeviceMesh") -> None:
    """Convert what goes into a module and what comes out of it, in hooks around its forward."""
    if style.splits == "experts":
        experts.install(module, mesh)
        return
    module.register_forward_pre_hook(_convert_input(style, mesh), with_kwargs=True)
    if style.gives is not None:
        module.register_forward_hook(_convert_output(style.gives, mesh))


def make_losses_plain(module: nn.Module, args: Any, outputs: Any) -> Any:
    """Convert losses that a model computes from split logits to plain tensors. A forward hook."""
    del module, args
    return map_tensors(_plain_loss, outputs)


def _plain_loss(value: Any) -> Tensor:
    return value if value.dim() or not hasattr(value, "full_tensor") else _Unaliased.apply(value.full_tensor())


def place_gradients(parameter: Any) -> None:
    """Hold a gradient as its parameter is held: summed over ranks that computed parts of it, without others' rows."""
    if not hasattr(parameter, "_local_tensor"):
        return
    if all(placement.is_replicate() for placement in parameter.placements):
        parameter.register_post_accumulate_grad_hook(_sum_parts)
        return
    mesh, placements = parameter.device_mesh, parameter.placements

    def split(gradient: Any) -> Any:
        # Each rank computes the whole gradient of an embedding, and would keep it.
        return gradient if gradient.placements == placements else gradient.redistribute(mesh, placements)

    if parameter.requires_grad:
        parameter.register_hook(split)


def _sum_parts(parameter: Any) -> None:
    if any(placement.is_partial() for placement in parameter.grad.placements):
        parameter.grad = parameter.grad.redistribute(parameter.device_mesh, parameter.placements)


def _convert_input(style: Style, mesh: "DeviceMesh") -> Callable[..., Any]:
    def convert(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = "" if args else _first_tensor(kwargs)
        value = _converted(kwargs[name] if name else args[0], style.takes, style.uses, mesh)
        if style.gives is None:  # its inner modules take plain tensors
            value = value.to_local()
        return (args, {**kwargs, name: value}) if name else ((value, *args[1:]), kwargs)

    return convert


def _convert_output(gives: str, mesh: "DeviceMesh") -> Callable[..., Any]:
    def convert(module: nn.Module, args: Any, output: Any) -> Any:
        del args
        if not hasattr(output, "_local_tensor"):  # of a module that this stage of a pipeline skips
            return output
        stays = gives == LOGITS and module.training and torch.is_grad_enabled()
        wanted = WHOLE if gives == LOGITS and not stays else gives
        output = output.redistribute(mesh, [_placement(wanted, output)])
        return output if stays else _Unaliased.apply(output.to_local())

    return convert


class _Unaliased(torch.autograd.Function):
    """Returns the same values as a tensor that is no view: FSDP2's hooks do not follow in-place changes of views."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        del ctx
        alias: Any = torch.empty(0, dtype=value.dtype, device=value.device)
        return alias.set_(value.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        del ctx
        return gradient


def _converted(value: Any, takes: str, uses: str, mesh: "DeviceMesh") -> Any:
    from torch.distributed.tensor import DTensor

    if not hasattr(value, "_local_tensor"):
        value = DTensor.from_local(value, mesh, [_placement(takes, value)], run_check=False)
    if uses == SEQUENCE and value.shape[1] % mesh.size():
        raise ConfigurationError(
            f"A sequence of {value.shape[1]} tokens cannot be split over tp_size={mesh.size()} ranks. Pad sequences to "
            f"a multiple of {mesh.size()}, for example with pad_to_multiple_of={mesh.size()} of the collator."
        )
    return value.redistribute(mesh, [_placement(uses, value)])


def _placement(layout: str, value: Tensor) -> "Placement":
    from torch.distributed.tensor import Replicate, Shard

    return Replicate() if layout == WHOLE else Shard(_DIMENSIONS[layout] % value.dim())


def _first_tensor(kwargs: Mapping[str, Any]) -> str:
    return next(name for name, value in kwargs.items() if isinstance(value, Tensor) and value.is_floating_point())


def _is_conv1d(module: nn.Module) -> bool:
    # By name: transformers need not be installed.
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")
