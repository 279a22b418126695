"""Names that scripts import from `accelerate.utils.deepspeed`."""

from trainer_lib.foundation.missing_features import DEEPSPEED, missing_class, missing_function
from trainer_lib.options.deepspeed.config_file import HfDeepSpeedConfig as HfDeepSpeedConfig

DeepSpeedEngineWrapper = missing_class("DeepSpeedEngineWrapper", DEEPSPEED)
DeepSpeedOptimizerWrapper = missing_class("DeepSpeedOptimizerWrapper", DEEPSPEED)
DeepSpeedSchedulerWrapper = missing_class("DeepSpeedSchedulerWrapper", DEEPSPEED)
DummyOptim = missing_class("DummyOptim", DEEPSPEED)
DummyScheduler = missing_class("DummyScheduler", DEEPSPEED)
get_active_deepspeed_plugin = missing_function("get_active_deepspeed_plugin", DEEPSPEED)
map_pytorch_optim_to_deepspeed = missing_function("map_pytorch_optim_to_deepspeed", DEEPSPEED)
