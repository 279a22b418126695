"""Names that scripts import from `accelerate.utils.fsdp_utils`."""

from collections.abc import Callable
from typing import Any

from trainer_lib.accelerator.checkpoints.fsdp_checkpoints import (
    fsdp2_load_full_state_dict as fsdp2_load_full_state_dict,
)
from trainer_lib.accelerator.checkpoints.fsdp_checkpoints import load_fsdp_model as load_fsdp_model
from trainer_lib.accelerator.checkpoints.fsdp_checkpoints import load_fsdp_optimizer as load_fsdp_optimizer
from trainer_lib.accelerator.checkpoints.fsdp_checkpoints import save_fsdp_model as save_fsdp_model
from trainer_lib.accelerator.checkpoints.fsdp_checkpoints import save_fsdp_optimizer as save_fsdp_optimizer
from trainer_lib.checkpointing.format.layout import OPTIMIZER_NAME as OPTIMIZER_NAME
from trainer_lib.checkpointing.third_party.torch_shards import merge_fsdp_weights as merge_fsdp_weights
from trainer_lib.foundation.environment import disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading
from trainer_lib.foundation.environment import enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading
from trainer_lib.foundation.public_names.missing_features import FSDP1_STEPS, missing_function
from trainer_lib.modules.weights.names import fsdp2_canonicalize_names as fsdp2_canonicalize_names
from trainer_lib.options.accelerate_constants import FSDP_MODEL_NAME as FSDP_MODEL_NAME
from trainer_lib.precision.scaler import get_fsdp2_grad_scaler as get_fsdp2_grad_scaler
from trainer_lib.tensor_files.weight_names import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME
from trainer_lib.tensor_files.weight_names import WEIGHTS_NAME as WEIGHTS_NAME

ensure_weights_retied: Callable[..., Any] = missing_function("ensure_weights_retied", FSDP1_STEPS)
fsdp2_apply_ac: Callable[..., Any] = missing_function("fsdp2_apply_ac", FSDP1_STEPS)
fsdp2_prepare_auto_wrap_policy: Callable[..., Any] = missing_function("fsdp2_prepare_auto_wrap_policy", FSDP1_STEPS)
fsdp2_prepare_model: Callable[..., Any] = missing_function("fsdp2_prepare_model", FSDP1_STEPS)
fsdp2_switch_optimizer_parameters: Callable[..., Any] = missing_function(
    "fsdp2_switch_optimizer_parameters", FSDP1_STEPS
)
get_parameters_from_modules: Callable[..., Any] = missing_function("get_parameters_from_modules", FSDP1_STEPS)
