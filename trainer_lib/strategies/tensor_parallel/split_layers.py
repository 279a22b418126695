"""Split layers: linear layers, embeddings and norms that compute with plain tensors what this rank has a part of.

Their weights are DTensors, for checkpoints, norms and optimizers. Operations on DTensors look up torch's rules of
layouts, which takes longer than a small product of matrices, and far longer the first time. Here the layout of each
tensor is known, and `torch.compile` sees plain operations.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from trainer_lib.modules.weights.tensor_slots import parameter_slots
from trainer_lib.strategies.fsdp.unaliased import unaliased
from trainer_lib.strategies.tensor_parallel import experts
from trainer_lib.strategies.tensor_parallel.layouts import (
    convert_input,
    convert_output,
    converted,
    final_layout,
    local_part,
)
from trainer_lib.strategies.tensor_parallel.styles import LOGITS, PARTIAL, SPLIT, WHOLE, Style, features, is_conv1d

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def install(module: nn.Module, style: Style, mesh: "DeviceMesh", inputs: "SharedInput") -> None:
    """Have a module whose weights were split compute with them, and convert what goes in and what comes out.

    Args:
        module: The module.
        style: How it was split.
        mesh: The ranks.
        inputs: The input that the layers of a model share; one object for all of them.
    """
    if style.splits == "experts":
        experts.install(module, mesh)
    elif style.gives is not None and is_known(module, style):
        module.forward = partial(SplitLayer(module, style, mesh, inputs).forward, module)
    else:
        module.register_forward_pre_hook(convert_input(style, mesh), with_kwargs=True)
        if style.gives is not None:
            module.register_forward_hook(convert_output(style.gives, mesh))


def is_known(module: nn.Module, style: Style) -> bool:
    """Whether parts of weights give parts of the output, or of the sum that it is: not in a forward of the user's."""
    own = parameter_slots(module)
    if "forward" in vars(module) or set(own) - {"weight", "bias"}:
        return False
    kind = type(module)
    if style.splits is None:  # each position of a sequence is normalized by itself
        if isinstance(module, nn.LayerNorm | nn.RMSNorm) and len(module.normalized_shape) > 1:
            return False
        return kind.forward is nn.LayerNorm.forward or _is_of(kind, nn.RMSNorm.forward, "RMSNorm")
    if "weight" not in own:  # it is computed from others
        return False
    if isinstance(module, nn.Embedding):
        is_special = module.sparse or module.max_norm is not None or module.scale_grad_by_freq
        return _is_of(kind, nn.Embedding.forward, "ScaledWordEmbedding") and not is_special
    return kind.forward is nn.Linear.forward or (is_conv1d(module) and kind.__module__ == "transformers.pytorch_utils")


def _is_of(kind: type[nn.Module], forward: Callable[..., Any], ending: str) -> bool:
    """Whether a class has a forward of torch's, or is one of transformers' with a name that says what it computes."""
    from_transformers = kind.__module__.startswith("transformers.models.") and kind.__name__.endswith(ending)
    return kind.forward is forward or from_transformers


class SplitLayer:
    """What the forward of a split layer knows.

    Args:
        module: The layer, with its weights split.
        style: How it is split.
        mesh: The ranks.
        inputs: The input that the layers of a model share.
    """

    def __init__(self, module: nn.Module, style: Style, mesh: "DeviceMesh", inputs: "SharedInput") -> None:
        self._style, self._mesh, self._gives = style, mesh, str(style.gives)
        self._rank, self._group = mesh.get_local_rank(), mesh.get_group()
        self._has = {"out": SPLIT, "in": PARTIAL, None: style.uses}[style.splits]  # of the output, before a message
        self._rows, self._columns = (0, 0) if style.splits is None else features(module)
        self._shared_input = inputs
        if style.splits is None:
            self._compute: Callable[[Any, Tensor], Tensor] = self._normalized
        else:
            self._compute = self._embedded if isinstance(module, nn.Embedding) else self._multiplied

    def __deepcopy__(self, memo: Any) -> "SplitLayer":
        """Return the same object: copies of a module share its ranks."""
        del memo
        return self

    def forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Compute what the module does, with this rank's parts of its weights."""
        (value,) = args or kwargs.values()
        output = self._compute(module, value)
        gives = final_layout(self._gives, module)
        if self._has == PARTIAL and gives == WHOLE:
            return _Sum.apply(output, self._group)
        if self._has == gives:
            return unaliased(output)
        whole = converted(output, self._has, gives, self._mesh, self._columns if self._has == SPLIT else None)
        return whole if gives == LOGITS else unaliased(whole.to_local())

    def _multiplied(self, module: Any, value: Tensor) -> Tensor:
        value = self._entered(value, sums=self._has == SPLIT)
        weight, bias = local_part(module.weight), None if module.bias is None else local_part(module.bias)
        if bias is not None and self._has == PARTIAL:
            bias = _OnOneRank.apply(bias, self._rank == 0)
        if is_conv1d(module):
            assert bias is not None
            rows = torch.addmm(bias, value.reshape(-1, value.shape[-1]), weight)
            return rows.view(*value.shape[:-1], weight.shape[1])
        return linear(value, weight, bias)

    def _entered(self, value: Any, sums: bool = False) -> Tensor:
        """Return what the layer computes with; its gradient may be a sum of what the ranks compute."""
        style = self._style
        if style.takes != style.uses or hasattr(value, "_local_tensor"):
            return local_part(converted(value, style.takes, style.uses, self._mesh), PARTIAL if sums else None)
        return self._shared_input.summed(value, self._group) if sums else value

    def _embedded(self, module: Any, indices: Tensor) -> Tensor:
        weight, padding = local_part(module.weight), module.padding_idx
        if self._has != PARTIAL:
            return _forward_with(module, indices, {"weight": weight}, {})
        count = weight.shape[0]
        first = min(self._rank * -(-self._rows // self._mesh.size()), self._rows)
        rows = indices - first
        is_foreign = (rows < 0) | (rows >= count)
        padding = padding - first if padding is not None and first <= padding < first + count else None
        given = rows.masked_fill(is_foreign, 0)
        output = _forward_with(module, given, {"weight": weight}, {"padding_idx": padding})
        return output.masked_fill(is_foreign.unsqueeze(-1), 0.0)

    def _normalized(self, module: nn.Module, value: Tensor) -> Tensor:
        # Each rank has gradients of other positions or heads.
        parts = {
            name: local_part(weight, PARTIAL) for name, weight in parameter_slots(module).items() if weight is not None
        }
        return _forward_with(module, self._entered(value), parts, {})


def _forward_with(module: nn.Module, value: Tensor, weights: dict[str, Any], attributes: dict[str, Any]) -> Tensor:
    """Run the forward of a module's class with other weights and attributes."""
    parameters: dict[str, Any] = parameter_slots(module)  # type: ignore[assignment]  # the others are no Parameters
    whole, before = dict(parameters), {name: getattr(module, name) for name in attributes}
    try:
        parameters.update(weights)
        vars(module).update(attributes)
        return type(module).forward(module, value)
    finally:
        parameters.update(whole)
        vars(module).update(before)


class SharedInput:
    """The input of the last layer, whose gradient is summed over the ranks once if the next layers have it too.

    Queries, keys and values of attention have one input, and so have the two inner layers of a gated MLP: their
    gradients are added up on each rank before one message, instead of a message for each layer.
    """

    def __init__(self) -> None:
        self._seen: tuple[Tensor, Tensor, int] | None = None

    def summed(self, value: Tensor, group: Any) -> Tensor:
        """Return a tensor that a layer computes with."""
        if torch.compiler.is_compiling():
            return _SumGradients.apply(value, group, None)  # type: ignore[return-value]
        if not (value.requires_grad and torch.is_grad_enabled()):
            return value
        if self._seen is not None:
            seen, given, version = self._seen
            if seen is value and version == value._version:
                return given
        given: Any = _SumGradients.apply(value, group, ref(self))
        self._seen = value, given, value._version
        return given

    def forget(self) -> None:
        """Let the tensor go: its backward runs."""
        self._seen = None


class _SumGradients(torch.autograd.Function):
    """Returns its input; the backward adds up the gradients that the ranks compute of it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any, inputs: "ref[SharedInput] | None") -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group, ctx.inputs = group, inputs
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs = None if ctx.inputs is None else ctx.inputs()
        if inputs is not None:
            inputs.forget()
        return _Sum.apply(gradient, ctx.group), None, None


class _Sum(torch.autograd.Function):
    """Adds up what the ranks have; the backward returns the gradient, which all of them have."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        total = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _SumGradients.apply(gradient, ctx.group, None), None


class _OnOneRank(torch.autograd.Function):
    """Returns its input on one rank and zeros on the others; all of them have the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, is_here: bool) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        del ctx
        return value.view_as(value) if is_here else torch.zeros_like(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        del ctx
        return gradient, None
