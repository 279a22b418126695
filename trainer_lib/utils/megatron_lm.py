"""Names that scripts import from `accelerate.utils.megatron_lm`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer_lib.foundation.missing_features import MEGATRON_LM, missing_class, missing_function
from trainer_lib.options.megatron_lm.placeholders import MegatronLMDummyScheduler as MegatronLMDummyScheduler
from trainer_lib.state import PartialState

AbstractTrainStep = missing_class("AbstractTrainStep", MEGATRON_LM)
BertTrainStep = missing_class("BertTrainStep", MEGATRON_LM)
GPTTrainStep = missing_class("GPTTrainStep", MEGATRON_LM)
MegatronEngine = missing_class("MegatronEngine", MEGATRON_LM)
MegatronLMDummyDataLoader = missing_class("MegatronLMDummyDataLoader", MEGATRON_LM)
MegatronLMOptimizerWrapper = missing_class("MegatronLMOptimizerWrapper", MEGATRON_LM)
MegatronLMSchedulerWrapper = missing_class("MegatronLMSchedulerWrapper", MEGATRON_LM)
T5TrainStep = missing_class("T5TrainStep", MEGATRON_LM)
finish_mpu_init = missing_function("finish_mpu_init", MEGATRON_LM)
gather_across_data_parallel_groups = missing_function("gather_across_data_parallel_groups", MEGATRON_LM)
initialize = missing_function("initialize", MEGATRON_LM)
model_provider_func = missing_function("model_provider_func", MEGATRON_LM)
prepare_data_loader = missing_function("prepare_data_loader", MEGATRON_LM)
prepare_model_optimizer_scheduler = missing_function("prepare_model_optimizer_scheduler", MEGATRON_LM)
prepare_optimizer = missing_function("prepare_optimizer", MEGATRON_LM)
prepare_scheduler = missing_function("prepare_scheduler", MEGATRON_LM)


def avg_losses_across_data_parallel_group(losses: Sequence[Tensor]) -> Tensor:
    """Return the mean of each loss over the ranks that read data of their own, as one tensor.

    Example:
        >>> avg_losses_across_data_parallel_group([torch.tensor(2.0), torch.tensor(3.0)])
        tensor([2., 3.])
    """
    group = PartialState().data_group
    return group.all_reduce(torch.cat([loss.detach().reshape(1) for loss in losses])) / group.size
