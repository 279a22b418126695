"""This package is one place to import from, under the names that Accelerate's users know.

Nothing is defined here, and nothing inside the library imports from here. A name is resolved when it is first used.
"""

from typing import TYPE_CHECKING

from trainer_lib.foundation.lazy_imports import lazy_names

if TYPE_CHECKING:
    from trainer_lib.checkpointing.format.layout import OPTIMIZER_NAME as OPTIMIZER_NAME
    from trainer_lib.checkpointing.format.layout import RNG_STATE_NAME as RNG_STATE_NAME
    from trainer_lib.checkpointing.format.layout import SAMPLER_NAME as SAMPLER_NAME
    from trainer_lib.checkpointing.format.layout import SCALER_NAME as SCALER_NAME
    from trainer_lib.checkpointing.format.layout import SCHEDULER_NAME as SCHEDULER_NAME
    from trainer_lib.checkpointing.model_weights import load_checkpoint_in_model as load_checkpoint_in_model
    from trainer_lib.checkpointing.save.torch_save import load as load
    from trainer_lib.checkpointing.save.torch_save import save as save
    from trainer_lib.collectives import CannotPadNestedTensorWarning as CannotPadNestedTensorWarning
    from trainer_lib.collectives import TensorInformation as TensorInformation
    from trainer_lib.collectives import broadcast as broadcast
    from trainer_lib.collectives import broadcast_object_list as broadcast_object_list
    from trainer_lib.collectives import concatenate as concatenate
    from trainer_lib.collectives import convert_to_fp32 as convert_to_fp32
    from trainer_lib.collectives import copy_tensor_to_devices as copy_tensor_to_devices
    from trainer_lib.collectives import find_batch_size as find_batch_size
    from trainer_lib.collectives import find_device as find_device
    from trainer_lib.collectives import gather as gather
    from trainer_lib.collectives import gather_object as gather_object
    from trainer_lib.collectives import get_data_structure as get_data_structure
    from trainer_lib.collectives import honor_type as honor_type
    from trainer_lib.collectives import ignorant_find_batch_size as ignorant_find_batch_size
    from trainer_lib.collectives import initialize_tensors as initialize_tensors
    from trainer_lib.collectives import is_namedtuple as is_namedtuple
    from trainer_lib.collectives import is_tensor_information as is_tensor_information
    from trainer_lib.collectives import is_torch_tensor as is_torch_tensor
    from trainer_lib.collectives import listify as listify
    from trainer_lib.collectives import pad_across_processes as pad_across_processes
    from trainer_lib.collectives import pad_input_tensors as pad_input_tensors
    from trainer_lib.collectives import recursively_apply as recursively_apply
    from trainer_lib.collectives import reduce as reduce
    from trainer_lib.collectives import send_to_device as send_to_device
    from trainer_lib.collectives import slice_tensors as slice_tensors
    from trainer_lib.foundation.byte_sizes import convert_bytes as convert_bytes
    from trainer_lib.foundation.byte_sizes import convert_file_size_to_int as convert_file_size_to_int
    from trainer_lib.foundation.compat import get_pretty_name as get_pretty_name
    from trainer_lib.foundation.compat import merge_dicts as merge_dicts
    from trainer_lib.foundation.compat import recursive_getattr as recursive_getattr
    from trainer_lib.foundation.environment import clear_environment as clear_environment
    from trainer_lib.foundation.environment import (
        disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
    )
    from trainer_lib.foundation.environment import (
        enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
    )
    from trainer_lib.foundation.environment import get_int_from_env as get_int_from_env
    from trainer_lib.foundation.environment import parse_choice_from_env as parse_choice_from_env
    from trainer_lib.foundation.environment import parse_flag_from_env as parse_flag_from_env
    from trainer_lib.foundation.environment import patch_environment as patch_environment
    from trainer_lib.foundation.environment import purge_accelerate_environment as purge_accelerate_environment
    from trainer_lib.foundation.environment import str_to_bool as str_to_bool
    from trainer_lib.foundation.errors import DistributedOperationException as DistributedOperationException
    from trainer_lib.foundation.imports import compare_versions as compare_versions
    from trainer_lib.foundation.imports import is_aim_available as is_aim_available
    from trainer_lib.foundation.imports import is_amdsmi_available as is_amdsmi_available
    from trainer_lib.foundation.imports import is_bf16_available as is_bf16_available
    from trainer_lib.foundation.imports import is_bnb_available as is_bnb_available
    from trainer_lib.foundation.imports import is_boto3_available as is_boto3_available
    from trainer_lib.foundation.imports import is_clearml_available as is_clearml_available
    from trainer_lib.foundation.imports import is_comet_ml_available as is_comet_ml_available
    from trainer_lib.foundation.imports import is_cuda_available as is_cuda_available
    from trainer_lib.foundation.imports import is_datasets_available as is_datasets_available
    from trainer_lib.foundation.imports import is_deepspeed_available as is_deepspeed_available
    from trainer_lib.foundation.imports import is_dvclive_available as is_dvclive_available
    from trainer_lib.foundation.imports import is_fp16_available as is_fp16_available
    from trainer_lib.foundation.imports import is_hpu_available as is_hpu_available
    from trainer_lib.foundation.imports import is_lomo_available as is_lomo_available
    from trainer_lib.foundation.imports import is_matplotlib_available as is_matplotlib_available
    from trainer_lib.foundation.imports import is_megatron_lm_available as is_megatron_lm_available
    from trainer_lib.foundation.imports import is_mlflow_available as is_mlflow_available
    from trainer_lib.foundation.imports import is_mlu_available as is_mlu_available
    from trainer_lib.foundation.imports import is_mps_available as is_mps_available
    from trainer_lib.foundation.imports import is_msamp_available as is_msamp_available
    from trainer_lib.foundation.imports import is_musa_available as is_musa_available
    from trainer_lib.foundation.imports import is_neuron_available as is_neuron_available
    from trainer_lib.foundation.imports import is_npu_available as is_npu_available
    from trainer_lib.foundation.imports import is_pandas_available as is_pandas_available
    from trainer_lib.foundation.imports import is_peft_available as is_peft_available
    from trainer_lib.foundation.imports import is_pynvml_available as is_pynvml_available
    from trainer_lib.foundation.imports import is_pytest_available as is_pytest_available
    from trainer_lib.foundation.imports import is_rich_available as is_rich_available
    from trainer_lib.foundation.imports import is_rocm_available as is_rocm_available
    from trainer_lib.foundation.imports import is_sagemaker_available as is_sagemaker_available
    from trainer_lib.foundation.imports import is_schedulefree_available as is_schedulefree_available
    from trainer_lib.foundation.imports import is_sdaa_available as is_sdaa_available
    from trainer_lib.foundation.imports import is_swanlab_available as is_swanlab_available
    from trainer_lib.foundation.imports import is_tensorboard_available as is_tensorboard_available
    from trainer_lib.foundation.imports import is_timm_available as is_timm_available
    from trainer_lib.foundation.imports import is_torch_version as is_torch_version
    from trainer_lib.foundation.imports import is_torch_xla_available as is_torch_xla_available
    from trainer_lib.foundation.imports import is_torchao_available as is_torchao_available
    from trainer_lib.foundation.imports import is_torchdata_available as is_torchdata_available
    from trainer_lib.foundation.imports import (
        is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available,
    )
    from trainer_lib.foundation.imports import is_torchvision_available as is_torchvision_available
    from trainer_lib.foundation.imports import is_trackio_available as is_trackio_available
    from trainer_lib.foundation.imports import is_transformer_engine_available as is_transformer_engine_available
    from trainer_lib.foundation.imports import is_transformers_available as is_transformers_available
    from trainer_lib.foundation.imports import is_triton_available as is_triton_available
    from trainer_lib.foundation.imports import is_wandb_available as is_wandb_available
    from trainer_lib.foundation.imports import is_weights_only_available as is_weights_only_available
    from trainer_lib.foundation.imports import is_xpu_available as is_xpu_available
    from trainer_lib.memory import MemoryUse as MemoryUse
    from trainer_lib.memory import PeakMemory as PeakMemory
    from trainer_lib.memory import clear_device_cache as clear_device_cache
    from trainer_lib.memory import find_executable_batch_size as find_executable_batch_size
    from trainer_lib.memory import release_memory as release_memory
    from trainer_lib.modules.compilation import compile_regions as compile_regions
    from trainer_lib.modules.ties import find_tied_parameters as find_tied_parameters
    from trainer_lib.modules.ties import retie_parameters as retie_parameters
    from trainer_lib.modules.unwrapping import extract_model_from_parallel as extract_model_from_parallel
    from trainer_lib.modules.unwrapping import has_compiled_regions as has_compiled_regions
    from trainer_lib.modules.unwrapping import is_compiled_module as is_compiled_module
    from trainer_lib.options.accumulation_options import GradientAccumulationPlugin as GradientAccumulationPlugin
    from trainer_lib.options.base import KwargsHandler as KwargsHandler
    from trainer_lib.options.compile_options import TorchDynamoPlugin as TorchDynamoPlugin
    from trainer_lib.options.data_options import DataLoaderConfiguration as DataLoaderConfiguration
    from trainer_lib.options.ddp_options import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from trainer_lib.options.ddp_options import InitProcessGroupKwargs as InitProcessGroupKwargs
    from trainer_lib.options.enums import DDPCommunicationHookType as DDPCommunicationHookType
    from trainer_lib.options.enums import DistributedType as DistributedType
    from trainer_lib.options.enums import DynamoBackend as DynamoBackend
    from trainer_lib.options.enums import LoggerType as LoggerType
    from trainer_lib.options.enums import PrecisionType as PrecisionType
    from trainer_lib.options.enums import RNGType as RNGType
    from trainer_lib.options.fsdp_options import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
    from trainer_lib.options.precision_options import AutocastKwargs as AutocastKwargs
    from trainer_lib.options.precision_options import GradScalerKwargs as GradScalerKwargs
    from trainer_lib.options.profiler_options import ProfileKwargs as ProfileKwargs
    from trainer_lib.options.project_options import ProjectConfiguration as ProjectConfiguration
    from trainer_lib.parallelism_config import ParallelismConfig as ParallelismConfig
    from trainer_lib.processes.ports import is_port_in_use as is_port_in_use
    from trainer_lib.progress import tqdm as tqdm
    from trainer_lib.seeding import set_seed as set_seed
    from trainer_lib.seeding import synchronize_rng_state as synchronize_rng_state
    from trainer_lib.seeding import synchronize_rng_states as synchronize_rng_states
    from trainer_lib.state.partial_state import wait_for_everyone as wait_for_everyone
    from trainer_lib.tensor_files.model_files import load_state_dict as load_state_dict
    from trainer_lib.tensor_files.tensor_storage import (
        clean_state_dict_for_safetensors as clean_state_dict_for_safetensors,
    )
    from trainer_lib.tensor_files.tensor_storage import id_tensor_storage as id_tensor_storage
    from trainer_lib.tensor_files.weight_names import MODEL_NAME as MODEL_NAME
    from trainer_lib.tensor_files.weight_names import SAFE_MODEL_NAME as SAFE_MODEL_NAME
    from trainer_lib.tensor_files.weight_names import SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME
    from trainer_lib.tensor_files.weight_names import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME
    from trainer_lib.tensor_files.weight_names import SAFE_WEIGHTS_PATTERN_NAME as SAFE_WEIGHTS_PATTERN_NAME
    from trainer_lib.tensor_files.weight_names import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME
    from trainer_lib.tensor_files.weight_names import WEIGHTS_NAME as WEIGHTS_NAME
    from trainer_lib.tensor_files.weight_names import WEIGHTS_PATTERN_NAME as WEIGHTS_PATTERN_NAME

_NAMES = {
    "trainer_lib.checkpointing.format.layout": [
        "OPTIMIZER_NAME",
        "RNG_STATE_NAME",
        "SAMPLER_NAME",
        "SCALER_NAME",
        "SCHEDULER_NAME",
    ],
    "trainer_lib.checkpointing.save.torch_save": [
        "load",
        "save",
    ],
    "trainer_lib.checkpointing.model_weights": [
        "load_checkpoint_in_model",
    ],
    "trainer_lib.collectives": [
        "CannotPadNestedTensorWarning",
        "TensorInformation",
        "broadcast",
        "broadcast_object_list",
        "concatenate",
        "convert_to_fp32",
        "copy_tensor_to_devices",
        "find_batch_size",
        "find_device",
        "gather",
        "gather_object",
        "get_data_structure",
        "honor_type",
        "ignorant_find_batch_size",
        "initialize_tensors",
        "is_namedtuple",
        "is_tensor_information",
        "is_torch_tensor",
        "listify",
        "pad_across_processes",
        "pad_input_tensors",
        "recursively_apply",
        "reduce",
        "send_to_device",
        "slice_tensors",
    ],
    "trainer_lib.foundation.environment": [
        "clear_environment",
        "disable_fsdp_ram_efficient_loading",
        "enable_fsdp_ram_efficient_loading",
        "get_int_from_env",
        "parse_choice_from_env",
        "parse_flag_from_env",
        "patch_environment",
        "purge_accelerate_environment",
        "str_to_bool",
    ],
    "trainer_lib.foundation.errors": [
        "DistributedOperationException",
    ],
    "trainer_lib.foundation.imports": [
        "compare_versions",
        "is_aim_available",
        "is_amdsmi_available",
        "is_bf16_available",
        "is_bnb_available",
        "is_boto3_available",
        "is_clearml_available",
        "is_comet_ml_available",
        "is_cuda_available",
        "is_datasets_available",
        "is_deepspeed_available",
        "is_dvclive_available",
        "is_fp16_available",
        "is_hpu_available",
        "is_lomo_available",
        "is_matplotlib_available",
        "is_megatron_lm_available",
        "is_mlflow_available",
        "is_mlu_available",
        "is_mps_available",
        "is_msamp_available",
        "is_musa_available",
        "is_neuron_available",
        "is_npu_available",
        "is_pandas_available",
        "is_peft_available",
        "is_pynvml_available",
        "is_pytest_available",
        "is_rich_available",
        "is_rocm_available",
        "is_sagemaker_available",
        "is_schedulefree_available",
        "is_sdaa_available",
        "is_swanlab_available",
        "is_tensorboard_available",
        "is_timm_available",
        "is_torch_version",
        "is_torch_xla_available",
        "is_torchao_available",
        "is_torchdata_available",
        "is_torchdata_stateful_dataloader_available",
        "is_torchvision_available",
        "is_trackio_available",
        "is_transformer_engine_available",
        "is_transformers_available",
        "is_triton_available",
        "is_wandb_available",
        "is_weights_only_available",
        "is_xpu_available",
    ],
    "trainer_lib.foundation.compat": [
        "get_pretty_name",
        "merge_dicts",
        "recursive_getattr",
    ],
    "trainer_lib.processes.ports": [
        "is_port_in_use",
    ],
    "trainer_lib.foundation.byte_sizes": [
        "convert_bytes",
        "convert_file_size_to_int",
    ],
    "trainer_lib.memory": [
        "MemoryUse",
        "PeakMemory",
        "clear_device_cache",
        "find_executable_batch_size",
        "release_memory",
    ],
    "trainer_lib.modules.compilation": [
        "compile_regions",
    ],
    "trainer_lib.modules.ties": [
        "find_tied_parameters",
        "retie_parameters",
    ],
    "trainer_lib.modules.unwrapping": [
        "extract_model_from_parallel",
        "has_compiled_regions",
        "is_compiled_module",
    ],
    "trainer_lib.options.accumulation_options": [
        "GradientAccumulationPlugin",
    ],
    "trainer_lib.options.base": [
        "KwargsHandler",
    ],
    "trainer_lib.options.compile_options": [
        "TorchDynamoPlugin",
    ],
    "trainer_lib.options.data_options": [
        "DataLoaderConfiguration",
    ],
    "trainer_lib.options.ddp_options": [
        "DistributedDataParallelKwargs",
        "InitProcessGroupKwargs",
    ],
    "trainer_lib.options.enums": [
        "DDPCommunicationHookType",
        "DistributedType",
        "DynamoBackend",
        "LoggerType",
        "PrecisionType",
        "RNGType",
    ],
    "trainer_lib.options.precision_options": [
        "AutocastKwargs",
        "GradScalerKwargs",
    ],
    "trainer_lib.options.profiler_options": [
        "ProfileKwargs",
    ],
    "trainer_lib.options.project_options": [
        "ProjectConfiguration",
    ],
    "trainer_lib.options.fsdp_options": [
        "FullyShardedDataParallelPlugin",
    ],
    "trainer_lib.parallelism_config": [
        "ParallelismConfig",
    ],
    "trainer_lib.progress": [
        "tqdm",
    ],
    "trainer_lib.seeding": [
        "set_seed",
        "synchronize_rng_state",
        "synchronize_rng_states",
    ],
    "trainer_lib.state.partial_state": [
        "wait_for_everyone",
    ],
    "trainer_lib.tensor_files.weight_names": [
        "MODEL_NAME",
        "SAFE_MODEL_NAME",
        "SAFE_WEIGHTS_INDEX_NAME",
        "SAFE_WEIGHTS_NAME",
        "SAFE_WEIGHTS_PATTERN_NAME",
        "WEIGHTS_INDEX_NAME",
        "WEIGHTS_NAME",
        "WEIGHTS_PATTERN_NAME",
    ],
    "trainer_lib.tensor_files.tensor_storage": [
        "clean_state_dict_for_safetensors",
        "id_tensor_storage",
    ],
    "trainer_lib.tensor_files.model_files": [
        "load_state_dict",
    ],
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
# Star imports look here; type checkers go by the imports above.
__all__ = [*_HOMES]  # noqa: PLE0604  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
