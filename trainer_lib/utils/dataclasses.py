"""Options and enums that scripts import from `accelerate.utils.dataclasses`."""

from collections.abc import Callable
from typing import Any

from trainer_lib.foundation.public_names.missing_features import (
    MEGATRON_LM,
    missing_function,
)
from trainer_lib.foundation.tensors.pytree import TensorInformation as TensorInformation
from trainer_lib.modules.blocks import get_module_class_from_name as get_module_class_from_name
from trainer_lib.options.accelerate_constants import (
    BETA_CP_AVAILABLE_PYTORCH_VERSION as BETA_CP_AVAILABLE_PYTORCH_VERSION,
)
from trainer_lib.options.accelerate_constants import (
    BETA_TP_AVAILABLE_PYTORCH_VERSION as BETA_TP_AVAILABLE_PYTORCH_VERSION,
)
from trainer_lib.options.accelerate_constants import (
    BETA_TP_AVAILABLE_TRANSFORMERS_VERSION as BETA_TP_AVAILABLE_TRANSFORMERS_VERSION,
)
from trainer_lib.options.accelerate_constants import FSDP2_PYTORCH_VERSION as FSDP2_PYTORCH_VERSION
from trainer_lib.options.accelerate_constants import FSDP_AUTO_WRAP_POLICY as FSDP_AUTO_WRAP_POLICY
from trainer_lib.options.accelerate_constants import FSDP_BACKWARD_PREFETCH as FSDP_BACKWARD_PREFETCH
from trainer_lib.options.accelerate_constants import FSDP_SHARDING_STRATEGY as FSDP_SHARDING_STRATEGY
from trainer_lib.options.accelerate_constants import (
    MITA_PROFILING_AVAILABLE_PYTORCH_VERSION as MITA_PROFILING_AVAILABLE_PYTORCH_VERSION,
)
from trainer_lib.options.accelerate_constants import (
    XPU_PROFILING_AVAILABLE_PYTORCH_VERSION as XPU_PROFILING_AVAILABLE_PYTORCH_VERSION,
)
from trainer_lib.options.accumulation_options import GradientAccumulationPlugin as GradientAccumulationPlugin
from trainer_lib.options.base import BaseEnum as BaseEnum
from trainer_lib.options.base import EnumWithContains as EnumWithContains
from trainer_lib.options.base import KwargsHandler as KwargsHandler
from trainer_lib.options.compile_options import TorchDynamoPlugin as TorchDynamoPlugin
from trainer_lib.options.data_options import DataLoaderConfiguration as DataLoaderConfiguration
from trainer_lib.options.deepspeed.deepspeed_plugin import DeepSpeedPlugin as DeepSpeedPlugin
from trainer_lib.options.enums import ComputeEnvironment as ComputeEnvironment
from trainer_lib.options.enums import CustomDtype as CustomDtype
from trainer_lib.options.enums import DDPCommunicationHookType as DDPCommunicationHookType
from trainer_lib.options.enums import DistributedType as DistributedType
from trainer_lib.options.enums import DynamoBackend as DynamoBackend
from trainer_lib.options.enums import FP8BackendType as FP8BackendType
from trainer_lib.options.enums import LoggerType as LoggerType
from trainer_lib.options.enums import PrecisionType as PrecisionType
from trainer_lib.options.enums import RNGType as RNGType
from trainer_lib.options.enums import SageMakerDistributedType as SageMakerDistributedType
from trainer_lib.options.fp8_options import AORecipeKwargs as AORecipeKwargs
from trainer_lib.options.fp8_options import FP8RecipeKwargs as FP8RecipeKwargs
from trainer_lib.options.fp8_options import MSAMPRecipeKwargs as MSAMPRecipeKwargs
from trainer_lib.options.fp8_options import TERecipeKwargs as TERecipeKwargs
from trainer_lib.options.megatron_lm.megatron_lm_plugin import MegatronLMPlugin as MegatronLMPlugin
from trainer_lib.options.parallel.ddp_options import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from trainer_lib.options.parallel.ddp_options import InitProcessGroupKwargs as InitProcessGroupKwargs
from trainer_lib.options.parallel.fsdp_options import (
    FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
)
from trainer_lib.options.parallel.pipeline_options import TorchPipelineParallelConfig as TorchPipelineParallelConfig
from trainer_lib.options.parallel.sequence_options import (
    DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig,
)
from trainer_lib.options.parallel.sequence_options import TorchContextParallelConfig as TorchContextParallelConfig
from trainer_lib.options.parallel.tensor_parallel_options import (
    TorchTensorParallelConfig as TorchTensorParallelConfig,
)
from trainer_lib.options.parallel.tensor_parallel_options import (
    TorchTensorParallelPlugin as TorchTensorParallelPlugin,
)
from trainer_lib.options.precision_options import AutocastKwargs as AutocastKwargs
from trainer_lib.options.precision_options import GradScalerKwargs as GradScalerKwargs
from trainer_lib.options.profiler_options import ProfileKwargs as ProfileKwargs
from trainer_lib.options.project_options import ProjectConfiguration as ProjectConfiguration
from trainer_lib.options.quantization_options import BnbQuantizationConfig as BnbQuantizationConfig
from trainer_lib.options.torchao_options import TorchAoConfig as TorchAoConfig
from trainer_lib.parallelism_config import ParallelismConfig as ParallelismConfig

add_model_config_to_megatron_parser: Callable[..., Any] = missing_function(
    "add_model_config_to_megatron_parser", MEGATRON_LM
)
parse_bert_config: Callable[..., Any] = missing_function("parse_bert_config", MEGATRON_LM)
parse_glm4_moe_config: Callable[..., Any] = missing_function("parse_glm4_moe_config", MEGATRON_LM)
parse_gpt2_config: Callable[..., Any] = missing_function("parse_gpt2_config", MEGATRON_LM)
parse_llama_config: Callable[..., Any] = missing_function("parse_llama_config", MEGATRON_LM)
parse_t5_config: Callable[..., Any] = missing_function("parse_t5_config", MEGATRON_LM)
MODEL_CONFIGS_TO_MEGATRON_PARSERS: dict[str, Any] = {}  # no model has a parser
