"""Weights of fp8 layers, gathered by FSDP in fp8: half the bytes of bf16."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.foundation.errors import UnsupportedError
from trainer_lib.foundation.tensors.local_shards import local_shard


class Float8Gather:
    """Wraps the weights of layers whose configuration has `enable_fsdp_float8_all_gather`.

    Their scales are computed by one reduction for all, in the first forward after the weights changed.

    Args:
        model: The emptied model, before `fully_shard`.
        reshard: The plugin's `reshard_after_forward`.
        offloads: Whether shards stay in the memory of the host.
    """

    def __init__(self, model: nn.Module, reshard: Any, offloads: bool) -> None:
        self._layers: list[Any] = [module for module in model.modules() if _asks(module)]
        self._offloads = offloads
        self._versions: list[tuple[int, ...]] = []
        if not self._layers:
            return
        if isinstance(reshard, int) and not isinstance(reshard, bool):
            raise UnsupportedError(
                f"enable_fsdp_float8_all_gather=True does not work with reshard_after_forward={reshard}: torch gathers "
                "in fp8 from all ranks only. Use reshard_after_forward=True or False."
            )
        self._wrap(model)

    def watch(self, model: nn.Module) -> None:
        """Compute scales before forwards of the sharded model, if its weights changed; call it after `fully_shard`."""
        if self._layers and not self._offloads and all(_is_on_every_rank(layer.weight) for layer in self._layers):
            model.register_forward_pre_hook(self._compute_scales, prepend=True)

    def _wrap(self, model: nn.Module) -> None:
        from torchao.float8.fsdp_utils import (  # pyright: ignore[reportMissingImports]
            WeightWithDynamicFloat8CastTensor,
        )

        users = Counter(parameter for module in model.modules() for parameter in module.parameters(recurse=False))
        taken = Counter(layer.weight for layer in self._layers)
        # A weight that an embedding has too is needed in full.
        self._layers = [layer for layer in self._layers if users[layer.weight] == taken[layer.weight]]
        wrapped: dict[Tensor, nn.Parameter] = {}
        for layer in self._layers:
            weight = layer.weight
            if weight not in wrapped:
                target = layer.config.cast_config_weight.target_dtype
                shard = WeightWithDynamicFloat8CastTensor(weight.detach(), layer.linear_mm_config, target)
                wrapped[weight] = nn.Parameter(shard, requires_grad=weight.requires_grad)
            layer.weight = wrapped[weight]

    @torch.no_grad()
    def _compute_scales(self, module: nn.Module, inputs: Any) -> None:
        del inputs
        versions = [_versions(layer.weight) for layer in self._layers]
        if versions == self._versions:
            return
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp  # pyright: ignore[reportMissingImports]

        precompute_float8_dynamic_scale_for_fsdp(module)
        self._versions = versions


def _asks(module: Any) -> bool:
    return hasattr(module, "linear_mm_config") and module.config.enable_fsdp_float8_all_gather


def _versions(weight: Any) -> tuple[int, ...]:
    """Return what changes with each change of a weight, through whichever of its wrappers it was made."""
    return tuple(tensor._version for tensor in (weight, getattr(weight, "_local_tensor", weight), local_shard(weight)))


def _is_on_every_rank(weight: Any) -> bool:
    """Whether no rank's shard is empty: ranks have to find out alike that weights changed."""
    if not hasattr(weight, "_local_tensor"):
        return False
    ranks = 1
    for size, placement in zip(weight.device_mesh.shape, weight.placements, strict=True):
        ranks *= size if placement.is_shard() else 1
    rows = weight.shape[0]
    return (ranks - 1) * -(-rows // ranks) < rows
