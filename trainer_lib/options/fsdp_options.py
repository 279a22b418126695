"""Options of FSDP2, which also accept the names of FSDP1."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options import fsdp1_translation
from trainer_lib.options.base import check_count, check_flag
from trainer_lib.options.fsdp1_translation import Offload, Strategy

# The default of torch's size_based_auto_wrap_policy.
_LARGE = 100_000_000
_FLAGS = ("forward_prefetch", "activation_checkpointing", "cpu_ram_efficient_loading", "sync_module_states")


@dataclass(repr=False)
class FullyShardedDataParallelPlugin:
    """How a model is sharded: each rank holds a part of each weight, its gradient and its optimizer state.

    Sharding is FSDP2 (`torch.distributed.fsdp.fully_shard`). Options of FSDP1 that have an equivalent are accepted. An
    option left at `None` has the launcher's value, else the default.

    Args:
        fsdp_version: 2.
        sharding_strategy: FSDP1's form of `reshard_after_forward`; HYBRID_SHARD replicates across machines.
        reshard_after_forward: Whether to free the gathered weights of a block after its forward; a number reshards
            them to that many ranks only.
        backward_prefetch: Only BACKWARD_PRE, which FSDP2 always does.
        mixed_precision_policy: A `MixedPrecisionPolicy`, its fields in a dict, or "bf16", "fp16", "fp32"; by default
            the policy that the accelerator's `mixed_precision` needs.
        auto_wrap_policy: Which modules are sharded separately: "transformer_based_wrap", "size_based_wrap",
            "no_wrap", classes or their names, or a function of (module, recurse, nonwrapped_numel). By default the
            classes that the model names (`_no_split_modules`), else its repeated blocks.
        cpu_offload: Keep the shards and the optimizer's state in CPU memory.
        ignored_modules: Modules to leave whole on each rank, or a pattern of their names.
        state_dict_type: What `save_state` writes: SHARDED_STATE_DICT (the default) or FULL_STATE_DICT.
        state_dict_config: FSDP1's options of states; a whole state is on the CPU of the main process.
        optim_state_dict_config: The same for the optimizer.
        limit_all_gathers: Only `True`.
        use_orig_params: Only `True`, which FSDP2 always does.
        param_init_fn: Initializes a module whose weights are on the meta device in the main process; by default the
            module's `reset_parameters`.
        sync_module_states: Start from the weights of the main process, as DDP does; by default `True`.
        forward_prefetch: Gather the next block's weights while a block runs its forward.
        activation_checkpointing: Recompute the blocks' activations in the backward instead of keeping them.
        cpu_ram_efficient_loading: Let transformers load the weights in the main process only.
        transformer_cls_names_to_wrap: The names of classes to shard separately.
        min_num_params: The number of parameters from which "size_based_wrap" shards a module separately.

    Example:
        >>> plugin = FullyShardedDataParallelPlugin(sharding_strategy="SHARD_GRAD_OP")
        >>> plugin.reshard_after_forward
        False
    """

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: Iterable[nn.Module] | str | None = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | None = None
    min_num_params: int | None = None

    def __post_init__(self) -> None:
        """Fill in the launcher's values, check all values, and translate them to FSDP2's options."""
        launcher = environment.sharding_requested()
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is None:
                setattr(self, field.name, launcher.get(field.name))
        fsdp1_translation.check_unsupported_options(self)
        self.fsdp_version = 2
        self._strategy = fsdp1_translation.strategy(self.sharding_strategy, self.reshard_after_forward)
        self.sharding_strategy, self.reshard_after_forward = self._strategy
        self._offload = fsdp1_translation.offload(self.cpu_offload)
        self.set_state_dict_type(self.state_dict_type)
        self.set_mixed_precision(self.mixed_precision_policy, override=True)
        for name in _FLAGS:
            value = getattr(self, name)
            setattr(self, name, name == "sync_module_states" if value is None else value)
            check_flag(name, getattr(self, name))
        self._check_start()
        self._read_wrapping(launcher)

    def __repr__(self) -> str:
        """Return the options that are set."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        options = ", ".join(f"{name}={value!r}" for name, value in fields.items() if value not in (None, False))
        return f"{type(self).__name__}({options})"

    @property
    def is_hybrid(self) -> bool:
        """Whether weights are sharded within a machine and replicated across machines."""
        return self._strategy.is_hybrid

    @property
    def offload(self) -> Offload:
        """Whether shards are kept in CPU memory, and whether it is pinned."""
        return self._offload

    @property
    def writes_shards(self) -> bool:
        """Whether each rank saves its shards."""
        return self.state_dict_type == "SHARDED_STATE_DICT"

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Set what `save_state` writes: FULL_STATE_DICT or SHARDED_STATE_DICT."""
        chosen = self.state_dict_type if state_dict_type is None else state_dict_type
        self.state_dict_type = fsdp1_translation.state_dict_type(chosen)

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Set the dtypes of compute and reduction; values set before are kept unless `override` is true."""
        if buffer_autocast:
            raise ConfigurationError(
                "set_mixed_precision(buffer_autocast=True): FSDP2 leaves buffers in their own type. Leave it out."
            )
        if mixed_precision is not None and (override or self.mixed_precision_policy is None):
            self.mixed_precision_policy = fsdp1_translation.mixed_precision(mixed_precision)

    def _check_start(self) -> None:
        if self.param_init_fn is not None and not callable(self.param_init_fn):
            raise ConfigurationError(f"param_init_fn must be a function of a module, got {self.param_init_fn!r}.")
        if self.cpu_ram_efficient_loading and not self.sync_module_states:
            raise ConfigurationError(
                "cpu_ram_efficient_loading=True loads the weights in the main process only, and "
                "sync_module_states=False keeps them there. Leave sync_module_states out."
            )

    def _read_wrapping(self, launcher: dict[str, Any]) -> None:
        names = self.transformer_cls_names_to_wrap
        if isinstance(names, str):
            self.transformer_cls_names_to_wrap = [name.strip() for name in names.split(",") if name.strip()]
        policy = fsdp1_translation.wrap_policy(self.auto_wrap_policy)
        if policy is None and self.transformer_cls_names_to_wrap:
            policy = "transformer_based_wrap"
        if policy is None and self.min_num_params is not None:
            policy = "size_based_wrap"
        if policy == "size_based_wrap" and self.min_num_params is None:
            self.min_num_params = launcher.get("size_from", _LARGE)
        for name, needed in (
            ("transformer_cls_names_to_wrap", "transformer_based_wrap"),
            ("min_num_params", "size_based_wrap"),
        ):
            if getattr(self, name) is not None and policy != needed:
                raise ConfigurationError(
                    f"{name}={getattr(self, name)!r} needs auto_wrap_policy={needed!r} (got {policy!r}). "
                    "Give one of them."
                )
        if self.min_num_params is not None:
            check_count("min_num_params", self.min_num_params)
        self.auto_wrap_policy = policy


__all__ = ["FullyShardedDataParallelPlugin", "Offload", "Strategy"]
