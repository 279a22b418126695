"""Options of DeepSpeed, under Accelerate's names."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from trainer_lib.foundation import environment
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError, unknown
from trainer_lib.options.base import Options, check_choice, check_count, check_flag, check_positive
from trainer_lib.options.deepspeed.auto_values import conflicts, fill_auto_values, refuse_conflicts
from trainer_lib.options.deepspeed.deepspeed_config_file import AUTO, HfDeepSpeedConfig
from trainer_lib.options.deepspeed.deepspeed_launcher_values import fill_from_launcher
from trainer_lib.options.deepspeed.zero3_init import built_models, construction_config

KEYS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
"""The dotted key in DeepSpeed's file of each field of `DeepSpeedPlugin` that has one."""

# A section under another name would have no effect: DeepSpeed does not look at it either.
_SECTIONS = (
    "zero_optimization", "optimizer", "scheduler", "fp16", "bf16", "gradient_accumulation_steps", "gradient_clipping",
    "train_batch_size", "train_micro_batch_size_per_gpu",
)  # fmt: skip

# Of these, another value than an object would have no effect. With an example of each.
_OBJECTS = {
    "zero_optimization": '{"stage": 2}',
    "zero_optimization.offload_optimizer": '{"device": "cpu"}',
    "zero_optimization.offload_param": '{"device": "cpu"}',
    "optimizer": '{"type": "AdamW", "params": {"lr": "auto"}}',
    "scheduler": '{"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}',
    "fp16": '{"enabled": true}',
    "bf16": '{"enabled": true}',
}

# Of these, other keys would have no effect.
_KEYS_OF = {"optimizer": ("type", "params", "legacy_fusion"), "scheduler": ("type", "params")}

_WITHOUT_FILE: dict[str, Any] = {
    "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": AUTO,
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
    "zero_optimization": {"stage": AUTO},
}


@dataclass
class DeepSpeedPlugin(Options):
    """The values of a DeepSpeed file, with fields for the most used ones.

    A field that is set adds its value to the file's, or replaces an `"auto"`; one that differs from the file's value
    is an error that names both. Afterwards fields have the file's values, and `deepspeed_config` is the whole.
    Fields that are left out have the launcher's values (`launch --use_deepspeed`) if there are any.
    Stage 0 trains with DDP. The accumulation window, clipping and precision stay the Accelerator's at every stage.

    Args:
        hf_ds_config: The path of DeepSpeed's JSON file, its values as a dict, or an `HfDeepSpeedConfig`.
        gradient_accumulation_steps: The number of micro-batches of an optimizer step, or "auto".
        gradient_clipping: The largest norm of the gradients, or "auto".
        zero_stage: What is sharded: nothing (0), optimizer states (1), gradients too (2, the default without a file),
            weights too (3).
        is_train_batch_min: Use the smallest batch size of several loaders, otherwise the largest.
        offload_optimizer_device: Where optimizer states are kept: "none", "cpu" or "nvme"; needs a stage above 0.
        offload_param_device: Where weights are kept: "none", "cpu" or "nvme"; needs stage 3.
        offload_optimizer_nvme_path: The folder for "nvme".
        offload_param_nvme_path: The folder for "nvme".
        zero3_init_flag: Whether models of transformers are sharded while they are built, once there is an
            `Accelerator`; by default with stage 3.
        zero3_save_16bit_model: Whether stage 3 gathers 16-bit weights to save them.
        transformer_moe_cls_names: Classes of mixture-of-experts layers, whose weights are gathered together.
        enable_msamp: Not supported.
        msamp_opt_level: Not supported.

    Example:
        >>> plugin = DeepSpeedPlugin(zero_stage=3, offload_param_device="cpu")
        >>> plugin.get_value("zero_optimization.offload_param.device")
        'cpu'
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: Any = None
    gradient_clipping: Any = None
    zero_stage: Any = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: Any = None
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None

    def __post_init__(self) -> None:
        """Merge the fields into the file's values, and check all of them."""
        self._notes: list[str] = []
        self._filled: dict[str, Any] = {}
        self._refuse_msamp()
        fill_from_launcher(self)
        if self.hf_ds_config is None:
            self.hf_ds_config = _WITHOUT_FILE
            self.zero_stage = 2 if self.zero_stage is None else self.zero_stage
        self.hf_ds_config = HfDeepSpeedConfig(self.hf_ds_config)
        self._check_sections()
        self._merge()
        self._check_values()
        self._check_offloading()
        self._fit_stage_3()
        if self.transformer_moe_cls_names is not None:
            self.transformer_moe_cls_names = _class_names(self.transformer_moe_cls_names)

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """All values, as in DeepSpeed's file."""
        return self.hf_ds_config.config

    @property
    def notes(self) -> Sequence[str]:
        """Which fields have no effect at this stage."""
        return tuple(self._notes)

    @property
    def filled(self) -> dict[str, Any]:
        """The values that replaced an `"auto"`, by their dotted keys."""
        return dict(self._filled)

    def get_value(self, key: str, default: Any = None) -> Any:
        """Return the value at a dotted key, or `default`."""
        return self.hf_ds_config.get_value(key, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether the value at a dotted key is `"auto"`."""
        return self.get_value(ds_key_long) == AUTO

    def is_zero3_init_enabled(self) -> bool:
        """Whether models are sharded while they are built."""
        return bool(self.zero3_init_flag)

    def zero3_init_context_manager(self, enable: bool = False) -> AbstractContextManager[None]:
        """Return a context in which models of transformers are built whole, or sharded with `enable=True`."""
        return built_models(construction_config(self.hf_ds_config) if enable else None)

    def micro_batch_size(self, batch_sizes: Sequence[int]) -> int:
        """Return the batch size for DeepSpeed out of those of several loaders (see `is_train_batch_min`)."""
        return min(batch_sizes) if self.is_train_batch_min else max(batch_sizes)

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Replace each `"auto"` by the value given for its dotted key, and compare the other values with those given.

        Args:
            prefix: The dotted key of `config`'s section, with a dot at its end.
            mismatches: A list that receives conflicts; by default conflicts are an error.
            config: A section to process instead of the whole config.
            must_match: Whether values that differ are conflicts.
            **kwargs: Values by dotted keys, such as `**{"optimizer.params.lr": 1e-3}`.

        Raises:
            ConfigurationError: If values differ, or an `"auto"` has no value. The config is then unchanged.

        Example:
            >>> plugin = DeepSpeedPlugin({"gradient_clipping": "auto", "zero_optimization": {"stage": 1}})
            >>> plugin.deepspeed_config_process(gradient_clipping=1.0)
            >>> plugin.filled
            {'gradient_clipping': 1.0}
        """
        section = self.hf_ds_config if config is None else HfDeepSpeedConfig.of_section(config)
        found = conflicts(section, kwargs, prefix) if must_match else []
        if mismatches is None:
            refuse_conflicts(found)
        else:
            mismatches.extend(found)
        self._filled |= fill_auto_values(section, kwargs, prefix)
        self._read_back()

    def agreed_accumulation(self, requested: int | None) -> int | None:
        """Return the number of micro-batches that was requested, or that of the file; both must be equal.

        Raises:
            ConfigurationError: If both name a number, and they differ.
        """
        of_file = self.gradient_accumulation_steps
        if of_file in (None, AUTO):
            return requested
        if requested not in (None, of_file):
            refuse_conflicts(
                [
                    f"gradient_accumulation_steps is {of_file!r} in the DeepSpeed config and {requested!r} in the "
                    "arguments"
                ]
            )
        return of_file

    def agreed_precision(self, requested: str | None) -> str | None:
        """Return the precision that was requested, or that of the file; one that differs from the file's is an error.

        Raises:
            ConfigurationError: If both name a precision, and they differ.
        """
        of_file = next((name for name in ("fp16", "bf16") if self.get_value(f"{name}.enabled") is True), None)
        precision = of_file if requested is None else requested
        if precision is not None:
            check_choice("mixed_precision with DeepSpeed", precision, ("no", "fp16", "bf16"))
        for name in ("fp16", "bf16"):
            key, enabled, value = f"{name}.enabled", name == precision, self.get_value(f"{name}.enabled")
            if value == AUTO:
                enabled = name == (precision or environment.mixed_precision_requested())
                self._filled[key] = enabled
                self.hf_ds_config.set_value(key, enabled)
            elif value is not None and bool(value) != enabled and precision is not None:
                refuse_conflicts([f"{key} is {value!r} in the DeepSpeed config, and mixed_precision={precision!r}"])
        return precision

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Set the precision ("no", "fp16" or "bf16") unless the file sets one; another one there is an error."""
        check_choice("mixed_precision", mixed_precision, ("no", "fp16", "bf16"))
        for name in ("fp16", "bf16"):
            key, enabled = f"{name}.enabled", name == mixed_precision
            if self.get_value(key) in (None, AUTO):
                self.hf_ds_config.set_value(key, enabled)
            elif bool(self.get_value(key)) != enabled and mixed_precision != "no":
                refuse_conflicts(
                    [
                        f"{key} is {self.get_value(key)!r} in the DeepSpeed config and {enabled!r} by "
                        f"mixed_precision={mixed_precision!r}"
                    ]
                )

    def _refuse_msamp(self) -> None:
        if self.enable_msamp or self.msamp_opt_level is not None:
            raise UnsupportedError(
                f"DeepSpeedPlugin(enable_msamp={self.enable_msamp!r}, msamp_opt_level={self.msamp_opt_level!r}) asks "
                "for MS-AMP, which this version does not support. Leave both out, and train with bf16."
            )

    def _merge(self) -> None:
        """Put the fields that are set into the config, then give all fields the config's values."""
        stage = KEYS["zero_stage"]
        if self.get_value(stage) is not None:
            self.hf_ds_config.set_value(stage, _stage(stage, self.get_value(stage)))
        if self.zero_stage is not None:
            self.zero_stage = _stage("zero_stage", self.zero_stage)
        given = {key: getattr(self, name) for name, key in KEYS.items() if getattr(self, name) is not None}
        refuse_conflicts(conflicts(self.hf_ds_config, given))
        for key, value in given.items():
            if self.is_auto(key) and value != AUTO:
                self._filled[key] = value
            self.hf_ds_config.set_value(key, value)
        if self.get_value(stage) is None:
            self.hf_ds_config.set_value(stage, 0)  # DeepSpeed's own default
        elif self.get_value(stage) == AUTO:
            raise ConfigurationError(_unknown_stage(stage, AUTO))
        self._read_back()

    def _read_back(self) -> None:
        for name, key in KEYS.items():
            setattr(self, name, self.get_value(key))

    def _check_sections(self) -> None:
        for name, example in _OBJECTS.items():
            value = self.get_value(name)
            if value is not None and not isinstance(value, dict):
                raise ConfigurationError(
                    f"{name} in the DeepSpeed config must be an object with keys, such as {example} (got {value!r})."
                )
        if self.deepspeed_config.get("bfloat16"):
            raise ConfigurationError("The DeepSpeed config has 'bfloat16'. Did you mean 'bf16'?")
        zero = self.get_value("zero_optimization") or {}
        # Without a stage, this is stage 0, at which DeepSpeed does not look at the others.
        if "stage" not in zero and (meant := get_close_matches("stage", zero, n=1)):
            raise ConfigurationError(
                f"zero_optimization in the DeepSpeed config has {meant[0]!r}. Did you mean 'stage'?"
            )
        for section, known in _KEYS_OF.items():
            for name in self.get_value(section) or {}:
                if name not in known and name[:1].isalpha():
                    raise ConfigurationError(unknown(f"key of {section} in the DeepSpeed config", name, known))
        for name in self.deepspeed_config.keys() - _SECTIONS:
            meant = get_close_matches(name, _SECTIONS, n=1, cutoff=0.85)
            if meant and name[0].isalpha():  # others, such as "_optimizer", are commented out
                raise ConfigurationError(f"The DeepSpeed config has {name!r}. Did you mean {meant[0]!r}?")

    def _check_values(self) -> None:
        if self.gradient_accumulation_steps not in (None, AUTO):
            check_count("gradient_accumulation_steps", self.gradient_accumulation_steps)
        if self.gradient_clipping not in (None, AUTO, 0):
            check_positive("gradient_clipping", self.gradient_clipping)
        for name in ("fp16", "bf16"):
            if (enabled := self.get_value(f"{name}.enabled")) not in (None, AUTO):
                check_flag(f"{name}.enabled in the DeepSpeed config", enabled)
        if self.get_value("fp16.enabled") is True and self.get_value("bf16.enabled") is True:
            raise ConfigurationError("The DeepSpeed config enables both fp16 and bf16. Enable one of them.")
        for name in ("zero3_init_flag", "zero3_save_16bit_model"):
            if getattr(self, name) not in (None, AUTO):
                check_flag(name, getattr(self, name))
        check_flag("is_train_batch_min", self.is_train_batch_min)

    def _check_offloading(self) -> None:
        for kind, least in (("optimizer", 1), ("param", 3)):
            name, device = f"offload_{kind}_device", getattr(self, f"offload_{kind}_device")
            check_choice(name, device, (None, "none", "cpu", "nvme"))
            if device in (None, "none"):
                continue
            least = 3 if device == "nvme" else least
            if self.zero_stage < least:
                raise ConfigurationError(
                    f"{name}={device!r} needs zero_stage={least}{' or more' if least < 3 else ''} (got "
                    f"{self.zero_stage}). Change one of them."
                )
            if device == "nvme" and not getattr(self, f"offload_{kind}_nvme_path"):
                raise ConfigurationError(f"{name}='nvme' needs a folder: set offload_{kind}_nvme_path.")

    def _fit_stage_3(self) -> None:
        """Note what has no effect; the flags of stage 3 are off in other stages."""
        if self.zero_stage == 3 and self.zero3_save_16bit_model is True:
            self._notes.append("zero3_save_16bit_model=True has no effect: save_model() gathers weights in any case")
        if self.zero3_init_flag is None:
            self.zero3_init_flag = self.zero_stage == 3
        if self.zero_stage == 3:
            return
        for name in ("zero3_init_flag", "zero3_save_16bit_model"):
            if getattr(self, name) is True:
                self._notes.append(f"{name}=True has no effect with zero_stage={self.zero_stage}: it needs stage 3")
        self.zero3_init_flag = False


def _stage(option: str, value: Any) -> int | str:
    """Return the number of a ZeRO stage, given as a number or its text, or "auto"."""
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    if isinstance(value, str):
        if value == AUTO:
            return AUTO
        number = int(value) if value.strip().isdecimal() else None
    if number not in (0, 1, 2, 3):
        raise ConfigurationError(_unknown_stage(option, value))
    return int(number)


def _unknown_stage(option: str, value: Any) -> str:
    return (
        f"{option} must be 0 (nothing is sharded), 1 (optimizer states), 2 (gradients too) or 3 (weights too), got "
        f"{shown(value)}."
    )


def _class_names(names: Any) -> list[str]:
    """Return the names of classes, given in a list or in one text with commas."""
    listed: Any = names.split(",") if isinstance(names, str) else names
    if not isinstance(listed, (list, tuple)) or not all(isinstance(name, str) for name in listed):
        raise ConfigurationError(
            f'transformer_moe_cls_names must be a list of names of classes, such as ["MixtralSparseMoeBlock"] (got '
            f"{shown(names)})."
        )
    return [name.strip() for name in listed if name.strip()]
