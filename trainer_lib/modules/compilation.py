"""Compile modules in place: calls go through torch.compile, and the module keeps its names and class."""

# pyright: reportPrivateUsage=false
# Here, a module's compiled call has no public name.

import functools
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from trainer_lib.logging import get_logger
from trainer_lib.modules.blocks import repeated_blocks
from trainer_lib.modules.views import view
from trainer_lib.options.compile_options import TorchDynamoPlugin

_logger = get_logger(__name__)


def compile_model(model: nn.Module, plugin: TorchDynamoPlugin) -> None:
    """Compile a model, or its repeated blocks, as the plugin says; leave a model that you compiled yourself."""
    undo_compilation(model)  # an earlier Accelerator may have compiled it with other options
    if not plugin.is_active:
        return
    if is_compiled(model) or has_compiled_regions(model):
        _logger.warning(
            "This %s is compiled already, so the options of dynamo_plugin are ignored. Remove your own torch.compile "
            "to compile it with these options.",
            type(model).__name__,
        )
        return
    _keep_out_of_graphs("trainer_lib.modules.activation_offload")
    compile_whole = plugin.use_regional_compilation is not True
    (_compile_whole if compile_whole else compile_regions)(model, **plugin.to_kwargs())


def undo_compilation(model: nn.Module) -> None:
    """Undo `compile_model` and `compile_regions`, and leave modules that the model's author compiled."""
    for module in model.modules():
        if _is_ours(module):
            module._compiled_call_impl = None
            if getattr(module.__dict__.get("forward"), "__func__", None) is _forward_of_torch:
                del module.__dict__["forward"]


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile the repeated blocks of a model in place, or the whole model if it has none, and return the model.

    All blocks of a class share one compilation, which makes the first step of a deep model much faster.

    Args:
        module: The model.
        **compile_kwargs: Arguments of `torch.compile`.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16)
        >>> encoder = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        >>> encoder = compile_regions(encoder, backend="eager")
        >>> is_compiled(encoder.layers[2])
        True
    """
    blocks = list(repeated_blocks(module).values())
    if not blocks:
        _compile_whole(module, **compile_kwargs)
    compiled: dict[type, Callable[..., Any]] = {}
    for block in blocks:
        if type(block) not in compiled:
            compiled[type(block)] = _compiled_call(**compile_kwargs)
        _call_through(block, compiled[type(block)])
    return module


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of this module itself go through torch.compile."""
    return _is_optimized(module) or module._compiled_call_impl is not None


def has_compiled_regions(module: nn.Module) -> bool:
    """Whether modules inside this one are compiled separately."""
    return any(is_compiled(inside) for inside in module.modules() if inside is not module)


def eager_view(model: nn.Module) -> nn.Module:
    """Return the model without torch.compile: the model itself if nothing is compiled, else a view.

    A view shares parameters, buffers and modes with the model, whose own calls stay compiled.
    """
    return view(model, _inside, lambda module: module._compiled_call_impl is not None)


def _compile_whole(module: nn.Module, **compile_kwargs: Any) -> None:
    _call_through(module, _compiled_call(**compile_kwargs))


def _compiled_call(**compile_kwargs: Any) -> Callable[..., Any]:
    # isolate_recompiles: torch counts compilations per code object, and silently stops compiling after 8. Models
    # share code objects, for example the forward of mixed precision.
    arguments: dict[str, Any] = {"isolate_recompiles": True, **compile_kwargs}
    if arguments.get("backend", "inductor") == "inductor":
        from trainer_lib.processes.compile_workers import keep_compile_workers

        keep_compile_workers()
    return torch.compile(nn.Module._call_impl, **arguments)


def _call_through(module: nn.Module, compiled: Callable[..., Any]) -> None:
    # Like nn.Module.compile(), but bound to the module here, so that blocks can share one compiled function.
    module._compiled_call_impl = MethodType(compiled, module)
    if type(module).__module__.startswith("torch.nn.") and "forward" not in module.__dict__:
        module.__dict__["forward"] = MethodType(_forward_of_torch, module)


def _forward_of_torch(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # torch.compile starts at the first function outside of torch: without this one, a bare nn.Sequential or
    # nn.TransformerEncoderLayer would silently stay uncompiled.
    return type(self).forward(self, *args, **kwargs)


@functools.cache
def _keep_out_of_graphs(module: str) -> None:
    from torch._dynamo import trace_rules

    trace_rules.add(module)


def _is_ours(module: nn.Module) -> bool:
    # torch's own compile() sets a plain function.
    return isinstance(module._compiled_call_impl, MethodType)


def _is_optimized(module: nn.Module) -> bool:
    dynamo: Any = sys.modules.get("torch._dynamo")  # not imported: nothing is compiled
    return dynamo is not None and isinstance(module, dynamo.eval_frame.OptimizedModule)


def _inside(module: nn.Module) -> nn.Module:
    return module.get_submodule("_orig_mod") if _is_optimized(module) else module
