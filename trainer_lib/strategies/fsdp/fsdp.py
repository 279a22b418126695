"""`FSDP`: each rank holds a shard of each weight, and gathers whole weights only to compute with them (FSDP2)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from trainer_lib.foundation.device_types import can_pin_memory
from trainer_lib.foundation.errors import ConfigurationError, PreparationError, UnsupportedError
from trainer_lib.options.parallel.fsdp1_translation import WholeState
from trainer_lib.options.parallel.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.parallelism_config import ParallelismConfig
from trainer_lib.process_group import ProcessGroup
from trainer_lib.strategies.averages_in_flight import AveragesInFlight
from trainer_lib.strategies.base import JoinOutcome, Leftovers, Strategy
from trainer_lib.strategies.clip_grad_norm import clamp_gradients, clip_norm, total_grad_norm
from trainer_lib.strategies.fsdp import sharded_state
from trainer_lib.strategies.fsdp.fully_shard import ShardedModel, Splitting
from trainer_lib.strategies.fsdp.unbound_optimizers import refuse_unbound
from trainer_lib.strategies.initial_states import is_initial
from trainer_lib.strategies.shard_updates import update_shards

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Their steps mix shards with plain tensors, or call kernels that take no shards.
_FOR_WHOLE_WEIGHTS = {
    "bitsandbytes": '8-bit states of torchao (optimizer="adamw_torch_8bit" in a Trainer)',
    "transformers": 'torch.optim.Adafactor (optimizer="adafactor")',
}
_COMPUTE_TYPES = {"bf16": torch.bfloat16, "bf16-true": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


class FSDP(Strategy):
    """`torch.distributed.fsdp.fully_shard`, starting from rank 0's weights.

    Args:
        group: The process group of all ranks.
        device: The device of this rank.
        plugin: The options of sharding.
        parallelism: How many ranks replicate a model, and how many share one copy.
        mixed_precision: The precision to compute in.
    """

    method = "FSDP"  # its name in errors
    gathers_to_rank_zero = True
    needs_lockstep = True

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        plugin: FullyShardedDataParallelPlugin,
        parallelism: ParallelismConfig,
        mixed_precision: str = "no",
    ) -> None:
        super().__init__(group, device)
        self.plugin = plugin
        self._mixed_precision = mixed_precision
        self._parallelism = parallelism
        self._models: list[ShardedModel] = []
        # Maps each parameter that sharding replaced to its shard, for optimizers that were created before.
        self._replacements: Any = WeakTensorKeyDictionary()
        self._step_hooks: list[Any] = []
        self._unbound: Any = None  # the hook that refuses optimizers that were not prepared
        self._flight = AveragesInFlight(group, device)

    @property
    def writes_shards(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether a checkpoint consists of shards; the plugin's `set_state_dict_type` may change it between saves."""
        return self.plugin.writes_shards

    def place(self, model: nn.Module) -> nn.Module:
        """Leave the model on its device: only its shards move."""
        return model

    def distribute(self, model: nn.Module, evaluation_mode: bool = False) -> nn.Module:
        """Shard the model, in place, for evaluation too: it may be too large for one device."""
        del evaluation_mode
        bare = self.bare(model)
        splitting = self._splitting(bare)
        sharded = ShardedModel(bare, self.plugin, self._arguments(), self.group, self.device, splitting)
        self._models.append(sharded)
        self._replacements.update(sharded.take_replacements())
        if self._unbound is None and self._replacements:
            self._unbound = refuse_unbound(self._replacements, self.method)
            finalize(self, self._unbound.remove)
        return model

    def rebind_parameters(self, optimizer: Optimizer) -> None:
        """Let an optimizer that was created before its model was sharded train the shards.

        Raises:
            PreparationError: If the optimizer already has a state.
            UnsupportedError: If its class cannot update shards.
        """
        if not any(known is optimizer for known, _ in self._step_hooks):
            self._step_hooks.append((optimizer, optimizer.register_step_post_hook(self._after_step)))
        takes_any = update_shards(optimizer)
        for settings in optimizer.param_groups:
            parameters: list[Tensor] = settings["params"]
            self._shard_initial_states(optimizer, parameters)
            # In place: some optimizers hold a second reference to the list.
            parameters[:] = self.current_parameters(parameters)
            if not takes_any:
                self._refuse_mixed(optimizer, settings)
        self._after_step()
        self._refuse_for_whole_weights(optimizer)

    def _shard_initial_states(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Move the states that the optimizer's constructor made for whole weights (Adagrad's sums) to their shards."""
        for whole in parameters:
            state: dict[str, Any] | None = optimizer.state.get(whole)
            if not state or whole not in self._replacements:
                continue
            if not is_initial(state):
                raise PreparationError(
                    f"This {type(optimizer).__name__} has a state for whole weights (it has stepped, or its state was "
                    "loaded), and its model is sharded now. Create a new one after prepare(model)."
                )
            shard = self._replacements[whole]
            optimizer.state[shard] = {
                name: value if name == "step" else torch.full_like(shard, value.flatten()[0].item())
                for name, value in optimizer.state.pop(whole).items()
            }

    def current_parameters(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return the shards of weights from before sharding, and of those that a forward has left whole."""
        parameters = [self._replacements.get(p, p) for p in parameters] if self._replacements else list(parameters)
        whole = {parameter for model in self._models for parameter in model.whole.values()}
        if all(hasattr(p, "_local_tensor") or p in whole for p in parameters):
            return parameters
        shards = {whole: shard for model in self._models for whole, shard in model.shards_of_whole().items()}
        return [shards.get(parameter, parameter) for parameter in parameters]

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context in which `backward` accumulates whole gradients on this rank, without reducing them."""
        return _Synchronizing(self._sharded(model), False)

    def force_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context in which `backward` reduces, even if its forward ran in `no_sync`."""
        return _Synchronizing(self._sharded(model), True)

    def withholds_gradients(self) -> bool:
        """Whether unreduced gradients are stored with the gathered weights, not with the shards."""
        return any(model.withholds_gradients for model in self._models)

    def why_gradients_are_late(self) -> str | None:
        """Return which weights have gradients that are averaged after the backward, because they are not sharded."""
        names = [name for model in self._models for name in model.averaged_later]
        if not names:
            return None
        more = ", …" if len(names) > 3 else ""
        return (
            f"the gradients of weights that are not sharded are averaged after it: {', '.join(names[:3])}{more}. Shard "
            "all weights over all ranks (dp_shard_size)"
        )

    def send_with_gradients(self, values: Sequence[float | Tensor]) -> None:
        """Start an all-reduce of `values` now, so that it overlaps with `backward`."""
        self._flight.begin(values)

    def received_averages(self) -> Sequence[float | Tensor]:
        """Return the averages, once the all-reduce is complete."""
        return self._flight.averages()

    def join(
        self, joinables: Sequence[Any], leftovers: Callable[[], Leftovers] | None
    ) -> AbstractContextManager[JoinOutcome]:
        """Raise: each forward gathers shards from all ranks, so a rank without data cannot stop."""
        raise UnsupportedError(
            f"join_uneven_inputs needs a whole model on each rank, and {self.method} shards it. Read equally many "
            "batches on all ranks: leave even_batches on, or give the loader drop_last=True."
        )

    def stay_local(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Raise: no rank has a whole model."""
        raise _no_local_training(self.method)

    def average_weights(self, model: nn.Module) -> None:
        """Raise: no rank has a whole model."""
        raise _no_local_training(self.method)

    def clip_grad_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Clip the gradients of shards and of whole weights to one total norm."""
        return clip_norm(parameters, max_norm, norm_type, self.device)

    def clip_grad_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clamp each gradient to ±`clip_value`."""
        clamp_gradients(parameters, clip_value)

    def grad_norm(self, parameters: Iterable[Tensor], norm_type: float, *, in_double: bool = False) -> Tensor:
        """Return the norm over all reduced gradients; unreduced gradients of an unfinished window do not count."""
        return total_grad_norm(parameters, norm_type, self.device, in_double)

    def model_state(self, model: nn.Module, *, whole: bool = True) -> dict[str, Any]:
        """Return the model's tensors: whole tensors on rank 0, or this rank's shards."""
        return sharded_state.model_state(self.bare(model), self.group, self.device, WholeState() if whole else None)

    def exported_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the model's whole tensors, where the plugin's `state_dict_config` wants them."""
        return sharded_state.model_state(self.bare(model), self.group, self.device, self.plugin.whole_state)

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole tensors from rank 0, or this rank's shards."""
        sharded_state.load_model_state(self.bare(model), state, self.group, self.device, strict)

    def optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, whole: bool = True
    ) -> dict[str, Any]:
        """Return the optimizer's state by parameter names: whole tensors on rank 0, or this rank's shards."""
        models = [self.bare(model) for model in models]
        return sharded_state.optimizer_state(optimizer, models, self.group, self.device, whole)

    def load_optimizer_state(self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]) -> None:
        """Load whole tensors from rank 0, or this rank's shards."""
        models = [self.bare(model) for model in models]
        sharded_state.load_optimizer_state(optimizer, models, state, self.group, self.device)

    def state_dict(self) -> dict[str, Any]:
        """Return, for each model, whether ranks tell each other which parameters they have not used."""
        watches = [None if model.unused is None else model.unused.watches for model in self._models]
        return {"watches_unused": watches} if any(value is not None for value in watches) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as before the save: the first backward after it may use other parameters than the first of all."""
        for model, watches in zip(self._models, state.get("watches_unused", ()), strict=False):
            if model.unused is not None:
                model.unused.watches = watches

    def release(self) -> None:
        """Release the models and optimizers."""
        for model in self._models:
            model.replicas.release()
        for _, hook in self._step_hooks:
            hook.remove()
        self._release_unbound()
        self._models.clear()
        self._step_hooks.clear()
        self._replacements.clear()
        self.send_with_gradients([])

    def _splitting(self, model: nn.Module) -> Splitting:
        """Return what is done to the emptied model before `fully_shard`."""
        del model
        return Splitting(replicas=self.group)

    def _arguments(self) -> dict[str, Any]:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

        arguments: dict[str, Any] = {"mesh": _mesh(self._parallelism, self.device, self.plugin)}
        if self.plugin.mixed_precision_policy is not None:
            arguments["mp_policy"] = self.plugin.mixed_precision_policy
        elif self._mixed_precision in _COMPUTE_TYPES:
            # Reduce in 32 bits: sums of 16-bit gradients over many ranks lose too much precision.
            arguments["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=_COMPUTE_TYPES[self._mixed_precision], reduce_dtype=torch.float32
            )
        if self.plugin.offload.to_cpu:
            pins = self.plugin.offload.pin_memory and can_pin_memory()
            arguments["offload_policy"] = CPUOffloadPolicy(pin_memory=pins)
        return arguments

    def _sharded(self, model: nn.Module) -> ShardedModel | None:
        inner = self.bare(model)
        return next((sharded for sharded in self._models if sharded.model is inner), None)

    def _refuse_for_whole_weights(self, optimizer: Optimizer) -> None:
        """Raise for an optimizer of a library whose optimizers would fail at their first step."""
        packages = {kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__}
        instead = next((better for package, better in _FOR_WHOLE_WEIGHTS.items() if package in packages), None)
        if instead and any(hasattr(p, "_local_tensor") for group in optimizer.param_groups for p in group["params"]):
            raise UnsupportedError(
                f"{type(optimizer).__name__} updates whole weights, and {self.method} shards or splits them. Use "
                f"{instead}, or whole weights on each rank (DDP)."
            )

    def _refuse_mixed(self, optimizer: Optimizer, settings: dict[str, Any]) -> None:
        """Raise for a fused or foreach optimizer whose group has both shards and whole weights."""
        at_once = [name for name in ("fused", "foreach") if settings.get(name)]
        # torch treats parameters without dimensions like shards.
        trained: set[Tensor] = {parameter for parameter in settings["params"] if parameter.dim()}
        # Parameters of a model that is not prepared yet do not count.
        names = [name for model in self._models for name, parameter in model.whole.items() if parameter in trained]
        if at_once and names and any(hasattr(parameter, "_local_tensor") for parameter in trained):
            raise PreparationError(
                f"{type(optimizer).__name__}({at_once[0]}=True) cannot update shards and whole weights in one "
                f"parameter group. These weights stay whole: {', '.join(names)}. Put them into a separate parameter "
                f"group, or leave {at_once[0]} out."
            )

    def _after_step(self, *arguments: Any) -> None:
        # A forward without a backward may have left weights whole; a step updates only the shards.
        del arguments
        if self._unbound is not None and not self._replacements:
            self._release_unbound()
        for model in self._models:
            model.reshard()

    def _release_unbound(self) -> None:
        if self._unbound is not None:
            self._unbound.remove()
            self._unbound = None


class _Synchronizing:
    """The context in which a model's backwards reduce gradients, or do not."""

    __slots__ = ("_before", "_model", "_synchronizes")

    def __init__(self, model: ShardedModel | None, synchronizes: bool) -> None:
        self._model, self._synchronizes, self._before = model, synchronizes, True

    def __enter__(self) -> None:
        if self._model is not None:
            self._before = self._model.synchronizes
            self._model.set_synchronizing(self._synchronizes)

    def __exit__(self, *error: Any) -> None:
        if self._model is not None:
            self._model.set_synchronizing(self._before)


def _mesh(parallelism: ParallelismConfig, device: torch.device, plugin: FullyShardedDataParallelPlugin) -> "DeviceMesh":
    shards, reshard = parallelism.shard_size, plugin.reshard_after_forward
    if not isinstance(reshard, bool) and (reshard >= shards or shards % reshard):
        raise ConfigurationError(
            f"reshard_after_forward must be True, False, or a divisor of the {shards} ranks that share a copy of the "
            f"model and smaller than {shards} (got {reshard}). Use True or False."
        )
    mesh, names = parallelism.get_weight_mesh(device.type), tuple(parallelism.fsdp_dim_names)
    return mesh if names == mesh.mesh_dim_names else mesh[names]


def _no_local_training(method: str) -> UnsupportedError:
    return UnsupportedError(
        f"LocalSGD needs a whole model on each rank, and {method} shards it. Leave one of them out, or give LocalSGD "
        "enabled=False."
    )
