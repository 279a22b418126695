"""Convert tensors from one layout over the ranks to another, around modules and in backwards."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.tensors.local_shards import laid_out
from trainer_lib.foundation.tensors.pytree import map_tensors
from trainer_lib.strategies.fsdp.unaliased import unaliased
from trainer_lib.strategies.tensor_parallel.styles import HEADS, LOGITS, PARTIAL, SEQUENCE, SPLIT, WHOLE, Style

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

_DIMENSIONS = {SPLIT: -1, SEQUENCE: 1, HEADS: -2, LOGITS: -1}


def make_losses_plain(module: nn.Module, args: Any, outputs: Any) -> Any:
    """Convert losses that a model computes from split logits to plain tensors. A forward hook."""
    del module, args
    return map_tensors(_plain_loss, outputs)


def _plain_loss(value: Any) -> Tensor:
    return value if value.dim() or not hasattr(value, "full_tensor") else unaliased(value.full_tensor())


def place_gradients(parameter: Any) -> None:
    """Hold a gradient as its parameter is held: summed over ranks that computed parts of it, without others' rows."""
    if not hasattr(parameter, "_local_tensor") or not (parameter.is_floating_point() or parameter.is_complex()):
        return
    mesh, placements, is_trained = parameter.device_mesh, parameter.placements, parameter.requires_grad

    def split(gradient: Any) -> Any:
        # Each rank may compute the whole gradient of an embedding, and would keep it.
        return gradient if gradient.placements == placements else gradient.redistribute(mesh, placements)

    parameter.requires_grad_(True)  # a frozen one takes no hooks, and may be trained later
    if all(placement.is_replicate() for placement in placements):
        parameter.register_post_accumulate_grad_hook(_sum_parts)
    else:
        parameter.register_hook(split)
    parameter.requires_grad_(is_trained)


def _sum_parts(parameter: Any) -> None:
    parameter.grad = laid_out(parameter.grad, parameter)


def convert_input(style: Style, mesh: "DeviceMesh") -> Callable[..., Any]:
    """Return a forward pre-hook that gives a module a DTensor in the layout that it computes with."""

    def convert(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = "" if args else _first_tensor(kwargs)
        value = converted(kwargs[name] if name else args[0], style.takes, style.uses, mesh)
        if style.gives is None:  # its inner modules take plain tensors
            value = value.to_local()
        return (args, {**kwargs, name: value}) if name else ((value, *args[1:]), kwargs)

    return convert


def convert_output(gives: str, mesh: "DeviceMesh") -> Callable[..., Any]:
    """Return a forward hook that makes a plain tensor of a module's DTensor."""

    def convert(module: nn.Module, args: Any, output: Any) -> Any:
        del args
        if not hasattr(output, "_local_tensor"):  # of a module that this stage of a pipeline skips
            return output
        output = converted(output, gives, final_layout(gives, module), mesh)
        return output if final_layout(gives, module) == LOGITS else unaliased(output.to_local())

    return convert


def final_layout(gives: str, module: nn.Module) -> str:
    """Return what each rank gets of an output: all of the logits unless they are needed for a gradient."""
    return WHOLE if gives == LOGITS and not (module.training and torch.is_grad_enabled()) else gives


def converted(value: Any, has: str, wants: str, mesh: "DeviceMesh", size: int | None = None) -> Any:
    """Return a tensor as a DTensor in another layout.

    Args:
        value: A DTensor, or what this rank has of the tensor.
        has: The layout of what this rank has.
        wants: The other layout.
        mesh: The ranks.
        size: The size of the last dimension of the whole tensor, if ranks may have parts of different sizes.
    """
    from torch.distributed.tensor import DTensor

    if not hasattr(value, "_local_tensor"):
        facts: dict[str, Any] = {}
        if size is not None:
            shape = torch.Size((*value.shape[:-1], size))
            facts = {"shape": shape, "stride": torch.empty(shape, device="meta").stride()}
        value = DTensor.from_local(value, mesh, [_placement(has, value)], run_check=False, **facts)
    if wants == SEQUENCE and value.shape[1] % mesh.size():
        raise ConfigurationError(
            f"A sequence of {value.shape[1]} tokens cannot be split over tp_size={mesh.size()} ranks. Pad sequences to "
            f"a multiple of {mesh.size()}, for example with pad_to_multiple_of={mesh.size()} of the collator."
        )
    return value.redistribute(mesh, [_placement(wants, value)])


def local_part(value: Any, gradient: str | None = None) -> Tensor:
    """Return what this rank has of a DTensor; its gradient may be a part of a sum (`PARTIAL`)."""
    from torch.distributed.tensor import Partial

    return value.to_local(grad_placements=[Partial()] if gradient == PARTIAL else None)


def _placement(layout: str, value: Tensor) -> "Placement":
    from torch.distributed.tensor import Partial, Replicate, Shard

    if layout == PARTIAL:
        return Partial()
    return Replicate() if layout == WHOLE else Shard(_DIMENSIONS[layout] % value.dim())


def _first_tensor(kwargs: Mapping[str, Any]) -> str:
    return next(name for name, value in kwargs.items() if isinstance(value, Tensor) and value.is_floating_point())
