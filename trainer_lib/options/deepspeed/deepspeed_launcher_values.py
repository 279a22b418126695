"""The values of DeepSpeed that a launcher set, for the fields of a plugin that are left out."""

from collections.abc import Callable
from typing import Any

from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options.deepspeed.deepspeed_config_file import AUTO


def _flag(text: str) -> bool:
    return bool(environment.str_to_bool(text))


def _number_or_auto(text: str) -> float | str:
    return AUTO if text.lower() == AUTO else float(text)


# Of each field: the variable without `ACCELERATE_`, and what reads its text.
_VARIABLES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "hf_ds_config": ("DEEPSPEED_CONFIG_FILE", str),
    "gradient_clipping": ("GRADIENT_CLIPPING", _number_or_auto),
    "zero_stage": ("DEEPSPEED_ZERO_STAGE", int),
    "offload_optimizer_device": ("DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", str),
    "offload_param_device": ("DEEPSPEED_OFFLOAD_PARAM_DEVICE", str),
    "offload_optimizer_nvme_path": ("DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", str),
    "offload_param_nvme_path": ("DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", str),
    "zero3_init_flag": ("DEEPSPEED_ZERO3_INIT", _flag),
    "zero3_save_16bit_model": ("DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", _flag),
    "transformer_moe_cls_names": ("DEEPSPEED_MOE_LAYER_CLS_NAMES", str),
}


def fill_from_launcher(plugin: Any) -> None:
    """Set the fields of a `DeepSpeedPlugin` that are left out to what the launcher asked for.

    Raises:
        ConfigurationError: If a variable holds no value of its kind.
    """
    if not environment.deepspeed_requested():
        return
    for field, (name, read) in _VARIABLES.items():
        text = environment.deepspeed_setting(name)
        if text is None or getattr(plugin, field) is not None:
            continue
        try:
            setattr(plugin, field, read(text))
        except ValueError as error:
            raise ConfigurationError(f"ACCELERATE_{name}={text} cannot be read: {error}.") from None
