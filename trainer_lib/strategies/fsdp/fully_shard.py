"""`ShardedModel`: shards a model with `fully_shard`, and controls the synchronization of its blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage] - the base of all layers with running statistics

from trainer_lib.collectives.agreement import HeldError
from trainer_lib.foundation.errors import PreparationError
from trainer_lib.modules.activation_checkpointing import checkpoint_activations
from trainer_lib.modules.weights.names import canonical_name
from trainer_lib.modules.weights.tied_parameters import first_names
from trainer_lib.options.parallel.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.process_group import ProcessGroup
from trainer_lib.strategies.fsdp import materialize
from trainer_lib.strategies.fsdp.float8_gather import Float8Gather
from trainer_lib.strategies.fsdp.replicated_params import ReplicatedParameters
from trainer_lib.strategies.fsdp.unaliased import unalias_outputs
from trainer_lib.strategies.fsdp.unused_parameters import UnusedParameters
from trainer_lib.strategies.fsdp.wrap_policy import ignored_modules, modules_to_wrap
from trainer_lib.strategies.validate import check_has_whole_weights

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.nn import Parameter


@dataclass
class Splitting:
    """What is done to an emptied model before `fully_shard`: nothing.

    Args:
        shards: Whether `fully_shard` follows.
        is_done: Whether the model was loaded in parts, so that each rank keeps the values it has.
        runs_whole_model: Whether a backward of this rank goes through the whole model.
        replicas: The ranks that average the gradients of what is not sharded.
    """

    replicas: ProcessGroup
    shards: bool = True
    is_done: bool = False
    runs_whole_model: bool = True

    def apply(self, model: nn.Module) -> None:
        """Split the weights of a model in place."""

    def finish(self, model: nn.Module) -> None:
        """Do what needs the parameters that are trained."""


class ShardedModel:
    """A model whose weights are in parts: `fully_shard` was applied to it in place, or another splitting.

    Args:
        model: The model, on any device; on the meta device, if rank 0 can initialize it.
        plugin: The options of sharding.
        arguments: Arguments of `fully_shard` for each module.
        group: The process group of all ranks.
        device: The device of this rank.
        splitting: What is done before `fully_shard`.
    """

    def __init__(
        self,
        model: nn.Module,
        plugin: FullyShardedDataParallelPlugin,
        arguments: Mapping[str, Any],
        group: ProcessGroup,
        device: torch.device,
        splitting: Splitting,
    ) -> None:
        if not splitting.is_done:
            check_has_whole_weights(model)
        self.model = model
        self.withholds_gradients = False
        self._plugin, self._group, self._device = plugin, group, device
        ignored = ignored_modules(model, plugin.ignored_modules)
        wrapped = modules_to_wrap(model, plugin, ignored)
        if plugin.activation_checkpointing:
            offload = bool(plugin.activation_checkpointing_offload)
            checkpoint_activations(model, list(wrapped.values()), offload, option="activation_checkpointing")
        self._before = dict(model.named_parameters(remove_duplicate=False))
        if not splitting.is_done:
            self._materialize_on_rank_zero()
        kept = _kept_whole(model, ignored, arguments.get("mp_policy"))
        if splitting.shards:
            _check_types(model, list(wrapped.values()), kept)
        first = first_names(model)
        values = None if splitting.is_done else materialize.empty(model, kept)
        splitting.apply(model)
        offloads = plugin.offload.to_cpu
        in_fp8 = Float8Gather(model, plugin.reshard_after_forward, offloads) if splitting.shards else None
        self._blocks: list[FSDPModule] = []
        self.unused: UnusedParameters | None = None
        if splitting.shards:
            held = set(model.modules())  # stages of a pipeline drop the modules of other ranks
            inner = [module for module in wrapped.values() if module in held]
            self._blocks = _sharded(model, inner, plugin, {**arguments, "ignored_params": kept})
            if splitting.runs_whole_model:
                self.unused = UnusedParameters(self._blocks, splitting.replicas, device)
        if values is not None:
            self._fill(values, first)
        splitting.finish(model)
        if in_fp8 is not None:
            in_fp8.watch(model)
        _load_whole_weights(model)
        # Code that reads weights between two steps should see shards, even after a forward without a backward.
        model.register_forward_hook(self._after_forward, always_call=True)
        named = dict(model.named_parameters())
        self.whole: dict[str, Parameter] = {name: p for name, p in named.items() if not hasattr(p, "_local_tensor")}
        replicated = self.whole if splitting.shards else named
        self.replicas: ReplicatedParameters = ReplicatedParameters(replicated.values(), splitting.replicas)
        self.averaged_later: list[str] = [
            name for name, p in replicated.items() if self.replicas.are_averaged and p.requires_grad
        ]

    def take_replacements(self) -> dict[Tensor, nn.Parameter]:
        """Return the new parameter of each replaced one, and release the old ones, which are large. Call it once."""
        before, self._before = self._before, {}
        replacements: dict[Tensor, nn.Parameter] = {}
        for name, parameter in self.model.named_parameters():
            if before[name] is not parameter:
                for attribute, value in vars(before[name]).items():  # libraries set attributes on weights
                    setattr(parameter, attribute, value)
                replacements[before[name]] = parameter
        return replacements

    def set_synchronizing(self, synchronizes: bool) -> None:
        """Set whether backwards reduce the gradients over the ranks."""
        self.replicas.synchronizes = synchronizes
        for block in self._blocks:
            block.set_requires_gradient_sync(synchronizes, recurse=False)

    @property
    def synchronizes(self) -> bool:
        """Whether backwards reduce the gradients over the ranks."""
        return self.replicas.synchronizes

    def reshard(self) -> None:
        """Free whole weights that this rank has gathered."""
        for block in self._blocks:
            block.reshard()

    def shards_of_whole(self) -> dict[Tensor, Tensor]:
        """Return the shard of each weight that is gathered now, and free the whole weights."""
        before = list(self.model.named_parameters())
        self.reshard()
        after = dict(self.model.named_parameters())
        return {parameter: after[name] for name, parameter in before if after[name] is not parameter}

    def _after_forward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        del module, inputs
        if torch.is_grad_enabled():
            self.withholds_gradients: bool = bool(self._blocks) and not self.synchronizes
            self.replicas.watch(outputs)
        else:  # no backward follows that would reshard
            self.reshard()

    def _materialize_on_rank_zero(self) -> None:
        """Initialize rank 0's weights on the meta device; raise on all ranks if that fails or the models differ."""
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

    def _fill(self, values: Mapping[str, Tensor], first: Mapping[str, str]) -> None:
        shards_on = torch.device("cpu") if self._plugin.offload.to_cpu else self._device
        materialize.allocate(self.model, self._device, shards_on)
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        targets = {first.get(name, name): tensor.detach() for name, tensor in named}
        source = self._group if self._plugin.sync_module_states else None
        materialize.fill_held(targets, values, source, self._device)


def _load_whole_weights(model: nn.Module) -> None:
    """Let torch's `load_state_dict` load whole tensors into a sharded model, the same on all ranks."""
    for module in model.modules():
        if any(hasattr(parameter, "_local_tensor") for parameter in module.parameters(recurse=False)):
            module.register_load_state_dict_pre_hook(_take_shards)


def _take_shards(module: nn.Module, state: dict[str, Any], prefix: str, *arguments: Any) -> None:
    """Replace the whole tensors of a module in a state dict by what this rank holds of them."""
    from torch.distributed.tensor import distribute_tensor

    del arguments
    for name, parameter in module.named_parameters(recurse=False):
        target: Any = parameter
        value: Any = state.get(prefix + name)
        is_whole = isinstance(value, Tensor) and not hasattr(value, "_local_tensor")
        if is_whole and hasattr(target, "_local_tensor") and value.shape == target.shape:
            state[prefix + name] = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)


def _sharded(
    model: nn.Module, inner: Sequence[nn.Module], plugin: FullyShardedDataParallelPlugin, arguments: dict[str, Any]
) -> "list[FSDPModule]":
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    for module in (*inner, model):
        unalias_outputs(module)
    reshard = plugin.reshard_after_forward
    # Inner modules first: each one takes the parameters that no other has taken.
    blocks = [fully_shard(m, reshard_after_forward=reshard, **arguments) for m in reversed(inner)][::-1]
    # The root's parameters are needed at the start of the backward, so freeing them after the forward saves nothing.
    root = fully_shard(model, reshard_after_forward=False if reshard is False else None, **arguments)
    if callable(getattr(model, "generate", None)):  # that of an encoder and decoder calls the encoder by itself
        register_fsdp_forward_method(model, "generate")
    if plugin.forward_prefetch:
        for block, following in zip([root, *blocks], blocks, strict=False):
            block.set_modules_to_forward_prefetch([following])
    if plugin.backward_prefetch == "NO_PREFETCH":
        for block in (root, *blocks):
            block.set_modules_to_backward_prefetch([block])  # in place of the next one; its own are gathered by then
    return [root, *blocks]


def _kept_whole(model: nn.Module, ignored: set[nn.Module], policy: Any) -> set[nn.Parameter]:
    """Return the parameters that are not sharded: ignored ones, those that cannot be, and those of normalization."""
    kept = {parameter for module in ignored for parameter in module.parameters(recurse=False)}
    kept |= {parameter for parameter in model.parameters() if parameter.dim() == 0 or not parameter.numel()}
    return kept | _normalization_weights(model, policy)


def _normalization_weights(model: nn.Module, policy: Any) -> set[nn.Parameter]:
    """Return the weights of layers with running statistics, if FSDP would gather them in another type.

    torch's BatchNorm does not take 16-bit weights with 32-bit statistics; with both in 32 bits it takes 16-bit inputs.
    """
    layers = [m for m in model.modules() if isinstance(m, _NormBase) and m.running_mean is not None]
    weights = {weight for layer in layers for weight in layer.parameters(recurse=False)}
    gathered_as = getattr(policy, "param_dtype", None)
    return {weight for weight in weights if gathered_as not in (None, weight.dtype)}


def _check_types(model: nn.Module, inner: Sequence[nn.Module], kept: set[nn.Parameter]) -> None:
    """Raise if parameters that FSDP reduces together have several types; torch would raise in the first backward."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    taken: set[Tensor] = set(kept)
    for module in (*reversed(inner), model):
        reduced_together = [p for p in module.parameters() if p.requires_grad and p not in taken]
        taken.update(reduced_together)
        types: dict[torch.dtype, str] = {}
        for parameter in reduced_together:
            types.setdefault(parameter.dtype, names[parameter])
        if len(types) > 1:
            (first, name), (second, other_name), *_ = types.items()
            raise PreparationError(
                f"{name} is trained in {first} and {other_name} in {second}, and FSDP reduces them together "
                f"({type(module).__name__}). Convert the trained parameters to one type, for example by model.float()."
            )


def _refuse_meta(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise PreparationError(
                f"{name} is on the meta device, and with sync_module_states=False each rank starts from its own "
                "weights. Leave sync_module_states out, so that all ranks start from rank 0's weights."
            )


def _other_model(rank: int, first: list[Any], other: list[Any]) -> PreparationError:
    pairs = [(a, b) for a, b in zip(first, other, strict=False) if a != b]
    where = f"{pairs[0][0]} and {pairs[0][1]}" if pairs else f"{len(first)} and {len(other)} tensors"
    return PreparationError(
        f"Rank 0 and rank {rank} prepare different models: {where}. Build the same model on all ranks."
    )
