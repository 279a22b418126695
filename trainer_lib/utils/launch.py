"""Names that scripts import from `accelerate.utils.launch`."""

from collections.abc import Callable
from typing import Any

from trainer_lib.foundation.environment import env_var_path_add as env_var_path_add
from trainer_lib.foundation.public_names.missing_features import (
    LAUNCHER_STEPS,
    SAGEMAKER,
    missing_class,
    missing_function,
)
from trainer_lib.options.accelerate_constants import DEEPSPEED_MULTINODE_LAUNCHERS as DEEPSPEED_MULTINODE_LAUNCHERS

prepare_deepspeed_cmd_env: Callable[..., Any] = missing_function("prepare_deepspeed_cmd_env", LAUNCHER_STEPS)
prepare_sagemager_args_inputs: Callable[..., Any] = missing_function("prepare_sagemager_args_inputs", SAGEMAKER)
prepare_tpu: Callable[..., Any] = missing_function("prepare_tpu", LAUNCHER_STEPS)
PrepareForLaunch: type[Any] = missing_class("PrepareForLaunch", LAUNCHER_STEPS)
prepare_extend_env_parallelism_config: Callable[..., Any] = missing_function(
    "prepare_extend_env_parallelism_config", LAUNCHER_STEPS
)
prepare_multi_gpu_env: Callable[..., Any] = missing_function("prepare_multi_gpu_env", LAUNCHER_STEPS)
setup_fp8_env: Callable[..., Any] = missing_function("setup_fp8_env", LAUNCHER_STEPS)
prepare_simple_launcher_cmd_env: Callable[..., Any] = missing_function(
    "prepare_simple_launcher_cmd_env", LAUNCHER_STEPS
)
