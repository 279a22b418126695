"""Settings of the Accelerator (precision, compilation, sharding), on top of the rank and its device."""

import gc
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakSet

from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError, did_you_mean
from trainer_lib.options.compile_options import TorchDynamoPlugin, compilation_plugin
from trainer_lib.options.enums import DistributedType, PrecisionType
from trainer_lib.options.parallel.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.options.parallel.tensor_parallel_options import TorchTensorParallelPlugin
from trainer_lib.options.precision_options import check_precision
from trainer_lib.parallelism_config import ParallelismConfig
from trainer_lib.state.parallelism_resolution import Arrangement, arrange
from trainer_lib.state.partial_state import PartialState
from trainer_lib.state.rank_control import ProcessControl

if TYPE_CHECKING:
    from trainer_lib.options.deepspeed.active_plugin import DeepSpeedPlugins
    from trainer_lib.options.deepspeed.deepspeed_plugin import DeepSpeedPlugin
    from trainer_lib.options.megatron_lm.megatron_lm_plugin import MegatronLMPlugin

_HOW_TO_FREE = (
    "All Accelerators and Trainers of a process share these settings while one of them exists. Before you make one "
    "with other settings, delete the last reference to the first, or call `accelerator.free_memory()` on it "
    "(`trainer.accelerator.free_memory()` of a Trainer)."
)
# What code that runs on some ranks only needs; it outlives the settings.
_OF_RANK = frozenset({"data_group", "first_readers", "group", "local_process_index", "num_processes", "process_index"})


class AcceleratorState(ProcessControl):
    """The settings of the Accelerator, on top of `PartialState`. All instances share one state.

    Args:
        mixed_precision: "no", "fp16", "bf16", "fp8", or "bf16-true" for weights in bf16; by default the
            launcher's setting.
        cpu: Use the CPU even if there is an accelerator.
        dynamo_plugin: How models are compiled; by default the launcher's setting, or not at all.
        deepspeed_plugin: How DeepSpeed shards models, or several plugins by name.
        fsdp_plugin: How models are sharded; by default the launcher's setting, or not at all.
        torch_tp_plugin: How many ranks split each matrix; `parallelism_config` says the same.
        megatron_lm_plugin: Options of Megatron-LM, which become sizes of the mesh and a plugin of FSDP.
        parallelism_config: How many ranks replicate a model, share one copy, and split each matrix.
        dynamo_backend: The backend that compiles models, instead of `dynamo_plugin`.
        **kwargs: The fields of `InitProcessGroupKwargs`.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}
    _living: ClassVar["WeakSet[AcceleratorState]"] = WeakSet()  # each Accelerator has one

    _arrangement: Arrangement
    _deepspeed: "DeepSpeedPlugins | None"
    _megatron_lm: "MegatronLMPlugin | None"
    _asked_plugins: dict[str, Any]  # `None` for those that the script left out
    _dynamo_plugin: TorchDynamoPlugin
    _mixed_precision: str
    _partial: PartialState
    _replaceable: bool
    _was_used: bool  # by an Accelerator
    _environment: ExitStack

    def __init__(
        self,
        mixed_precision: str | PrecisionType | None = None,
        cpu: bool = False,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: TorchTensorParallelPlugin | None = None,
        megatron_lm_plugin: "MegatronLMPlugin | None" = None,
        parallelism_config: ParallelismConfig | None = None,
        _from_accelerator: bool = False,
        *,
        dynamo_backend: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.__dict__ = self._shared_state
        deepspeed = _deepspeed_plugins(deepspeed_plugin)
        dynamo_plugin = compilation_plugin(dynamo_backend, dynamo_plugin)
        partial = PartialState(cpu, **kwargs)
        precision = check_precision(mixed_precision or environment.mixed_precision_requested(), "precision")
        asked_plugins = {
            "dynamo_plugin": dynamo_plugin,
            "fsdp_plugin": fsdp_plugin,
            "parallelism_config": parallelism_config,
            "torch_tp_plugin": torch_tp_plugin,
            "deepspeed_plugins": deepspeed,
            "megatron_lm_plugin": megatron_lm_plugin,
        }
        if _from_accelerator:
            if partial.has_left:  # by `end_training` of the Accelerator before
                partial.join_again(cpu, **kwargs)
                if self.initialized:
                    self.release()
            self._release_unused(precision, asked_plugins)
        may_set = not self.initialized or (self._replaceable and (_from_accelerator or mixed_precision is not None))
        if may_set:
            self._make_settings(partial, precision, asked_plugins)
        elif mixed_precision is not None and check_precision(mixed_precision, "precision") != self._mixed_precision:
            raise ConfigurationError(
                f"mixed_precision={str(mixed_precision)!r} came too late: this rank already trains with "
                f"{self._mixed_precision!r}. {_HOW_TO_FREE}"
            )
        else:
            self._refuse_late(asked_plugins)
        self._was_used |= _from_accelerator
        self._living.add(self)

    @property
    def initialized(self) -> bool:
        """Whether the settings were made."""
        return "_partial" in self._shared_state

    @property
    def asked_plugins(self) -> Mapping[str, Any]:
        """The plugins by name as given by the script that made the settings; `None` for those it left out."""
        return self._asked_plugins

    @property
    def mixed_precision(self) -> str:
        """The precision: "no", "fp16", "bf16", "fp8" or "bf16-true"."""
        return self._mixed_precision

    @property
    def dynamo_plugin(self) -> TorchDynamoPlugin:
        """How prepared models are compiled; not at all with backend "no"."""
        return self._dynamo_plugin

    @property
    def deepspeed_plugins(self) -> "DeepSpeedPlugins | None":
        """The plugins of DeepSpeed; `None` if models are trained without it."""
        return self._shared_state.get("_deepspeed")

    @property
    def deepspeed_plugin(self) -> "DeepSpeedPlugin | None":
        """The plugin of DeepSpeed that is active; `None` if models are trained without it."""
        return None if self.deepspeed_plugins is None else self.deepspeed_plugins.active

    def get_deepspeed_plugin(self, name: str) -> "DeepSpeedPlugin":
        """Return one of several DeepSpeed plugins by its name."""
        return _given(self.deepspeed_plugins).get(name)

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Make one of several DeepSpeed plugins active: models that are prepared from now on follow it."""
        plugins = _given(self.deepspeed_plugins)
        plugins.select(plugins.first if name is None else name)

    @property
    def fsdp_plugin(self) -> FullyShardedDataParallelPlugin | None:
        """How models are sharded; `None` if they are not."""
        return self._arrangement.fsdp_plugin

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded."""
        return self.fsdp_plugin is not None

    @property
    def fsdp_notes(self) -> Sequence[str]:
        """What each option of FSDP1 became."""
        return self._arrangement.notes

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """How many ranks replicate a model and how many share a copy; `None` if not set and models are not sharded."""
        return self._arrangement.parallelism_config

    @property
    def torch_tp_plugin(self) -> TorchTensorParallelPlugin | None:
        """How matrices are split, in the form of an older option; `None` if they are not."""
        config = self.parallelism_config
        return None if config is None or not config.tp_enabled else TorchTensorParallelPlugin(config.sizes["tp"])

    @property
    def megatron_lm_plugin(self) -> "MegatronLMPlugin | None":
        """The options of Megatron-LM; `None` if there are none."""
        return self._shared_state.get("_megatron_lm")

    @property
    def distributed_type(self) -> DistributedType:
        """How the ranks work together."""
        if self.deepspeed_plugins is not None:
            return DistributedType.DEEPSPEED
        if self.megatron_lm_plugin is not None:
            return DistributedType.MEGATRON_LM
        return DistributedType.FSDP if self.is_fsdp2 else self._partial.distributed_type

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave the world (or only `group`)."""
        PartialState().destroy_process_group(group)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of `PartialState`, such as the device, the rank or the world size."""
        if hasattr(type(self), name):  # a property that raised an AttributeError: that of what it lacks
            return object.__getattribute__(self, name)
        partial = self.__dict__.get("_partial")
        if partial is None and name in _OF_RANK:
            partial = PartialState()
        if partial is None or name.startswith("__"):
            raise AttributeError(
                f"`AcceleratorState` object has no attribute {name!r}. This happens if "
                "`AcceleratorState._reset_state()` was called after the Accelerator was made. Make a new "
                "`Accelerator`, or call `AcceleratorState()`."
            )
        try:
            return getattr(partial, name)
        except AttributeError:
            if hasattr(type(partial), name):  # a property that raised it
                raise
            known = {*dir(self), *dir(partial)}
            raise AttributeError(
                f"'AcceleratorState' object has no attribute {name!r}.{did_you_mean(name, known)}"
            ) from None

    def __repr__(self) -> str:
        """Return rank, device and settings, one per line."""
        return f"{self._partial!r}Mixed precision type: {self.mixed_precision}\n"

    def release(self) -> None:
        """Allow other settings for the next `AcceleratorState`; rank and device stay."""
        self._replaceable = True
        self._environment.close()

    @staticmethod
    def reset(reset_partial_state: bool = False) -> None:
        """Forget the settings, and with `reset_partial_state` the world too; for tests and forked processes."""
        if "_environment" in AcceleratorState._shared_state:
            AcceleratorState._shared_state["_environment"].close()
        AcceleratorState._shared_state.clear()
        AcceleratorState._living.clear()
        if reset_partial_state:
            PartialState.reset()

    _reset_state = reset  # its name in Accelerate

    def _make_settings(self, partial: PartialState, precision: str, plugins: dict[str, Any]) -> None:
        """Make the settings, and what the process needs for them: a process group, variables, shared batches."""
        environment.refuse_unsupported_engines()
        compilation: TorchDynamoPlugin = plugins["dynamo_plugin"] or TorchDynamoPlugin()
        compilation.check_backend()
        deepspeed, megatron_lm = plugins["deepspeed_plugins"], plugins["megatron_lm_plugin"]
        arrangement = _arrangement_of(plugins, partial.num_processes)
        if partial.distributed_type == DistributedType.XLA:
            _check_whole(deepspeed=deepspeed, megatron_lm=megatron_lm, arrangement=arrangement)
        _check_alone(deepspeed, arrangement)
        self._mixed_precision, self._asked_plugins = precision, plugins
        self._dynamo_plugin, self._arrangement = compilation, arrangement
        self._deepspeed, self._megatron_lm = deepspeed, megatron_lm
        self._environment = ExitStack()
        self._prepare_sharding(partial)
        config = arrangement.parallelism_config
        if config is None:
            partial.share_batches(1)
        else:
            partial.share_batches(config.non_data_parallel_size, config.sizes["pp"])
        self._partial = partial
        self._replaceable = self._was_used = False

    def _release_unused(self, precision: str, plugins: dict[str, Any]) -> None:
        """Release the settings if other ones are requested and no existing Accelerator uses them."""
        if not self.initialized or self._replaceable or not self._was_used:
            return
        if (precision, plugins) == (self._mixed_precision, self._asked_plugins):
            return
        gc.collect()  # a cycle of references may be all that keeps an unused Accelerator
        if not self._living:
            self.release()

    def _refuse_late(self, plugins: dict[str, Any]) -> None:
        for name, plugin in plugins.items():
            if plugin is not None and plugin not in (getattr(self, name), self._asked_plugins[name]):
                raise ConfigurationError(
                    f"{name}={plugin} came too late: this rank already has {getattr(self, name)}. {_HOW_TO_FREE}"
                )

    def _prepare_sharding(self, partial: PartialState) -> None:
        if self.deepspeed_plugins is not None or self.megatron_lm_plugin is not None:
            partial.form_group()
        if self.deepspeed_plugins is not None and environment.variable("LOCAL_RANK") is None:
            # DeepSpeed reads it in forwards too.
            self._environment.enter_context(environment.local_rank_set(partial.local_process_index))
        if self.fsdp_plugin is None:
            return
        partial.form_group()
        if self.fsdp_plugin.cpu_ram_efficient_loading:
            # transformers reads these when it loads a model.
            variables = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
            self._environment.enter_context(environment.patch_environment(**variables))


def get_active_deepspeed_plugin(state: AcceleratorState) -> "DeepSpeedPlugin":
    """Return the active plugin of DeepSpeed.

    Raises:
        ConfigurationError: Without one.
    """
    return _given(state.deepspeed_plugins).active


def _deepspeed_plugins(given: Any) -> "DeepSpeedPlugins | None":
    if given is None:
        return None
    from trainer_lib.options.deepspeed.active_plugin import DeepSpeedPlugins

    return given if isinstance(given, DeepSpeedPlugins) else DeepSpeedPlugins(given)


def _given(plugins: "DeepSpeedPlugins | None") -> "DeepSpeedPlugins":
    if plugins is None:
        raise ConfigurationError("There is no DeepSpeed plugin. Give Accelerator(deepspeed_plugins={name: plugin}).")
    return plugins


def _arrangement_of(plugins: Mapping[str, Any], num_processes: int) -> Arrangement:
    """Return how ranks divide models and data, according to the plugins that were given."""
    fsdp, parallelism, tp = (plugins[name] for name in ("fsdp_plugin", "parallelism_config", "torch_tp_plugin"))
    deepspeed, megatron_lm = plugins["deepspeed_plugins"], plugins["megatron_lm_plugin"]
    if megatron_lm is not None:
        _check_only_engine(deepspeed, fsdp, parallelism, tp)
        fsdp = megatron_lm.sharding(num_processes)
        parallelism = ParallelismConfig(
            **megatron_lm.mesh_sizes(num_processes),
            tp_handler=megatron_lm.matrix_splitting,
            pp_handler=megatron_lm.pipeline,
        )
    return arrange(fsdp, parallelism, num_processes, tp, zero_shards=deepspeed is not None)


def _check_alone(deepspeed: "DeepSpeedPlugins | None", arrangement: Arrangement) -> None:
    """Raise for what does not work together with DeepSpeed."""
    if deepspeed is None:
        return
    if arrangement.fsdp_plugin is not None:
        raise ConfigurationError("deepspeed_plugin and fsdp_plugin both say how models are sharded. Give one of them.")
    config = arrangement.parallelism_config
    splits = [] if config is None else [name for name in ("pp", "tp") if config.sizes[name] > 1]
    if config is not None and splits:
        raise UnsupportedError(
            f"{splits[0]}_size={config.sizes[splits[0]]} splits the model, and DeepSpeed shards whole ones. With "
            "deepspeed_plugin, ParallelismConfig takes sp_size or cp_size and sizes of data parallelism; use "
            "fsdp_plugin for the others."
        )


def _check_whole(deepspeed: Any, megatron_lm: Any, arrangement: Arrangement) -> None:
    """Raise for what shards or splits models on devices of torch_xla."""
    config = arrangement.parallelism_config
    split = {} if config is None else {f"{name}_size": size for name, size in config.sizes.items() if size > 1}
    split.pop("dp_replicate_size", None)
    given = {
        "deepspeed_plugin": deepspeed,
        "megatron_lm_plugin": megatron_lm,
        "fsdp_plugin": arrangement.fsdp_plugin,
        **split,
    }
    for name, value in given.items():
        if value is not None:
            raise UnsupportedError(
                f"{name}={value if name in split else type(value).__name__} does not work on devices of torch_xla, "
                "where each rank holds the whole model. Leave it out, or train on GPUs or the CPU."
            )


def _check_only_engine(*others: Any) -> None:
    """Raise for what says the same as options of Megatron-LM, or contradicts them."""
    names = ("deepspeed_plugin", "fsdp_plugin", "parallelism_config", "torch_tp_plugin")
    for name, other in zip(names, others, strict=True):
        if other is not None:
            raise ConfigurationError(
                f"megatron_lm_plugin and {name} both say how models are split and sharded. Give one of them."
            )
