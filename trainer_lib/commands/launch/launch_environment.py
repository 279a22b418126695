"""The environment variables that a launch gives to its script, as `accelerate launch` sets them."""

from typing import Any

from trainer_lib.commands.launch.launch_values import LaunchValues
from trainer_lib.foundation import environment
from trainer_lib.launchers.settings.launch_options import SETTINGS
from trainer_lib.options.compile_options import TorchDynamoPlugin
from trainer_lib.options.precision_options import check_precision

_OF_EACH_LAUNCH = ("cpu", "mixed_precision", "gradient_accumulation_steps", "debug", "enable_cpu_affinity")


def script_variables(values: LaunchValues) -> dict[str, str]:
    """Return the variables that hold the settings of a launch, without rank and world size.

    Raises:
        ConfigurationError: If a value is unknown, or contradicts another.
    """
    return {
        **_of_each_launch(values),
        **_of_compilation(values),
        **_of_fp8(values),
        **_of_fsdp(values),
        **_of_deepspeed(values),
        **_of_megatron_lm(values),
        **_of_parallelism(values),
    }


def _of_each_launch(values: LaunchValues) -> dict[str, str]:
    asked = {name: values[name] for name in _OF_EACH_LAUNCH if values.is_asked(name)}
    if "mixed_precision" in asked:
        asked["mixed_precision"] = check_precision(asked["mixed_precision"])
    if asked.get("enable_cpu_affinity"):
        asked["enable_cpu_affinity"] = 1
    if asked.get("debug"):
        asked["debug"] = "true"
    variables = {_variable(name): str(value) for name, value in asked.items() if name == "cpu" or value}
    # torch_xla drives other devices by the same variable.
    return variables | {"PJRT_DEVICE": environment.variable("PJRT_DEVICE") or "TPU"} if values["tpu"] else variables


def _of_compilation(values: LaunchValues) -> dict[str, str]:
    names = [name for name, setting in SETTINGS.items() if setting.group == "compile" and values.is_asked(name)]
    if names:  # checked here, so that the error appears once; without a backend, the script sets one
        backend = values["dynamo_backend"]
        backend = backend if values.is_asked("dynamo_backend") else "inductor"
        TorchDynamoPlugin(backend, values["dynamo_mode"]).check_backend()
    texts = {_variable(name): str(values[name]) for name in names}
    # Accelerate's spelling.
    return {name: text.upper() if name.endswith("BACKEND") else text for name, text in texts.items()}


def _of_fp8(values: LaunchValues) -> dict[str, str]:
    if str(values["mixed_precision"]).lower() != "fp8":
        return {}
    return _asked_of(values, "fp8")


def _of_fsdp(values: LaunchValues) -> dict[str, str]:
    if not values["use_fsdp"]:
        return {}
    # A given sharding strategy says whether to reshard, and a default would contradict it.
    left_out = {"fsdp_reshard_after_forward"} if values.is_asked("fsdp_sharding_strategy") else set[str]()
    settings = [name for name, setting in SETTINGS.items() if setting.group == "fsdp" and values[name] is not None]
    names = [
        name for name in settings if not values.is_inherited(name) and (values.is_asked(name) or name not in left_out)
    ]
    return {_variable(name): _lower(values[name]) for name in names}


def _of_deepspeed(values: LaunchValues) -> dict[str, str]:
    if not values["use_deepspeed"]:
        return {}
    return _asked_of(values, "deepspeed")


def _of_megatron_lm(values: LaunchValues) -> dict[str, str]:
    if not values["use_megatron_lm"]:
        return {}
    from trainer_lib.options.megatron_lm.megatron_lm_plugin import MegatronLMPlugin  # which imports torch

    variables = _asked_of(values, "megatron_lm")
    with environment.patch_environment(**variables):
        MegatronLMPlugin()  # checked here, so that the error appears once
    return variables


def _asked_of(values: LaunchValues, group: str) -> dict[str, str]:
    names = [name for name, setting in SETTINGS.items() if setting.group == group and values.is_asked(name)]
    return {
        _variable(name): _lower(values[name]) for name in names if _variable(name) and not values.is_inherited(name)
    }


def _of_parallelism(values: LaunchValues) -> dict[str, str]:
    if not values["use_parallelism_config"]:
        return {}
    names = ["use_parallelism_config", *(f"parallelism_config_{name}_size" for name in _DIMENSIONS)]
    names += [name for name in (f"parallelism_config_{option}" for option in _OPTIONS) if values.is_asked(name)]
    return {_variable(name): _lower(values[name]) for name in names if not values.is_inherited(name)}


_DIMENSIONS = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
_OPTIONS = ("cp_comm_strategy", "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation")


def _variable(name: str) -> str:
    return SETTINGS[name].variable


def _lower(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_lower, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
