"""Checks of the arguments of `Accelerator`, and the option objects made from them."""

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from trainer_lib.accelerator.prepared import Prepared
from trainer_lib.foundation import environment
from trainer_lib.foundation.device_types import has_cuda_graphs, has_symmetric_memory
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, MissingPackageError, UnsupportedError, unknown
from trainer_lib.foundation.imports import is_deepspeed_available, pip_install
from trainer_lib.logging import get_logger
from trainer_lib.options.base import KwargsHandler, check_flag
from trainer_lib.options.compile_options import TorchDynamoPlugin
from trainer_lib.options.data_options import DataLoaderConfiguration
from trainer_lib.options.enums import DynamoBackend, RNGType
from trainer_lib.options.memory_options import MemoryKwargs, check_one_checkpointing
from trainer_lib.options.parallel.ddp_options import DistributedDataParallelKwargs, InitProcessGroupKwargs
from trainer_lib.options.parallel.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.options.precision_options import AutocastKwargs, GradScalerKwargs
from trainer_lib.options.profiler_options import ProfileKwargs
from trainer_lib.parallelism_config import ParallelismConfig
from trainer_lib.precision.base import FullPrecision
from trainer_lib.state.accelerator_state import AcceleratorState
from trainer_lib.state.accumulation_window import GradientWindow
from trainer_lib.strategies.registry import registered_options

if TYPE_CHECKING:
    from trainer_lib.options.deepspeed.active_plugin import DeepSpeedPlugins
    from trainer_lib.options.fp8_options import FP8Recipe
    from trainer_lib.options.megatron_lm.megatron_lm_plugin import MegatronLMPlugin

_logger = get_logger(__name__)

_HANDLERS = (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    MemoryKwargs,
    ProfileKwargs,
)
_OLDER_DATA_OPTIONS = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler")
Handler = TypeVar("Handler", bound=KwargsHandler)


class Handlers:
    """The `kwargs_handlers` of an `Accelerator`, found by their type."""

    def __init__(self, handlers: Sequence[KwargsHandler]) -> None:
        self._by_type: dict[type, KwargsHandler] = {}
        if not isinstance(handlers, (list, tuple)):
            raise ConfigurationError(
                f"kwargs_handlers must be a list of option objects (got {type(handlers).__name__}). Example: "
                "kwargs_handlers=[AutocastKwargs()]."
            )
        for handler in handlers:
            known = (*_HANDLERS, *_fp8_recipes(), *registered_options())
            if not isinstance(handler, known):
                raise ConfigurationError(
                    unknown("kwargs handler", type(handler).__name__, [kind.__name__ for kind in known])
                )
            if type(handler) in self._by_type:
                raise ConfigurationError(f"kwargs_handlers has two {type(handler).__name__}. Give one.")
            self._by_type[type(handler)] = handler

    def get(self, kind: type[Handler]) -> Handler | None:
        """Return the handler of this type, or `None`."""
        handler = self._by_type.get(kind)
        return handler if isinstance(handler, kind) else None

    def set(self, kind: type[Handler], handler: Handler | None, name: str) -> None:
        """Replace the handler of this type; `None` removes it.

        Args:
            kind: The type.
            handler: The handler.
            name: Its name in errors.
        """
        if handler is not None and not isinstance(handler, kind):
            raise ConfigurationError(f"{name} must be {kind.__name__} (got {shown(handler)}).")
        self._by_type.pop(kind, None)
        if handler is not None:
            self._by_type[kind] = handler

    def fp8_recipe(self) -> "FP8Recipe | None":
        """Return the options of fp8, or `None`."""
        if not self._by_type:
            return None
        recipes = [recipe for kind in _fp8_recipes() if (recipe := self.get(kind)) is not None]
        if len(recipes) > 1:
            raise ConfigurationError(
                "kwargs_handlers has several options of fp8: "
                f"{', '.join(type(recipe).__name__ for recipe in recipes)}. Give one."
            )
        return recipes[0] if recipes else None

    def strategy(self) -> KwargsHandler | None:
        """Return the options of a registered strategy, or `None`."""
        kinds = [kind for kind in registered_options() if kind in self._by_type]
        if len(kinds) > 1:
            raise ConfigurationError(
                f"kwargs_handlers has the options of several strategies: {', '.join(kind.__name__ for kind in kinds)}. "
                "Give one."
            )
        return self._by_type[kinds[0]] if kinds else None


def _fp8_recipes() -> "tuple[type[FP8Recipe], ...]":
    from trainer_lib.options.fp8_options import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs

    return AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs


def check_generators(rng_types: Any) -> None:
    """Raise unless `rng_types` is `None` or a list of generator kinds."""
    if rng_types is None:
        return
    if isinstance(rng_types, str) or not isinstance(rng_types, Sequence):
        raise ConfigurationError(
            f"rng_types must be a list of generator kinds (got {rng_types!r}). Example: rng_types=['torch']."
        )
    for kind in rng_types:
        RNGType.read("kind of generator in rng_types", kind)


def scaler_of_deepspeed(plugins: "DeepSpeedPlugins | None", precision: Any) -> GradScalerKwargs | None:
    """Return the loss scaler that the section `fp16` of a DeepSpeed config describes, if fp16 is used."""
    if plugins is None or str(precision) != "fp16":
        return None
    scale, given = plugins.active.get_value("fp16.loss_scale", 0), plugins.active.get_value
    for key, default in (("hysteresis", 2), ("min_loss_scale", 1)):
        if given(f"fp16.{key}", default) != default:
            _logger.warning("fp16.%s=%r in the DeepSpeed config has no effect.", key, given(f"fp16.{key}"))
    if scale:
        return GradScalerKwargs(init_scale=float(scale), growth_interval=2**31 - 1)  # which never grows
    return GradScalerKwargs(
        init_scale=2.0 ** given("fp16.initial_scale_power", 16), growth_interval=given("fp16.loss_scale_window", 1000)
    )


class EnginePlugins(NamedTuple):
    """The plugins of other engines, which may set the precision and the accumulation too."""

    deepspeed: "DeepSpeedPlugins | None"
    megatron_lm: "MegatronLMPlugin | None"

    def agreed_precision(self, requested: Any) -> Any:
        """Return the precision that was requested, or that of a plugin; raise if they differ."""
        return requested if self.deepspeed is None else self.deepspeed.active.agreed_precision(requested)

    def agreed_accumulation(self, requested: int | None) -> int | None:
        """Return the micro-batches of a window that were requested, or those of a plugin; raise if they differ."""
        if self.deepspeed is not None:
            requested = self.deepspeed.active.agreed_accumulation(requested)
        return requested if self.megatron_lm is None else self.megatron_lm.agreed_accumulation(requested)


def engine_plugins(deepspeed_plugin: Any, deepspeed_plugins: Any, megatron_lm_plugin: Any) -> EnginePlugins:
    """Return the plugins of other engines, given or asked for by the launcher."""
    return EnginePlugins(_deepspeed_plugins(deepspeed_plugin, deepspeed_plugins), _megatron_lm(megatron_lm_plugin))


def _megatron_lm(plugin: Any) -> "MegatronLMPlugin | None":
    """Return the plugin of Megatron-LM, given or asked for by the launcher, or `None`, and warn of idle fields."""
    if plugin is None and not environment.megatron_lm_requested():
        return None
    from trainer_lib.options.megatron_lm.megatron_lm_plugin import MegatronLMPlugin

    plugin = MegatronLMPlugin() if plugin is None else plugin  # without one: of the launcher's values
    if not isinstance(plugin, MegatronLMPlugin):
        raise ConfigurationError(f"megatron_lm_plugin must be a MegatronLMPlugin (got {shown(plugin)}).")
    for note in plugin.notes:
        _logger.warning_once("MegatronLMPlugin: %s.", note)
    return plugin


def _deepspeed_plugins(plugin: Any, plugins: Any) -> "DeepSpeedPlugins | None":
    """Return the DeepSpeed plugins, given under one of two names or asked for by the launcher, or `None`."""
    if plugin is not None and plugins is not None:
        raise ConfigurationError("Accelerator got both deepspeed_plugin and deepspeed_plugins. Give one.")
    given = plugins if plugin is None else plugin
    if given is None and not environment.deepspeed_requested():
        return None
    from trainer_lib.options.deepspeed.active_plugin import DeepSpeedPlugins
    from trainer_lib.options.deepspeed.deepspeed_plugin import DeepSpeedPlugin

    made = DeepSpeedPlugins(DeepSpeedPlugin() if given is None else given)  # without one: of the launcher's values
    if made.shards and not is_deepspeed_available():
        raise MissingPackageError(
            f"DeepSpeedPlugin(zero_stage={made.active.zero_stage}) needs DeepSpeed, which is not installed: "
            f"{pip_install('trainer_lib[deepspeed]')}."
        )
    return made


def check_names(arguments: dict[str, Any], constructor: Any) -> None:
    """Raise for an argument that the constructor does not take."""
    known = [name for name in inspect.signature(constructor).parameters if name not in ("self", "older_arguments")]
    for name in arguments:
        if name not in (*_OLDER_DATA_OPTIONS, "fp16", "logging_dir"):
            raise ConfigurationError(unknown("argument", name, known))


def data_configuration(
    configuration: DataLoaderConfiguration | None, older_arguments: dict[str, Any]
) -> DataLoaderConfiguration:
    """Return the data options, given as one object or by their older names."""
    older = {name: older_arguments[name] for name in _OLDER_DATA_OPTIONS if name in older_arguments}
    if configuration is not None and older:
        raise ConfigurationError(
            f"Accelerator got both dataloader_config and {', '.join(older)}. Put {', '.join(older)} into "
            "dataloader_config."
        )
    return configuration or DataLoaderConfiguration(**older)


def precision_name(mixed_precision: Any, older_arguments: dict[str, Any]) -> Any:
    """Return the requested precision, given by `mixed_precision` or by the older `fp16=True`."""
    fp16 = older_arguments.get("fp16")
    if fp16 is None:
        return mixed_precision
    check_flag("fp16", fp16)
    requested = "fp16" if fp16 else "no"
    if mixed_precision is not None and str(mixed_precision) != requested:
        raise ConfigurationError(
            f"fp16={fp16} and mixed_precision={mixed_precision!r} contradict each other. Leave fp16 out."
        )
    return requested


def check_native_amp(uses_autocast: bool, precision: FullPrecision, prepared: Prepared) -> None:
    """Raise if autocast cannot be switched on or off: too late, or in a precision without that choice."""
    check_flag("native_amp", uses_autocast)
    if uses_autocast == precision.uses_autocast:
        return
    if precision.name not in ("fp16", "bf16"):
        raise ConfigurationError(
            f"native_amp={uses_autocast} does not work with mixed_precision={precision.name!r}. "
            "Give the Accelerator mixed_precision='fp16' or 'bf16'."
        )
    if prepared.models:
        raise ConfigurationError(
            f"native_amp={uses_autocast} comes too late: a model is prepared already. Set it before prepare."
        )


def check_scaler(scaler: Any, precision: FullPrecision) -> None:
    """Raise for a loss scaler that would change how losses are scaled."""
    if scaler is precision.scaler:
        return
    if precision.scaler is not None:
        raise ConfigurationError(
            f"accelerator.scaler cannot be replaced (got {shown(scaler)}): the prepared optimizers use the loss "
            "scaler of fp16. Give its options as Accelerator(kwargs_handlers=[GradScalerKwargs(init_scale=…)])."
        )
    if not isinstance(scaler, torch.amp.GradScaler) or scaler.is_enabled():
        raise ConfigurationError(
            f"accelerator.scaler must be None or GradScaler(enabled=False) with mixed_precision={precision.name!r}, "
            f"which scales no losses (got {shown(scaler)}). Give the Accelerator mixed_precision='fp16'."
        )


def warn_of_fp8_gather(precision: FullPrecision, plugin: FullyShardedDataParallelPlugin | None) -> None:
    """Warn of weights that should be gathered in fp8, and are not gathered."""
    if plugin is None and getattr(getattr(precision, "config", None), "enable_fsdp_float8_all_gather", False):
        _logger.warning_once(
            "enable_fsdp_float8_all_gather=True has no effect without FSDP: each rank has whole weights. Give a "
            "FullyShardedDataParallelPlugin, or leave it out."
        )


def warn_of_fsdp1(notes: Sequence[str]) -> None:
    """Warn once of what each option of FSDP1 became."""
    if notes:
        _logger.warning_once(
            "This version shards with FSDP2, and translates the options of FSDP1: %s.", "; ".join(notes)
        )


def check_ddp(options: Any) -> None:
    """Raise unless `options` are those of DDP, or `None`."""
    if options is not None and not isinstance(options, DistributedDataParallelKwargs):
        raise ConfigurationError(f"ddp_handler must be DistributedDataParallelKwargs (got {shown(options)}).")


def check_compilation(
    plugin: TorchDynamoPlugin,
    ddp: DistributedDataParallelKwargs | None,
    fsdp: FullyShardedDataParallelPlugin | None,
    parallelism: ParallelismConfig | None = None,
) -> None:
    """Raise for options of compilation that do not work with DDP, FSDP or pipelines."""
    if not plugin.is_active:
        return
    if parallelism is not None and parallelism.pp_enabled:
        raise UnsupportedError(
            f"torch.compile does not work with pp_size={parallelism.pp_size}: a graph of the whole model cannot end at "
            "a stage. Leave dynamo_backend and torch_compile out."
        )
    if ddp is not None and ddp.bucket_cap_mb < 1:
        raise ConfigurationError(
            f"bucket_cap_mb must be at least 1 with torch.compile (got {ddp.bucket_cap_mb}): torch splits compiled "
            "graphs at DDP's buckets, and the first bucket has 1 MB. Give a bucket_cap_mb of at least 1."
        )
    if fsdp is not None and fsdp.activation_checkpointing and plugin.backend == DynamoBackend.EAGER:
        raise ConfigurationError(
            "activation_checkpointing=True does not work with the dynamo backend 'eager': it recomputes activations "
            "with different random numbers, so a model with dropout gets wrong gradients. Use 'aot_eager' or "
            "'inductor'."
        )
    if fsdp is not None and plugin.fullgraph and not plugin.use_regional_compilation:
        raise ConfigurationError(
            "fullgraph=True does not work for a whole model under FSDP: FSDP gathers weights between blocks, which "
            "breaks the graph. Add use_regional_compilation=True, so that each block is one graph."
        )


def check_async_tp(plugin: TorchDynamoPlugin, parallelism: ParallelismConfig | None, device_type: str) -> None:
    """Raise for messages that should overlap with matrix products, where torch cannot do so."""
    if parallelism is None or not parallelism.tp_enabled:
        return
    if parallelism.tp_handler is None or not parallelism.tp_handler.enable_async_tp:
        return
    if not has_symmetric_memory(device_type):
        raise UnsupportedError(
            f"enable_async_tp=True does not work on this device ({device_type}): torch overlaps messages with matrix "
            "products over symmetric memory, which CUDA devices have. Leave it out; training is the same."
        )
    if plugin.backend != DynamoBackend.INDUCTOR or plugin.disable:
        raise UnsupportedError(
            "enable_async_tp=True needs compiled models: torch overlaps messages with matrix products in graphs of "
            f"inductor (got dynamo_backend={shown(str(plugin.backend))}). Give dynamo_backend='inductor', or leave "
            "enable_async_tp out."
        )


def check_memory(options: MemoryKwargs, state: AcceleratorState) -> None:
    """Raise for options that save memory in two ways at once, or cannot be compiled."""
    fsdp, compilation = state.fsdp_plugin, state.dynamo_plugin
    if fsdp is not None and fsdp.activation_checkpointing:
        check_one_checkpointing(
            options.gradient_checkpointing, options.activation_offload, "activation_checkpointing=True of fsdp_plugin"
        )
    if options.optimizer_in_backward and state.megatron_lm_plugin is not None:
        raise ConfigurationError(
            "optimizer_in_backward=True does not work with megatron_lm_plugin, whose optimizer sees all gradients. "
            "Give the options of this library instead."
        )
    if options.activation_offload and compilation.is_active and compilation.fullgraph:
        raise ConfigurationError(
            "activation_offload=True does not work with fullgraph=True: what is moved to host memory ends a graph. "
            "Leave fullgraph out."
        )


def keep_gradients_of_graphs(window: GradientWindow, prepared: Prepared, state: AcceleratorState) -> None:
    """Have gradients that accumulate survive the runs of CUDA graphs, where compiled models replay them."""
    if not (state.dynamo_plugin.replays_cuda_graphs and has_cuda_graphs(state.device.type)):
        return
    from trainer_lib.accelerator.cuda_graphs import keep_gradients

    window.on_second_micro_batch = lambda: keep_gradients(prepared.optimizers)
