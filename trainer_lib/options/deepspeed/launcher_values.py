"""The values of DeepSpeed that a launcher set, for the fields of a plugin that are left out."""

from collections.abc import Callable
from typing import Any

from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError

_TEXTS = {
    "hf_ds_config": "CONFIG_FILE",
    "offload_optimizer_device": "OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "OFFLOAD_PARAM_DEVICE",
    "offload_optimizer_nvme_path": "OFFLOAD_OPTIMIZER_NVME_PATH",
    "offload_param_nvme_path": "OFFLOAD_PARAM_NVME_PATH",
    "transformer_moe_cls_names": "MOE_LAYER_CLS_NAMES",
}
_FLAGS = {"zero3_init_flag": "ZERO3_INIT", "zero3_save_16bit_model": "ZERO3_SAVE_16BIT_MODEL"}


def fill_from_launcher(plugin: Any) -> None:
    """Set the fields of a `DeepSpeedPlugin` that are left out to what the launcher asked for.

    Raises:
        ConfigurationError: If a variable holds no value of its kind.
    """
    if not environment.deepspeed_requested():
        return
    for name, value in _requested().items():
        if getattr(plugin, name) is None:
            setattr(plugin, name, value)


def _requested() -> dict[str, Any]:
    found: dict[str, Any] = {name: environment.deepspeed_setting(key) for name, key in _TEXTS.items()}
    for name, key in _FLAGS.items():
        found[name] = _parsed(key, environment.deepspeed_setting(key), lambda text: bool(environment.str_to_bool(text)))
    found["zero_stage"] = _parsed("ZERO_STAGE", environment.deepspeed_setting("ZERO_STAGE"), int)
    clipping = environment.clipping_requested()
    is_auto = str(clipping).lower() == "auto"
    found["gradient_clipping"] = "auto" if is_auto else _parsed("GRADIENT_CLIPPING", clipping, float)
    return {name: value for name, value in found.items() if value is not None}


def _parsed(key: str, text: str | None, parse: Callable[[str], Any]) -> Any:
    try:
        return None if text is None else parse(text)
    except ValueError as error:
        raise ConfigurationError(f"The launcher's {key} of DeepSpeed cannot be read: {error}.") from None
