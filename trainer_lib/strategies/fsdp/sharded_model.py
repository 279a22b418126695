"""This file is one sharded model: how it is taken apart, and what is asked of all its blocks."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from trainer_lib.collectives.agreement import HeldError
from trainer_lib.foundation.errors import PreparationError
from trainer_lib.modules.activation_checkpointing import checkpoint_activations
from trainer_lib.modules.names import canonical_name
from trainer_lib.options.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.process_group import ProcessGroup
from trainer_lib.strategies.fsdp import materialize
from trainer_lib.strategies.fsdp.replicated_params import Replicas
from trainer_lib.strategies.fsdp.wrap_policy import ignored_modules, modules_to_wrap
from trainer_lib.strategies.validate import refuse_what_is_not_whole

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class ShardedModel:
    """A model that `fully_shard` was applied to, in place.

    Args:
        model: The model, on any device; on the meta device, if the main process can give it values.
        plugin: How to shard.
        arguments: What `fully_shard` is told for each module.
        group: The processes.
        device: The device of this one.
    """

    def __init__(
        self,
        model: nn.Module,
        plugin: FullyShardedDataParallelPlugin,
        arguments: Mapping[str, Any],
        group: ProcessGroup,
        device: torch.device,
    ) -> None:
        refuse_what_is_not_whole(model)
        self.model = model
        self.withholds_gradients = False
        self._plugin, self._group, self._device = plugin, group, device
        ignored = ignored_modules(model, plugin.ignored_modules)
        wrapped = modules_to_wrap(model, plugin, ignored)
        if plugin.activation_checkpointing:
            checkpoint_activations(model, list(wrapped.values()))
        self._before = dict(model.named_parameters())
        self._agree()
        kept = {p for module in ignored for p in module.parameters(recurse=False)}
        kept |= {p for p in model.parameters() if p.dim() == 0 or not p.numel()}  # nothing to share
        kept |= _beside_statistics(model, arguments.get("mp_policy"))
        _check_types(model, list(wrapped.values()), kept)
        values = materialize.empty(model, kept)
        self._blocks = _sharded(model, list(wrapped.values()), plugin, {**arguments, "ignored_params": kept})
        self._fill(values)
        # Whatever a forward has left whole, all that looks at weights between two steps should see shards.
        model.register_forward_hook(self._after_forward, always_call=True)
        self.whole = {name: p for name, p in model.named_parameters() if not hasattr(p, "_local_tensor")}
        self.replicas = Replicas(self.whole.values(), group)

    def successors(self) -> dict[Tensor, nn.Parameter]:
        """Return which parameter took the place of each one that was replaced; once, since the old ones are large."""
        before, self._before = self._before, {}
        found: dict[Tensor, nn.Parameter] = {}
        for name, parameter in self.model.named_parameters():
            if before[name] is not parameter:
                for note, value in vars(before[name]).items():  # libraries leave some on a weight
                    setattr(parameter, note, value)
                found[before[name]] = parameter
        return found

    def set_synchronizing(self, synchronizes: bool) -> None:
        """Say whether backwards reduce the gradients over the processes."""
        self.replicas.synchronizes = synchronizes
        for block in self._blocks:
            block.set_requires_gradient_sync(synchronizes, recurse=False)

    @property
    def synchronizes(self) -> bool:
        """Whether backwards reduce the gradients over the processes."""
        return self.replicas.synchronizes

    def reshard(self) -> None:
        """Drop what is whole here of the weights."""
        for block in self._blocks:
            block.reshard()

    def shards_of_whole(self) -> dict[Tensor, Tensor]:
        """Return the shard of each weight that is whole here now, and drop what is whole."""
        before = list(self.model.named_parameters())
        self.reshard()
        after = dict(self.model.named_parameters())
        return {parameter: after[name] for name, parameter in before if after[name] is not parameter}

    def _after_forward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        del module, inputs
        if torch.is_grad_enabled():
            self.withholds_gradients = not self.synchronizes
            self.replicas.watch(outputs)
        else:  # no backward will come that would do it
            self.reshard()

    def _agree(self) -> None:
        """Give the main process's weights values, and raise on all processes if one cannot go on."""
        error = HeldError("prepare", PreparationError)
        with error.held():
            if not self._plugin.sync_module_states:
                _refuse_meta(self.model)
            elif self._group.rank == 0:
                materialize.materialize(self.model, self._plugin.param_init_fn)
        signature = [
            (canonical_name(name), tuple(tensor.shape), str(tensor.dtype))
            for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers())
        ]
        by_rank = self._group.all_gather_objects((error.report, signature))
        error.raise_first([report for report, _ in by_rank])
        first = by_rank[0][1]
        for rank, (_, other) in enumerate(by_rank):
            if other != first:
                raise _other_model(rank, first, other)

    def _fill(self, values: Mapping[str, Tensor]) -> None:
        shards_on = torch.device("cpu") if self._plugin.offload.to_cpu else self._device
        materialize.allocate(self.model, self._device, shards_on)
        targets = {name: p.detach() for name, p in self.model.named_parameters()} | dict(self.model.named_buffers())
        source = self._group if self._plugin.sync_module_states else None
        materialize.fill(targets, values, source, self._device)


def _sharded(
    model: nn.Module, inner: Sequence[nn.Module], plugin: FullyShardedDataParallelPlugin, arguments: dict[str, Any]
) -> "list[FSDPModule]":
    from torch.distributed.fsdp import fully_shard

    reshard = plugin.reshard_after_forward
    # Inner ones first: each takes what is not taken yet.
    blocks = [fully_shard(m, reshard_after_forward=reshard, **arguments) for m in reversed(inner)][::-1]
    # What the whole model shares is needed as its backward begins, so freeing it after the forward saves nothing.
    root = fully_shard(model, reshard_after_forward=False if reshard is False else None, **arguments)
    if plugin.forward_prefetch:
        for block, following in zip([root, *blocks], blocks, strict=False):
            block.set_modules_to_forward_prefetch([following])
    return [root, *blocks]


def _beside_statistics(model: nn.Module, policy: Any) -> set[nn.Parameter]:
    """Return the weights of layers with running statistics, which compute with both, if gathering changed their type.

    torch knows no BatchNorm of 16-bit weights and statistics in 32 bits; with both in 32 it takes 16-bit inputs.
    """
    layers = [m for m in model.modules() if isinstance(m, _NormBase) and m.running_mean is not None]
    weights = {weight for layer in layers for weight in layer.parameters(recurse=False)}
    gathered_as = getattr(policy, "param_dtype", None)
    return {weight for weight in weights if gathered_as not in (None, weight.dtype)}


def _check_types(model: nn.Module, inner: Sequence[nn.Module], kept: set[nn.Parameter]) -> None:
    """Raise where what is reduced together is of several types, which torch would tell in the first backward only."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    taken: set[Tensor] = set(kept)
    for module in (*reversed(inner), model):
        own = [p for p in module.parameters() if p.requires_grad and p not in taken]
        taken.update(own)
        types: dict[torch.dtype, str] = {}
        for parameter in own:
            types.setdefault(parameter.dtype, names[parameter])
        if len(types) > 1:
            (first, one), (second, other), *_ = types.items()
            raise PreparationError(
                f"{one} is trained in {first} and {other} in {second}, and FSDP reduces them together "
                f"({type(module).__name__}). Bring what is trained to one type, as by model.float()."
            )


def _refuse_meta(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise PreparationError(
                f"{name} is on the meta device, and sync_module_states=False lets each process start from its own "
                "weights. Leave sync_module_states out, and all start from the main process's."
            )


def _other_model(rank: int, first: list[Any], other: list[Any]) -> PreparationError:
    pairs = [(a, b) for a, b in zip(first, other, strict=False) if a != b]
    where = f"{pairs[0][0]} and {pairs[0][1]}" if pairs else f"{len(first)} and {len(other)} tensors"
    return PreparationError(
        f"The main process and process {rank} prepare different models: {where}. Build the same model on all."
    )
