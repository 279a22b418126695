"""Options of FSDP2, which also accept the names of FSDP1."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError, did_you_mean
from trainer_lib.options.base import Options, check_count, check_flag
from trainer_lib.options.parallel import fsdp1_translation
from trainer_lib.options.parallel.fsdp1_translation import Offload, Strategy, WholeState

# The default of torch's size_based_auto_wrap_policy.
_LARGE = 100_000_000
_FLAGS = (
    "forward_prefetch",
    "activation_checkpointing",
    "activation_checkpointing_offload",
    "cpu_ram_efficient_loading",
    "sync_module_states",
)


@dataclass(repr=False, eq=False)
class FullyShardedDataParallelPlugin(Options):
    """How a model is sharded: each rank holds a part of each weight, its gradient and its optimizer state.

    Sharding is FSDP2 (`torch.distributed.fsdp.fully_shard`). FSDP1's options are translated: `notes` lists
    the translations, and an Accelerator warns about them. An option left at `None` has the launcher's value, else the
    default.

    Args:
        fsdp_version: 2; 1 means the same.
        sharding_strategy: FSDP1's form of `reshard_after_forward`; HYBRID_SHARD replicates across machines, NO_SHARD
            is DDP.
        reshard_after_forward: Whether to free the gathered weights of a block after its forward; a number reshards
            them to that many ranks only.
        backward_prefetch: BACKWARD_PRE (the default) gathers the next block's weights while a block runs its
            backward; NO_PREFETCH and BACKWARD_POST gather them when it needs them.
        mixed_precision_policy: A `MixedPrecisionPolicy`, its fields in a dict, or "bf16", "fp16", "fp32"; by default
            the policy that the accelerator's `mixed_precision` needs.
        auto_wrap_policy: Which modules are sharded separately: "transformer_based_wrap", "size_based_wrap",
            "no_wrap", classes or their names, or a function of (module, recurse, nonwrapped_numel). By default the
            classes that the model names (`_no_split_modules`), else its repeated blocks.
        cpu_offload: Keep the shards and the optimizer's state in CPU memory.
        ignored_modules: Modules to leave whole on each rank, or a pattern of their names.
        state_dict_type: What `save_state` writes: SHARDED_STATE_DICT (the default) or FULL_STATE_DICT.
        state_dict_config: Which ranks `get_state_dict` gives the whole weights (`rank0_only`), and where
            (`offload_to_cpu`); by default rank 0, on the CPU. A `FullStateDictConfig` also means FULL_STATE_DICT.
        optim_state_dict_config: Accepted; rank 0 reads and writes an optimizer's whole state, on the CPU.
        limit_all_gathers: Accepted; FSDP2 needs no such limit.
        use_orig_params: Always true in FSDP2.
        param_init_fn: Initializes a module whose weights are on the meta device in the main process; by default the
            module's `reset_parameters`.
        sync_module_states: Start from the weights of the main process, as DDP does; by default `True`.
        forward_prefetch: Gather the next block's weights while a block runs its forward.
        activation_checkpointing: Recompute the blocks' activations in the backward instead of keeping them.
        cpu_ram_efficient_loading: Let transformers load the weights in the main process only.
        transformer_cls_names_to_wrap: The names of classes to shard separately.
        min_num_params: "size_based_wrap" shards modules with at least this many parameters separately.
        activation_checkpointing_offload: Keep the inputs of recomputed blocks in CPU memory until the backward.

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
    activation_checkpointing_offload: bool | None = None

    def __post_init__(self) -> None:
        """Fill in the launcher's values, check all values, and translate them to FSDP2's options."""
        self._notes: list[str] = []
        size_from = self._fill_from_launcher()
        self.fsdp_version = fsdp1_translation.version(self.fsdp_version, self._notes)
        fsdp1_translation.note_flags(self, self._notes)
        self.backward_prefetch = fsdp1_translation.backward_prefetch(self.backward_prefetch, self._notes)
        self._strategy = fsdp1_translation.strategy(self.sharding_strategy, self.reshard_after_forward, self._notes)
        self.sharding_strategy, self.reshard_after_forward = self._strategy
        fsdp1_translation.whole_state("optim_state_dict_config", self.optim_state_dict_config)
        self.set_state_dict_type()
        self.set_mixed_precision(self.mixed_precision_policy, override=True)
        for name in _FLAGS:
            value = getattr(self, name)
            setattr(self, name, name == "sync_module_states" if value is None else value)
            check_flag(name, getattr(self, name))
        self._check_values()
        self._read_wrapping(size_from)
        self._check_ddp()

    def __repr__(self) -> str:
        """Return the options that are set."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        options = ", ".join(f"{name}={value!r}" for name, value in fields.items() if value not in (None, False))
        return f"{type(self).__name__}({options})"

    @property
    def notes(self) -> Sequence[str]:
        """What each option of FSDP1 became, such as "min_num_params=0 is auto_wrap_policy='no_wrap'"."""
        return tuple(self._notes)

    @property
    def shards(self) -> bool:
        """Whether models are sharded; with NO_SHARD they train with DDP."""
        return self._strategy.shards

    @property
    def is_hybrid(self) -> bool:
        """Whether weights are sharded within a machine and replicated across machines."""
        return self._strategy.is_hybrid

    @property
    def offload(self) -> Offload:
        """Whether shards are kept in CPU memory, and whether it is pinned."""
        return fsdp1_translation.offload(self.cpu_offload)

    @property
    def writes_shards(self) -> bool:
        """Whether each rank saves its shards."""
        return self.state_dict_type == "SHARDED_STATE_DICT"

    @property
    def whole_state(self) -> WholeState:
        """Which ranks `get_state_dict` gives the whole weights, and where."""
        return fsdp1_translation.whole_state("state_dict_config", self.state_dict_config)

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Set what `save_state` writes: FULL_STATE_DICT or SHARDED_STATE_DICT."""
        fsdp1_translation.whole_state("state_dict_config", self.state_dict_config)
        chosen = self.state_dict_type if state_dict_type is None else state_dict_type
        self.state_dict_type = fsdp1_translation.state_dict_type(chosen, self.state_dict_config, self._notes)

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Set the dtypes of compute and reduction; values set before are kept unless `override` is true.

        Args:
            mixed_precision: One of the forms of `mixed_precision_policy`.
            buffer_autocast: Accepted: FSDP2 leaves buffers in their own type either way.
            override: Whether to replace a policy that was set before.
        """
        del buffer_autocast
        if mixed_precision is not None and (override or self.mixed_precision_policy is None):
            self.mixed_precision_policy = fsdp1_translation.mixed_precision(mixed_precision, self._notes)

    def validate_mixed_precision_policy(self) -> None:
        """Raise unless `mixed_precision_policy` has one of its forms."""
        self.set_mixed_precision(self.mixed_precision_policy, override=True)

    def set_cpu_offload(self) -> None:
        """Turn True or False in `cpu_offload` into torch's policy."""
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

        chosen = self.offload
        self.cpu_offload = CPUOffloadPolicy(pin_memory=chosen.pin_memory) if chosen.to_cpu else OffloadPolicy()

    def validate_cpu_offload(self) -> None:
        """Raise unless `cpu_offload` has one of its forms."""
        fsdp1_translation.offload(self.cpu_offload)

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Take the classes that a model names (`_no_split_modules`) for "transformer_based_wrap", unless some are set.

        Raises:
            ConfigurationError: If the model has no module of a class.
        """
        if self.auto_wrap_policy != "transformer_based_wrap":
            return
        known = {type(module).__name__ for module in model.modules()}
        for name in self.transformer_cls_names_to_wrap or ():
            if name not in known:
                raise ConfigurationError(
                    f"This {type(model).__name__} has no module of the class {name!r}.{did_you_mean(name, known)}"
                )
        if not self.transformer_cls_names_to_wrap:
            declared: Iterable[str] = getattr(model, "_no_split_modules", None) or ()
            self.transformer_cls_names_to_wrap = [name for name in declared if name in known] or None

    def _fill_from_launcher(self) -> int:
        """Fill in the launcher's values; return its size of "size_based_wrap"."""
        launcher = environment.sharding_requested()
        given = {field.name for field in dataclasses.fields(self) if getattr(self, field.name) is not None}
        for name, value in fsdp1_translation.launcher_options(launcher, given, self.fsdp_version).items():
            if name not in ("size_from", "fsdp_version"):
                setattr(self, name, value)
        # 1 is the default of Accelerate's launcher, so it needs no note.
        self.fsdp_version = self.fsdp_version or 2
        return launcher.get("size_from", _LARGE)

    def _check_values(self) -> None:
        fsdp1_translation.offload(self.cpu_offload)
        if self.param_init_fn is not None and not callable(self.param_init_fn):
            raise ConfigurationError(f"param_init_fn must be a function of a module, got {self.param_init_fn!r}.")
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            raise ConfigurationError(
                "activation_checkpointing_offload=True needs activation_checkpointing=True (got False). Set both, or "
                "neither."
            )

    def _read_wrapping(self, size_from: int) -> None:
        names = self.transformer_cls_names_to_wrap
        if isinstance(names, str):
            self.transformer_cls_names_to_wrap = [name.strip() for name in names.split(",") if name.strip()]
        policy = fsdp1_translation.wrap_policy(self.auto_wrap_policy)
        if policy is None and self.transformer_cls_names_to_wrap:
            policy = "transformer_based_wrap"
        if policy is None and self.min_num_params is not None:
            policy = "size_based_wrap"
        if policy == "size_based_wrap" and self.min_num_params is None:
            self.min_num_params = size_from
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
            check_count("min_num_params", self.min_num_params, at_least=0)
        if self.min_num_params == 0:
            self._notes.append("min_num_params=0 is auto_wrap_policy='no_wrap'")
            policy, self.min_num_params = "no_wrap", None
        self.auto_wrap_policy = policy

    def _check_ddp(self) -> None:
        if self.shards:
            return
        if self.mixed_precision_policy is not None:
            raise ConfigurationError(
                "sharding_strategy='NO_SHARD' trains with DDP, which has no mixed_precision_policy (got "
                f"{self.mixed_precision_policy!r}). Give Accelerator(mixed_precision=…) instead."
            )
        for name, is_lost in (
            ("cpu_offload", self.offload.to_cpu),
            ("activation_checkpointing", self.activation_checkpointing),
            ("ignored_modules", self.ignored_modules is not None),
        ):
            if is_lost:
                self._notes.append(f"{name}={getattr(self, name)!r} is left out (DDP has no such option)")


__all__ = ["FullyShardedDataParallelPlugin", "Offload", "Strategy"]
