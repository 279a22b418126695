"""Names that scripts import from `accelerate.utils.megatron_lm`."""

from collections.abc import Callable
from typing import Any

from trainer_lib.accelerator.megatron_lm.losses import (
    avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
)
from trainer_lib.accelerator.megatron_lm.losses import (
    gather_across_data_parallel_groups as gather_across_data_parallel_groups,
)
from trainer_lib.accelerator.megatron_lm.megatron_engine import MegatronEngine as MegatronEngine
from trainer_lib.accelerator.megatron_lm.train_steps import AbstractTrainStep as AbstractTrainStep
from trainer_lib.accelerator.megatron_lm.train_steps import BertTrainStep as BertTrainStep
from trainer_lib.accelerator.megatron_lm.train_steps import GPTTrainStep as GPTTrainStep
from trainer_lib.accelerator.megatron_lm.train_steps import T5TrainStep as T5TrainStep
from trainer_lib.foundation.public_names.missing_features import MEGATRON_LM, missing_class, missing_function
from trainer_lib.options.megatron_lm.dummy_data_loader import MegatronLMDummyDataLoader as MegatronLMDummyDataLoader
from trainer_lib.options.megatron_lm.dummy_data_loader import MegatronLMDummyScheduler as MegatronLMDummyScheduler

MegatronLMOptimizerWrapper: type[Any] = missing_class("MegatronLMOptimizerWrapper", MEGATRON_LM)
MegatronLMSchedulerWrapper: type[Any] = missing_class("MegatronLMSchedulerWrapper", MEGATRON_LM)
finish_mpu_init: Callable[..., Any] = missing_function("finish_mpu_init", MEGATRON_LM)
initialize: Callable[..., Any] = missing_function("initialize", MEGATRON_LM)
model_provider_func: Callable[..., Any] = missing_function("model_provider_func", MEGATRON_LM)
prepare_data_loader: Callable[..., Any] = missing_function("prepare_data_loader", MEGATRON_LM)
prepare_model_optimizer_scheduler: Callable[..., Any] = missing_function(
    "prepare_model_optimizer_scheduler", MEGATRON_LM
)
prepare_optimizer: Callable[..., Any] = missing_function("prepare_optimizer", MEGATRON_LM)
prepare_scheduler: Callable[..., Any] = missing_function("prepare_scheduler", MEGATRON_LM)
