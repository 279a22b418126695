"""`TensorParallel`: ranks split each matrix, alone, in several replicas, or with FSDP2 over the other ranks."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_lib.foundation.errors import ConfigurationError, PreparationError, UnsupportedError
from trainer_lib.modules.weights.names import canonical_name
from trainer_lib.options.parallel.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.options.parallel.tensor_parallel_options import TorchTensorParallelConfig
from trainer_lib.parallelism_config import ParallelismConfig
from trainer_lib.process_group import ProcessGroup
from trainer_lib.strategies.align_generators import align_generators
from trainer_lib.strategies.fsdp import materialize
from trainer_lib.strategies.fsdp.fsdp import FSDP
from trainer_lib.strategies.fsdp.fully_shard import Splitting
from trainer_lib.strategies.tensor_parallel import adapters, layouts, split_layers, styles
from trainer_lib.strategies.tensor_parallel.async_messages import AsyncMessages
from trainer_lib.strategies.tensor_parallel.attention_heads import attributes_to_divide
from trainer_lib.strategies.tensor_parallel.tensor_parallel_plan import has_own_plan, resolve

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class TensorParallel(FSDP):
    """Splits each matrix of a model over the ranks of a replica, which read the same batches.

    Args:
        group: The process group of all ranks.
        device: The device of this rank.
        plugin: The options of sharding over the other ranks; `None`: each replica is whole.
        parallelism: The sizes of the mesh, and the plan.
        mixed_precision: The precision to compute in.
        replicas: The ranks that hold the same part of their replica.
    """

    method = "tensor parallelism"

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        plugin: FullyShardedDataParallelPlugin | None,
        parallelism: ParallelismConfig,
        mixed_precision: str,
        replicas: ProcessGroup,
    ) -> None:
        if mixed_precision == "fp8":
            raise UnsupportedError(
                f"mixed_precision='fp8' does not work with tp_size={parallelism.tp_size}: the parts of a matrix would "
                "have scales of their own. Use mixed_precision='bf16', or leave tp_size at 1."
            )
        self._shards = plugin is not None
        whole = FullyShardedDataParallelPlugin(state_dict_type="FULL_STATE_DICT")
        super().__init__(group, device, plugin or whole, parallelism, mixed_precision)
        self._config = parallelism.tp_options
        self._replicas = replicas
        self._loss_contexts: list[Any] = []
        self._async_messages = AsyncMessages()

    def release(self) -> None:
        """Release the models and optimizers, and compute losses of whole logits again."""
        super().release()
        self._async_messages.end()
        while self._loss_contexts:
            self._loss_contexts.pop().__exit__(None, None, None)

    def _splitting(self, model: nn.Module) -> Splitting:
        mesh = self._matrix_mesh()
        align_generators(mesh.get_group(), self.device)
        parameters = list(model.parameters())
        if not parameters:
            return Splitting(shards=False, replicas=self._replicas)
        if any(hasattr(parameter, "_local_tensor") for parameter in parameters):
            _check_mesh(model, mesh)
            return Splitting(shards=self._shards, is_done=True, replicas=self._replicas)
        splitting = MatrixSplitting(model, self._config, mesh, self._replicas)
        splitting.shards = self._shards
        if self._config.enable_async_tp:
            self._async_messages.begin(mesh.get_group(), splitting.styles.values())
        if "colwise_loss_parallel" in splitting.styles.values() and not self._loss_contexts:
            from torch.distributed.tensor.parallel import loss_parallel

            self._loss_contexts.append(loss_parallel())
            self._loss_contexts[0].__enter__()
        return splitting

    def _matrix_mesh(self) -> "DeviceMesh":
        """Return the ranks that split each matrix, of the mesh that FSDP2 shards over if it does."""
        device = self.device.type
        root = self._parallelism.get_weight_mesh(device) if self._shards else self._parallelism.get_device_mesh(device)
        assert root is not None
        return root if root.ndim == 1 else root["tp"]

    def _refuse_mixed(self, optimizer: Optimizer, settings: dict[str, Any]) -> None:
        """Raise for a fused or foreach optimizer of weights on several meshes; else let it update them one by one."""
        update_one_by_one(optimizer, settings)

    def _arguments(self) -> dict[str, Any]:
        return super()._arguments() if self._shards else {}


def update_one_by_one(optimizer: Optimizer, settings: dict[str, Any]) -> None:
    """Raise for a fused or foreach optimizer of weights on several meshes; else let it update them one by one."""
    meshes = {getattr(parameter, "device_mesh", None) for parameter in settings["params"] if parameter.dim()}
    if len(meshes) < 2:
        return
    at_once = [name for name in ("fused", "foreach") if settings.get(name)]
    if at_once:
        raise PreparationError(
            f"{type(optimizer).__name__}({at_once[0]}=True) cannot update weights that tensor parallelism splits "
            f"and others in one parameter group. Leave {at_once[0]} out."
        )
    if "foreach" in settings:
        settings["foreach"] = False  # which torch would choose on an accelerator


class MatrixSplitting(Splitting):
    """Splits the matrices of a model by a plan.

    Args:
        model: The model; nothing is changed before `apply`.
        config: The options, perhaps with a plan.
        mesh: The ranks that split each matrix.
        replicas: The ranks that hold the same part of their replica.

    Raises:
        ConfigurationError: If the plan does not fit the model.
    """

    def __init__(
        self, model: nn.Module, config: TorchTensorParallelConfig, mesh: "DeviceMesh", replicas: ProcessGroup
    ) -> None:
        super().__init__(replicas=replicas)
        self.styles = resolve(model, config, mesh.size())
        self._split = {name: model.get_submodule(name) for name in self.styles}
        self._mesh = mesh
        self._divides_heads = not has_own_plan(model, config)
        _placements(model, self.styles)  # what cannot be split raises before the model is changed

    def apply(self, model: nn.Module) -> None:
        """Replace weights by their parts, and convert inputs and outputs of the modules that this rank still has."""
        from torch.distributed.tensor import distribute_tensor

        held = dict(model.named_modules())
        self.styles: dict[str, str] = {
            name: s for name, s in self.styles.items() if held.get(name) is self._split[name]
        }
        if self._divides_heads:
            self._divide_heads(held)
        parts: dict[Tensor, Tensor] = {}
        for parameter, placement in _placements(model, self.styles).items():
            part = distribute_tensor(parameter.detach(), self._mesh, [placement], src_data_rank=None)
            parts[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)
        materialize.replace(model, parts)
        inputs = split_layers.SharedInput()
        for name, style in self.styles.items():
            module = model.get_submodule(name)
            shared = split_layers.SharedInput() if adapters.is_second(name) else inputs
            split_layers.install(module, styles.style_of(style, module), self._mesh, shared)
        if "colwise_loss_parallel" in self.styles.values():
            model.register_forward_hook(layouts.make_losses_plain)

    def _divide_heads(self, held: dict[str, nn.Module]) -> None:
        """Let attention arrange as many heads as this rank computes."""
        split = {adapters.layer_name(name) for name, style in self.styles.items() if style == "colwise"}
        ranks = self._mesh.size()
        for module, attribute, count in list(attributes_to_divide(adapters.without_inner(held), split, ranks)):
            setattr(module, attribute, count // ranks)

    def finish(self, model: nn.Module) -> None:
        """Have gradients summed that ranks compute parts of, and split where their weights are."""
        if not self.shards:  # FSDP2 does it with its own reduction
            for parameter in model.parameters():
                layouts.place_gradients(parameter)


def _placements(model: nn.Module, chosen: dict[str, str]) -> dict[Tensor, Any]:
    """Return how each parameter of the modules of a plan is split.

    Raises:
        ConfigurationError: If a tied weight is split in two ways, or one of its modules is not in the plan.
    """
    by_parameter: dict[Tensor, Any] = {}
    for name, style in chosen.items():
        module = model.get_submodule(name)
        own = dict(module.named_parameters(recurse=False))
        for parameter_name, placement in styles.placements(module, styles.style_of(style, module)).items():
            known = by_parameter.setdefault(own[parameter_name], placement)
            if known != placement:
                raise ConfigurationError(
                    f"{name}.{parameter_name} is tied to a weight that the plan splits along another dimension "
                    f"({known} and {placement}). An embedding that is 'embedding_rowwise' goes with a head that is "
                    "'colwise_gather_output'."
                )
    for name, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            is_leaf = not any(True for _ in module.children())  # others may keep a weight without computing with it
            if parameter in by_parameter and name not in chosen and is_leaf:
                raise ConfigurationError(
                    f"{canonical_name(name)}.{parameter_name} is tied to a weight that the plan splits, and the plan "
                    f"does not name {name}. Add it, such as {{{name!r}: 'colwise_gather_output'}}."
                )
    return by_parameter


def _check_mesh(model: nn.Module, mesh: "DeviceMesh") -> None:
    """Raise for a model that was loaded in parts over other ranks than those of the mesh."""
    for name, parameter in model.named_parameters():
        loaded: Any = getattr(parameter, "device_mesh", mesh)
        if loaded.size() != mesh.size() or loaded.mesh.flatten().tolist() != mesh.mesh.flatten().tolist():
            raise PreparationError(
                f"{name} was loaded in parts over the ranks {loaded.mesh.flatten().tolist()}, and tp_size splits over "
                f"{mesh.mesh.flatten().tolist()}. Load the model with device_mesh=accelerator.torch_device_mesh['tp'], "
                "or load it whole."
            )
