"""Names that scripts import from `accelerate.utils.deepspeed`."""

from trainer_lib.checkpointing.third_party.zero_weights import (
    get_fp32_state_dict_from_zero_checkpoint as get_fp32_state_dict_from_zero_checkpoint,
)
from trainer_lib.checkpointing.third_party.zero_weights import (
    load_state_dict_from_zero_checkpoint as load_state_dict_from_zero_checkpoint,
)
from trainer_lib.optimizer import DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper
from trainer_lib.options.deepspeed.deepspeed_config_file import HfDeepSpeedConfig as HfDeepSpeedConfig
from trainer_lib.options.deepspeed.dummy_optimizer import DummyOptim as DummyOptim
from trainer_lib.options.deepspeed.dummy_optimizer import DummyScheduler as DummyScheduler
from trainer_lib.scheduler import DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper
from trainer_lib.state.accelerator_state import get_active_deepspeed_plugin as get_active_deepspeed_plugin
from trainer_lib.strategies.deepspeed.engine_wrapper import DeepSpeedEngineWrapper as DeepSpeedEngineWrapper
from trainer_lib.strategies.deepspeed.engine_wrapper import (
    map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed,
)
