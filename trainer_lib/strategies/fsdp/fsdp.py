"""This file is sharding (FSDP2): each process holds a part of each weight, and has it whole only while it computes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from trainer_lib.foundation.errors import ConfigurationError, PreparationError, UnsupportedError
from trainer_lib.options.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.parallelism_config import ParallelismConfig
from trainer_lib.process_group import ProcessGroup
from trainer_lib.strategies import grad_norm as gradients
from trainer_lib.strategies.base import Joined, SingleProcess
from trainer_lib.strategies.fsdp import sharded_state
from trainer_lib.strategies.fsdp.sharded_model import ShardedModel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_COMPUTE_TYPES = {"bf16": torch.bfloat16, "bf16-true": torch.bfloat16, "fp16": torch.float16}


class Shard(SingleProcess):
    """`torch.distributed.fsdp.fully_shard`, from the weights of the main process."""

    hands_out = True
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
        self.writes_shards = plugin.writes_shards
        self._mixed_precision = mixed_precision
        self._parallelism = parallelism
        self._models: list[ShardedModel] = []
        # From each parameter that sharding replaced to its successor, for optimizers that were made before.
        self._successors: Any = WeakTensorKeyDictionary()
        self._step_hooks: list[Any] = []
        self._message: tuple[Tensor, dist.Work] | None = None

    def place(self, model: nn.Module) -> nn.Module:
        """Leave the model where it is: only its shards come to the device."""
        return model

    def distribute(self, model: nn.Module, evaluation_mode: bool = False) -> nn.Module:
        """Shard the model, in place, for evaluation too: it may be too large for one device."""
        del evaluation_mode
        sharded = ShardedModel(self.bare(model), self.plugin, self._arguments(), self.group, self.device)
        self._models.append(sharded)
        self._successors.update(sharded.successors())
        return model

    def adopt(self, optimizer: Optimizer) -> None:
        """Let an optimizer that was made before its model was sharded train the shards.

        Raises:
            PreparationError: If it has a state already.
        """
        if not any(known is optimizer for known, _ in self._step_hooks):
            self._step_hooks.append((optimizer, optimizer.register_step_post_hook(self._after_step)))
        for settings in optimizer.param_groups:
            parameters: list[Tensor] = settings["params"]
            if any(optimizer.state.get(parameter) for parameter in parameters if parameter in self._successors):
                raise PreparationError(
                    f"This {type(optimizer).__name__} has a state (it has stepped, or its state was loaded), which "
                    "belongs to whole weights, and its model is sharded now. Make it anew after prepare(model)."
                )
            # In place: some optimizers have a second name for the list.
            parameters[:] = self.trained([self._successors.get(p, p) for p in parameters])
            self._refuse_mixed(optimizer, settings)
        self._after_step()

    def trained(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return shards for weights that a forward without a backward has left whole."""
        parameters = list(parameters)
        whole = {parameter for model in self._models for parameter in model.whole.values()}
        if all(hasattr(p, "_local_tensor") or p in whole for p in parameters):
            return parameters
        shards = {whole: shard for model in self._models for whole, shard in model.shards_of_whole().items()}
        return [shards.get(parameter, parameter) for parameter in parameters]

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context in which `backward` keeps gradients whole, and to this process."""
        return _Synchronizing(self._sharded(model), False)

    def force_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context in which `backward` reduces, whatever the forward was told."""
        return _Synchronizing(self._sharded(model), True)

    def withholds_gradients(self) -> bool:
        """Whether gradients are whole on this process, with the weights that were gathered for them."""
        return any(model.withholds_gradients for model in self._models)

    def carry(self, values: Sequence[float | Tensor]) -> None:
        """Send `values` on their way at once, so that they travel while `backward` computes."""
        if self._message is not None:  # nobody asked for the last ones
            self._message[1].wait()
            self._message = None
        if values:
            cargo = torch.stack([_on_device(value, self.device) for value in values])
            work = dist.all_reduce(cargo, async_op=True)
            assert work is not None
            self._message = cargo, work

    def carried(self) -> Sequence[float | Tensor]:
        """Return the averages."""
        if self._message is None:
            return ()
        (cargo, work), self._message = self._message, None
        work.wait()
        return list(cargo / self.group.size)

    def join(
        self, joinables: Sequence[Any], leftovers: Callable[[], dict[nn.Module, float | Tensor]] | None
    ) -> AbstractContextManager[Joined]:
        """Refuse it: a process without data would have to lend its shards to each forward of the others."""
        raise UnsupportedError(
            "join_uneven_inputs needs a whole model on each process, and FSDP shards it. Read as many batches on all "
            "processes: leave even_batches on, or drop_last in the loader."
        )

    def stay_local(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Refuse it: no process has a model of its own."""
        raise UnsupportedError(
            "LocalSGD needs a whole model on each process, and FSDP shards it. Leave one of them out, or give "
            "LocalSGD enabled=False."
        )

    def clip_grad_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Shrink the gradients, of shards and of whole weights, to a norm over all of them."""
        return gradients.clip_norm(parameters, max_norm, norm_type, self.device)

    def clip_grad_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Cut each gradient to at most `clip_value` in size."""
        gradients.clip_value(parameters, clip_value)

    def grad_norm(self, parameters: Iterable[Tensor], norm_type: float, *, in_double: bool = False) -> Tensor:
        """Return the norm over all gradients that are reduced; those that wait for the rest of their window are not."""
        return gradients.norm(parameters, norm_type, self.device, in_double)

    def model_state(self, model: nn.Module, *, whole: bool = True) -> dict[str, Any]:
        """Return the model's tensors: whole ones in the main process, or each process's shards."""
        return sharded_state.model_state(self.bare(model), self.group, self.device, whole)

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
        """Take up the main process's whole tensors, or each process its shards."""
        sharded_state.load_model_state(self.bare(model), state, self.group, self.device, strict)

    def optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, whole: bool = True
    ) -> dict[str, Any]:
        """Return the optimizer's state by the names of parameters."""
        models = [self.bare(model) for model in models]
        return sharded_state.optimizer_state(optimizer, models, self.group, self.device, whole)

    def load_optimizer_state(self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]) -> None:
        """Take up the main process's whole tensors, or each process its shards."""
        models = [self.bare(model) for model in models]
        sharded_state.load_optimizer_state(optimizer, models, state, self.group, self.device)

    def release(self) -> None:
        """Let go of the models and optimizers."""
        for model in self._models:
            model.replicas.release()
        for _, hook in self._step_hooks:
            hook.remove()
        self._models.clear()
        self._step_hooks.clear()
        self._successors.clear()
        self.carry([])

    def _arguments(self) -> dict[str, Any]:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

        arguments: dict[str, Any] = {"mesh": _mesh(self._parallelism, self.device, self.plugin)}
        if self.plugin.mixed_precision_policy is not None:
            arguments["mp_policy"] = self.plugin.mixed_precision_policy
        elif self._mixed_precision in _COMPUTE_TYPES:
            # Sums of 16-bit gradients over many processes lose what training needs.
            arguments["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=_COMPUTE_TYPES[self._mixed_precision], reduce_dtype=torch.float32
            )
        if self.plugin.offload.to_cpu:
            pins = self.plugin.offload.pin_memory and torch.accelerator.is_available()
            arguments["offload_policy"] = CPUOffloadPolicy(pin_memory=pins)
        return arguments

    def _sharded(self, model: nn.Module) -> ShardedModel | None:
        inner = self.bare(model)
        return next((sharded for sharded in self._models if sharded.model is inner), None)

    def _refuse_mixed(self, optimizer: Optimizer, settings: Mapping[str, Any]) -> None:
        """Raise for an optimizer that computes on many weights at once and has both shards and whole ones."""
        at_once = [name for name in ("fused", "foreach") if settings.get(name)]
        # torch takes those without dimensions for shards.
        trained: set[Tensor] = {parameter for parameter in settings["params"] if parameter.dim()}
        # Not those of a model that is yet to be prepared.
        names = [name for model in self._models for name, parameter in model.whole.items() if parameter in trained]
        if at_once and names and any(hasattr(parameter, "_local_tensor") for parameter in trained):
            raise PreparationError(
                f"{type(optimizer).__name__}({at_once[0]}=True) computes on all weights of a group at once, which "
                f"cannot be shards and whole ones together. These stay whole: {', '.join(names)}. Give them a "
                f"parameter group of their own, or leave {at_once[0]} out."
            )

    def _after_step(self, *arguments: Any) -> None:
        # A forward without a backward may have left weights whole, which a step does not change.
        del arguments
        for model in self._models:
            model.reshard()


class _Synchronizing:
    """The context in which a model's backwards reduce, or do not."""

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
    from torch.distributed.device_mesh import init_device_mesh

    shards, reshard = parallelism.sizes["dp_shard"], plugin.reshard_after_forward
    if not isinstance(reshard, bool) and (reshard >= shards or shards % reshard):
        raise ConfigurationError(
            f"reshard_after_forward={reshard} must divide the {shards} processes that share a copy of the model, and "
            "be fewer than they. Use True or False."
        )
    if parallelism.dp_shard_enabled:
        mesh = parallelism.get_device_mesh(device.type)
        assert mesh is not None
        return mesh
    # FSDP2 goes by the last dimension, so it has to be there even if it is 1.
    names = parallelism.fsdp_dim_names
    return init_device_mesh(device.type, tuple(parallelism.sizes[name] for name in names), mesh_dim_names=tuple(names))


def _on_device(value: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(device, torch.float32, non_blocking=True)
    return torch.full((), value, dtype=torch.float32, device=device)
