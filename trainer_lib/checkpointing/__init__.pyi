from trainer_lib.checkpointing.format.layout import OPTIMIZER_NAME as OPTIMIZER_NAME
from trainer_lib.checkpointing.format.layout import RNG_STATE_NAME as RNG_STATE_NAME
from trainer_lib.checkpointing.format.layout import SAMPLER_NAME as SAMPLER_NAME
from trainer_lib.checkpointing.format.layout import SCHEDULER_NAME as SCHEDULER_NAME
from trainer_lib.checkpointing.save.custom_state import load_accelerator_state as load_accelerator_state
from trainer_lib.checkpointing.save.custom_state import load_custom_state as load_custom_state
from trainer_lib.checkpointing.save.custom_state import save_accelerator_state as save_accelerator_state
from trainer_lib.checkpointing.save.custom_state import save_custom_state as save_custom_state
from trainer_lib.options.accelerate_constants import SCALER_NAME as SCALER_NAME
from trainer_lib.tensor_files.weight_names import MODEL_NAME as MODEL_NAME
from trainer_lib.tensor_files.weight_names import SAFE_MODEL_NAME as SAFE_MODEL_NAME
from trainer_lib.tensor_files.weight_names import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME
from trainer_lib.tensor_files.weight_names import WEIGHTS_NAME as WEIGHTS_NAME

__all__: list[str]
