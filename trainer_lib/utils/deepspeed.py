"""Names that scripts import from `accelerate.utils.deepspeed`."""

from trainer_lib.checkpointing.third_party.zero_weights import (
    get_fp32_state_dict_from_zero_checkpoint as get_fp32_state_dict_from_zero_checkpoint,
)
from trainer_lib.checkpointing.third_party.zero_weights import (
    load_state_dict_from_zero_checkpoint as load_state_dict_from_zero_checkpoint,
)
from trainer_lib.foundation.missing_features import DEEPSPEED_ENGINE, missing_class, missing_function
from trainer_lib.optimizer import DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper
from trainer_lib.options.deepspeed.config_file import HfDeepSpeedConfig as HfDeepSpeedConfig
from trainer_lib.options.deepspeed.placeholders import DummyOptim as DummyOptim
from trainer_lib.options.deepspeed.placeholders import DummyScheduler as DummyScheduler
from trainer_lib.scheduler import DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper
from trainer_lib.state.accelerator_state import get_active_deepspeed_plugin as get_active_deepspeed_plugin

DeepSpeedEngineWrapper = missing_class("DeepSpeedEngineWrapper", DEEPSPEED_ENGINE)
map_pytorch_optim_to_deepspeed = missing_function("map_pytorch_optim_to_deepspeed", DEEPSPEED_ENGINE)
