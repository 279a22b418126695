"""`DeepSpeed`: ZeRO shards optimizer states, gradients and weights; the accumulation window stays the Accelerator's."""

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_lib.foundation.errors import ConfigurationError, PreparationError, UnsupportedError, unknown
from trainer_lib.logging import get_logger
from trainer_lib.options.deepspeed.active_plugin import DeepSpeedPlugins
from trainer_lib.options.deepspeed.deepspeed_plugin import DeepSpeedPlugin
from trainer_lib.options.deepspeed.zero3_init import construction_config, shard_built_models
from trainer_lib.process_group import ProcessGroup
from trainer_lib.strategies.averages_in_flight import AveragesInFlight
from trainer_lib.strategies.base import JoinOutcome, Leftovers, Strategy
from trainer_lib.strategies.clip_grad_norm import norm_of_whole, norm_over_ranks, shrink, weight_dtype
from trainer_lib.strategies.deepspeed import zero_state
from trainer_lib.strategies.deepspeed.config_keys import check_keys
from trainer_lib.strategies.deepspeed.deepspeed_runtime import started
from trainer_lib.strategies.deepspeed.engine_config import engine_config, refuse_unsupported
from trainer_lib.strategies.deepspeed.engine_model import EngineModel
from trainer_lib.strategies.deepspeed.zero_optimizer import ZeroOptimizer
from trainer_lib.strategies.deepspeed.zero_shards import ZeroShards
from trainer_lib.strategies.initial_states import is_initial
from trainer_lib.strategies.single_device import NO_CONTEXT
from trainer_lib.strategies.validate import check_has_whole_weights

_logger = get_logger(__name__)

# They read norms or factors of a whole weight, and a shard is a part of all weights, as a vector.
_OF_WHOLE_WEIGHTS = ("adafactor", "apollo", "galore", "lamb", "lars", "shampoo", "soap")


class DeepSpeed(Strategy):
    """`deepspeed.initialize` with ZeRO 1 to 3, for each model with its optimizer.

    Args:
        group: The process group of all ranks.
        device: The device of this rank.
        plugins: The plugins, one of which is active.
    """

    gathers_to_rank_zero = True
    needs_lockstep = True

    def __init__(self, group: ProcessGroup, device: torch.device, plugins: DeepSpeedPlugins) -> None:
        super().__init__(group, device)
        refuse_unsupported(plugins.active.hf_ds_config)
        self._package = started(device)
        for plugin in plugins.by_name.values():
            check_keys(plugin.hf_ds_config, self._package)
        for note in plugins.active.notes:
            _logger.warning_once("DeepSpeedPlugin: %s.", note)
        self._plugins = plugins
        self._construction = construction_config(plugins.active.hf_ds_config)  # transformers holds a weak reference
        if plugins.active.is_zero3_init_enabled():
            shard_built_models(self._construction)
        self._models: list[EngineModel] = []
        self._optimizers: list[ZeroOptimizer] = []
        self._groups: dict[ZeroOptimizer, list[list[Tensor]]] = {}
        self._flight = AveragesInFlight(group, device, weight_dtype(device))

    # -- the model -----------------------------------------------------------------------------------------------

    def distribute(self, model: nn.Module, evaluation_mode: bool = False) -> nn.Module:
        """Wrap the model; its engine is made when its optimizer is prepared too."""
        check_has_whole_weights(model)
        if evaluation_mode or not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        wrapped = EngineModel(model)
        self._models.append(wrapped)
        return wrapped

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return an optimizer that ZeRO steps."""
        if any(known.optimizer is optimizer for known in self._optimizers):
            raise PreparationError(f"This {type(optimizer).__name__} is prepared already.")
        _check_updates_vectors(type(optimizer))
        wrapped = ZeroOptimizer(optimizer, functools.partial(self._clip_by_config, self._plugins.active))
        self._optimizers.append(wrapped)
        return wrapped

    def rebind_parameters(self, optimizer: Optimizer) -> None:
        """Make the engine of a model and its optimizer once both are prepared.

        Raises:
            PreparationError: If the optimizer already has a state, or does not train one model alone.
        """
        if not isinstance(optimizer, ZeroOptimizer) or optimizer.shards is not None:
            return
        groups = [list(settings["params"]) for settings in optimizer.param_groups]
        trained = {id(parameter) for group in groups for parameter in group}
        models = [model for model in self._models if any(id(parameter) in trained for parameter in model.parameters())]
        if not models:
            return
        _check_pair(optimizer, models, trained)
        _check_dimensions(models[0])
        engine = self._engine(models[0], optimizer)
        models[0].attach(engine)
        optimizer.shards = ZeroShards(engine, self.group)
        self._groups[optimizer] = groups

    def current_parameters(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return this rank's shards for the parameters of a model.

        Raises:
            UnsupportedError: If they are some of those that an optimizer trains.
        """
        parameters = list(parameters)
        given = {id(parameter) for parameter in parameters}
        for shards in self._all_shards():
            held = [parameter for group in shards.parameters for parameter in group]
            missing = [parameter for parameter in held if id(parameter) not in given]
            if len(missing) == len(held):
                continue
            if missing:
                raise UnsupportedError(
                    f"DeepSpeed's gradients are one vector, and {len(missing)} of the {len(held)} trained parameters "
                    "were left out. Give all parameters of the model."
                )
            parameters = [p for p in parameters if not shards.holds(p) and p.requires_grad] + list(shards.tensors)
        return parameters

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's model."""
        return model.module if isinstance(model, EngineModel) else model

    def whole_shapes(self, model: nn.Module) -> nn.Module:
        """Return a copy of the model on the meta device."""
        return zero_state.whole_shapes(self.bare(model))

    def engine_of(self, model: nn.Module) -> Any:
        """Return DeepSpeed's engine of a prepared model, or `None`."""
        bare = self.bare(model)
        return next((known.__dict__["engine"] for known in self._models if self.bare(known) is bare), None)

    def release(self) -> None:
        """Release the models and optimizers."""
        for model in self._models:
            if (engine := model.__dict__["engine"]) is not None:
                if dist.is_initialized():  # not after end_training(); DeepSpeed asks for its rank
                    engine.destroy()
                model.attach(None)
        self._models.clear()
        self._optimizers.clear()
        self._groups.clear()
        self._flight.begin([])

    # -- gradients -----------------------------------------------------------------------------------------------

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context that does nothing: gradients are complete when the optimizer asks for them."""
        del model
        return NO_CONTEXT

    def force_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        del model
        return NO_CONTEXT

    def withholds_gradients(self) -> bool:
        """Whether gradients are stored elsewhere than in the parameters' `grad`: ZeRO holds them."""
        return True

    def send_with_gradients(self, values: Sequence[float | Tensor]) -> None:
        """Start an all-reduce of `values` now, so that it overlaps with `backward`."""
        self._flight.begin(values)

    def received_averages(self) -> Sequence[float | Tensor]:
        """Return the averages, once the all-reduce is complete."""
        return self._flight.averages()

    def join(
        self, joinables: Sequence[Any], leftovers: Callable[[], Leftovers] | None
    ) -> AbstractContextManager[JoinOutcome]:
        """Raise: ranks reduce gradients together, so a rank without data cannot stop."""
        raise UnsupportedError(
            "join_uneven_inputs does not work with DeepSpeed: all ranks reduce gradients together. Read equally many "
            "batches on all ranks: leave even_batches on, or give the loader drop_last=True."
        )

    def stay_local(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Raise: no rank has its own optimizer."""
        raise _no_local_training()

    def average_weights(self, model: nn.Module) -> None:
        """Raise: no rank has its own optimizer."""
        raise _no_local_training()

    def clip_grad_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Clip the gradients of all ranks' shards to one total norm."""
        parameters = list(parameters)
        norm = self.grad_norm(parameters, norm_type)
        shrink(parameters, max_norm, norm)
        return norm

    def grad_norm(self, parameters: Iterable[Tensor], norm_type: float, *, in_double: bool = False) -> Tensor:
        """Return the norm over the gradients of all ranks' shards."""
        norm = norm_of_whole(parameters, norm_type, in_double)
        return norm_over_ranks(norm, norm_type, dist.group.WORLD) if dist.group.WORLD is not None else norm

    # -- states --------------------------------------------------------------------------------------------------

    def model_state(self, model: nn.Module, *, whole: bool = True) -> dict[str, Any]:
        """Return the model's whole tensors on rank 0, weights in fp32."""
        shards = self._shards_of(model)
        return (
            super().model_state(model, whole=whole)
            if shards is None
            else zero_state.model_state(self.bare(model), shards)
        )

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole tensors from rank 0."""
        shards = self._shards_of(model)
        if shards is None:
            values = self.group.broadcast_objects([dict(state)])[0]
            super().load_model_state(model, values, strict)
        else:
            zero_state.load_model_state(self.bare(model), shards, state, strict)

    def optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, whole: bool = True
    ) -> dict[str, Any]:
        """Return the optimizer's state by parameter names on rank 0."""
        shards = optimizer.shards if isinstance(optimizer, ZeroOptimizer) else None
        if not isinstance(optimizer, ZeroOptimizer) or shards is None:
            return super().optimizer_state(optimizer, models, whole=whole)
        bare = [self.bare(model) for model in models]
        return zero_state.optimizer_state(optimizer.optimizer, bare, shards, self._groups[optimizer])

    def load_optimizer_state(self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]) -> None:
        """Load a state from rank 0."""
        shards = optimizer.shards if isinstance(optimizer, ZeroOptimizer) else None
        if not isinstance(optimizer, ZeroOptimizer) or shards is None:
            super().load_optimizer_state(optimizer, models, state)
            return
        bare = [self.bare(model) for model in models]
        zero_state.load_optimizer_state(optimizer.optimizer, bare, shards, self._groups[optimizer], state)

    # ------------------------------------------------------------------------------------------------------------

    def _engine(self, model: EngineModel, optimizer: ZeroOptimizer) -> Any:
        if self._plugins.active.zero_stage == 0:
            raise UnsupportedError(
                f"This {type(model.module).__name__} trains with a DeepSpeedPlugin of zero_stage=0, and others in "
                "deepspeed_plugins shard. Give it zero_stage=1 or more; a model without an optimizer needs none."
            )
        config = engine_config(self._plugins.active, model.module)
        if self._plugins.active.zero_stage == 3:
            _mark_gathered_together(model.module, self._plugins.active.transformer_moe_cls_names or ())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what DeepSpeed imports and calls
            engine, *_ = self._package.initialize(
                model=model.module, optimizer=optimizer.optimizer, config=config, dist_init_required=False
            )
        _keep_adagrad(engine, optimizer.optimizer)
        _link_reordered_weights(engine)
        return engine

    def _all_shards(self) -> list[ZeroShards]:
        return [optimizer.shards for optimizer in self._optimizers if optimizer.shards is not None]

    def _shards_of(self, model: nn.Module) -> ZeroShards | None:
        engine = self.engine_of(model)
        return next((shards for shards in self._all_shards() if shards.engine is engine), None)

    def _clip_by_config(self, plugin: DeepSpeedPlugin, shards: ZeroShards) -> None:
        limit = plugin.gradient_clipping
        if isinstance(limit, (int, float)) and limit > 0:
            self.clip_grad_norm(shards.tensors, limit, 2.0)


def _mark_gathered_together(model: nn.Module, classes: Sequence[str]) -> None:
    """Have ZeRO-3 gather all weights of modules of these classes at once: ranks may use other experts in them.

    Raises:
        ConfigurationError: If the model has no module of one of them.
    """
    known = {type(module).__name__ for module in model.modules()}
    for name in classes:
        if name not in known:
            raise ConfigurationError(unknown("class in transformer_moe_cls_names", name, known))
    if classes:
        import_module("deepspeed.utils").set_z3_leaf_modules(model, list(classes))


def _check_dimensions(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise UnsupportedError(
                f"{name} is a weight without dimensions, which DeepSpeed cannot broadcast. Give it the shape (1,)."
            )


def _check_updates_vectors(kind: type[Optimizer]) -> None:
    name = kind.__name__
    if "Muon" in name and not kind.__module__.startswith("deepspeed."):
        raise UnsupportedError(
            f"{name} updates matrices, and DeepSpeed gives optimizers shards as vectors. Shard with FSDP (fsdp=True in "
            "a Trainer), or use an optimizer such as AdamW."
        )
    if any(of_whole in name.lower() for of_whole in _OF_WHOLE_WEIGHTS):
        _logger.warning_once(
            "%s reads norms or factors of whole weights, and DeepSpeed gives it shards: its updates are not those of "
            "one process, and depend on the number of ranks. FSDP gathers whole weights for torch.optim.Adafactor "
            "(fsdp=True in a Trainer); AdamW and SGD have the same updates with DeepSpeed.",
            name,
        )


def _check_pair(optimizer: ZeroOptimizer, models: Sequence[EngineModel], trained: set[int]) -> None:
    kind = type(optimizer.optimizer).__name__
    if len(models) > 1:
        raise PreparationError(
            f"This {kind} trains {len(models)} models, and DeepSpeed shards one model with its optimizer. Create an "
            "optimizer for each model."
        )
    if models[0].__dict__["engine"] is not None:
        raise PreparationError(
            f"This {kind} is the second optimizer of one {type(models[0].module).__name__}, and DeepSpeed shards a "
            "model with one optimizer. Put all parameters into the groups of one optimizer."
        )
    if _has_state(optimizer.optimizer):
        raise PreparationError(
            f"This {kind} has a state for whole weights (it has stepped, or its state was loaded), and its model is "
            "sharded now. Create a new one before prepare()."
        )


def _has_state(optimizer: Optimizer) -> bool:
    """Whether an optimizer has a state of steps; Adagrad is created with one of no step."""
    states = [optimizer.state.get(p) for group in optimizer.param_groups for p in group["params"]]
    return any(state and not is_initial(state) for state in states)


def _keep_adagrad(engine: Any, optimizer: Optimizer) -> None:
    """Let ZeRO step the Adagrad of the script, not the one that it made from the defaults, with one parameter group."""
    zero = engine.optimizer
    if not isinstance(optimizer, torch.optim.Adagrad) or zero.optimizer is optimizer:
        return
    optimizer.state.clear()
    optimizer.state.update(zero.optimizer.state)
    zero.optimizer = optimizer
    if engine.zero_optimization_stage() < 3:  # it has linked weights to the shards of that one group
        zero._link_all_hp_params()  # pyright: ignore[reportPrivateUsage]
        zero._create_optimizer_mapping()  # pyright: ignore[reportPrivateUsage]
        zero._param_slice_mappings = zero._create_param_mapping()  # pyright: ignore[reportPrivateUsage]


def _link_reordered_weights(engine: Any) -> None:
    """Link weights to their parts of the shards, which `round_robin_gradients` lays out in another order."""
    zero = engine.optimizer
    if not getattr(zero, "round_robin_gradients", False):  # stage 3 has no such order
        return
    in_order, zero.bit16_groups = zero.bit16_groups, zero.round_robin_bit16_groups
    zero._link_all_hp_params()  # pyright: ignore[reportPrivateUsage]
    zero.bit16_groups = in_order
    zero._param_slice_mappings = zero._create_param_mapping()  # pyright: ignore[reportPrivateUsage]


def _no_local_training() -> UnsupportedError:
    return UnsupportedError(
        "LocalSGD needs a whole optimizer on each rank, and DeepSpeed shards it. Leave one of them out, or give "
        "LocalSGD enabled=False."
    )
