"""Activation offload without values: what waits in host memory takes none of the device's."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.modules.blocks import repeated_blocks
from trainer_lib.modules.forwards import wrap_forward
from trainer_lib.modules.training_memory import local_part

_SMALLEST = 16 * 1024  # bytes of a tensor that is moved
_ON_DEVICE = 2  # blocks whose activations are on the device: the one that runs, and the one that is copied
_FUNCTION, _SWITCH = "_gradient_checkpointing_func", "gradient_checkpointing"  # of transformers' layers
_CASTS = ("ToCopy", "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze")


class HostActivations:
    """Lets what the blocks of a model save for the backward take no memory until the backward.

    Attributes:
        on_device: The bytes of the activations that are on the device while they are copied.
    """

    def __init__(self) -> None:
        self.on_device = 0
        self._weights: set[int] = set()

    def install(self, model: nn.Module) -> None:
        """Move what the blocks of a model save, or what their recomputation starts from."""
        self._weights = {id(local_part(p).untyped_storage()) for p in (*model.parameters(), *model.buffers())}
        for block in repeated_blocks(model).values():
            recomputes: list[Any] = [m for m in block.modules() if getattr(m, _SWITCH, False) and hasattr(m, _FUNCTION)]
            for module in recomputes:
                setattr(module, _FUNCTION, functools.partial(self._run, getattr(module, _FUNCTION)))
            if not recomputes:
                wrap_forward(block, self._around)

    def _around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def moving(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._run(forward, module, *args, **kwargs)

        return moving

    def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        moved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Any:
            local = local_part(tensor)
            storage = local.untyped_storage()
            if local.nbytes < _SMALLEST or id(storage) in self._weights or _is_of_weight(tensor):
                return tensor.detach()
            moved[id(storage)] = storage.nbytes()
            return _Waiting(tensor, local)

        with torch.autograd.graph.saved_tensors_hooks(pack, _restored):
            output = function(*args, **kwargs)
        self.on_device: int = max(self.on_device, _ON_DEVICE * sum(moved.values()))
        return output


class _Waiting:
    """A tensor in host memory: its shape and type."""

    def __init__(self, tensor: Tensor, local: Tensor) -> None:
        self._shape, self._stride, self._type = local.shape, local.stride(), local.dtype
        self._distributed: Any = None
        if tensor is not local:
            like: Any = tensor
            self._distributed = (like.device_mesh, like.placements, tensor.shape, tensor.stride())
        self._copy: Callable[[], Tensor | None] = lambda: None

    def tensor(self) -> Tensor:
        """Return the tensor on the device."""
        copy = self._copy()
        if copy is None:
            copy = torch.empty_strided(self._shape, self._stride, dtype=self._type)
            self._copy = weakref.ref(copy)
        if self._distributed is None:
            return copy
        from torch.distributed.tensor import DTensor

        mesh, placements, shape, stride = self._distributed
        return DTensor.from_local(copy, mesh, placements, run_check=False, shape=shape, stride=stride)


def _restored(packed: Any) -> Tensor:
    return packed.tensor() if isinstance(packed, _Waiting) else packed


def _is_of_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a view or a copy in another type of a trained weight, which stays on the device."""
    node: Any = tensor.grad_fn
    while node is not None and node.name() in {f"{name}Backward0" for name in _CASTS}:
        node = node.next_functions[0][0]
    return node is not None and isinstance(getattr(node, "variable", None), nn.Parameter)
