"""This file is what the engine is set to: precision on top of the place of the process."""

import gc
from contextlib import ExitStack
from typing import Any, ClassVar
from weakref import WeakSet

from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.options.compile_options import TorchDynamoPlugin, compilation_plugin
from trainer_lib.options.enums import DistributedType, PrecisionType
from trainer_lib.options.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.options.precision_options import check_precision
from trainer_lib.parallelism_config import ParallelismConfig
from trainer_lib.state.parallelism_resolution import Arrangement, arrange
from trainer_lib.state.partial_state import PartialState
from trainer_lib.state.rank_control import ProcessControl

_HOW_TO_FREE = (
    "All Accelerators and Trainers of a process share these settings while one of them lives. Before making one with "
    "other settings, delete the last reference to the first, or call `accelerator.free_memory()` on it "
    "(`trainer.accelerator.free_memory()` of a Trainer)."
)


class AcceleratorState(ProcessControl):
    """The settings of the engine, on top of `PartialState`. All instances are one.

    Args:
        mixed_precision: "no", "fp16", "bf16", or "bf16-true" for weights in bf16; by default what the launcher says.
        cpu: Stay on the CPU even if there is an accelerator.
        dynamo_plugin: How models are compiled; by default as the launcher says, or not at all.
        fsdp_plugin: How models are sharded; by default as the launcher says, or not at all.
        parallelism_config: How many processes replicate a model, and how many share one copy.
        **kwargs: The fields of `InitProcessGroupKwargs`.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}
    _living: ClassVar["WeakSet[AcceleratorState]"] = WeakSet()  # each Accelerator has one

    # Engines that this version does not have; scripts ask whether there is one.
    deepspeed_plugin: None = None
    megatron_lm_plugin: None = None
    torch_tp_plugin: None = None

    _arrangement: Arrangement
    _asked: tuple[Any, ...]
    _dynamo_plugin: TorchDynamoPlugin
    _mixed_precision: str
    _partial: PartialState
    _replaceable: bool
    _was_used: bool  # by an Accelerator
    _told_to_others: ExitStack

    def __init__(
        self,
        mixed_precision: str | PrecisionType | None = None,
        cpu: bool = False,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: ParallelismConfig | None = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        self.__dict__ = self._shared_state
        refuse_engines(
            deepspeed_plugin=deepspeed_plugin,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
        )
        dynamo_plugin = compilation_plugin(None, dynamo_plugin)
        partial = PartialState(cpu, **kwargs)
        precision = check_precision(mixed_precision or environment.mixed_precision_requested(), "precision")
        asked = precision, dynamo_plugin, fsdp_plugin, parallelism_config
        if _from_accelerator:
            if partial.has_left:  # by `end_training` of the Accelerator before
                partial.join_again(cpu, **kwargs)
                if self.initialized:
                    self.release()
            self._release_unused(asked)
        if not self.initialized or (self._replaceable and (_from_accelerator or mixed_precision is not None)):
            environment.refuse_unsupported_engines()
            dynamo_plugin = dynamo_plugin or TorchDynamoPlugin()
            dynamo_plugin.check_backend()
            arrangement = arrange(fsdp_plugin, parallelism_config, partial.num_processes)
            self._mixed_precision, self._asked = precision, asked
            self._dynamo_plugin = dynamo_plugin
            self._arrangement = arrangement
            self._told_to_others = ExitStack()
            self._prepare_sharding(partial)
            self._partial = partial
            self._replaceable = self._was_used = False
        elif mixed_precision is not None and check_precision(mixed_precision, "precision") != self._mixed_precision:
            raise ConfigurationError(
                f"mixed_precision={str(mixed_precision)!r} came too late: this process already trains with "
                f"{self._mixed_precision!r}. {_HOW_TO_FREE}"
            )
        else:
            self._refuse_late(
                dynamo_plugin=dynamo_plugin, fsdp_plugin=fsdp_plugin, parallelism_config=parallelism_config
            )
        self._was_used |= _from_accelerator
        self._living.add(self)

    @property
    def initialized(self) -> bool:
        """Whether the engine's settings are made."""
        return "_partial" in self._shared_state

    @property
    def mixed_precision(self) -> str:
        """The precision: "no", "fp16", "bf16" or "bf16-true"."""
        return self._mixed_precision

    @property
    def dynamo_plugin(self) -> TorchDynamoPlugin:
        """How prepared models are compiled; with the backend "no", not at all."""
        return self._dynamo_plugin

    @property
    def fsdp_plugin(self) -> FullyShardedDataParallelPlugin | None:
        """How models are sharded, if they are."""
        return self._arrangement.fsdp_plugin

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded."""
        return self.fsdp_plugin is not None

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """How many processes replicate a model and how many share a copy, if that was said or models are sharded."""
        return self._arrangement.parallelism_config

    @property
    def distributed_type(self) -> DistributedType:
        """How the processes work together."""
        return DistributedType.FSDP if self.is_fsdp2 else self._partial.distributed_type

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave the world (or only `group`)."""
        self._partial.destroy_process_group(group)

    def __getattr__(self, name: str) -> Any:
        """Return what `PartialState` knows: the device, the rank, the world."""
        partial = self.__dict__.get("_partial")
        if partial is None or name.startswith("__"):
            raise AttributeError(f"AcceleratorState has no {name!r}; it is made by `AcceleratorState()`.")
        return getattr(partial, name)

    def __repr__(self) -> str:
        """Return place and settings in one line a fact."""
        return f"{self._partial!r}Mixed precision type: {self.mixed_precision}\n"

    def release(self) -> None:
        """Let the next `AcceleratorState` have other settings; the process keeps its place and device."""
        self._replaceable = True
        self._told_to_others.close()

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Forget the settings, and with `reset_partial_state` the place too; for tests."""
        if "_told_to_others" in AcceleratorState._shared_state:
            AcceleratorState._shared_state["_told_to_others"].close()
        AcceleratorState._shared_state.clear()
        AcceleratorState._living.clear()
        if reset_partial_state:
            PartialState._reset_state()

    def _release_unused(self, asked: tuple[Any, ...]) -> None:
        """Let go of the settings if others are asked for now and no living Accelerator has them."""
        if not self.initialized or self._replaceable or not self._was_used or asked == self._asked:
            return
        gc.collect()  # one that is done may be kept by a cycle of references only
        if not self._living:
            self.release()

    def _refuse_late(self, **plugins: Any) -> None:
        for name, plugin in plugins.items():
            if plugin is not None and plugin != getattr(self, name):
                raise ConfigurationError(
                    f"{name}={plugin} came too late: this process already has {getattr(self, name)}. {_HOW_TO_FREE}"
                )

    def _prepare_sharding(self, partial: PartialState) -> None:
        if self.fsdp_plugin is None:
            return
        partial.form_group()
        if self.fsdp_plugin.cpu_ram_efficient_loading:
            # transformers looks there when it loads a model.
            variables = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
            self._told_to_others.enter_context(environment.patch_environment(**variables))


def refuse_engines(**plugins: Any) -> None:
    """Raise for a plugin of an engine that this version does not have."""
    for name, plugin in plugins.items():
        if plugin is not None:
            raise UnsupportedError(
                f"{name}={plugin!r}: this version trains on one process, with DDP or with FSDP2. Leave it out."
            )
