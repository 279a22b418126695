"""Collectives and nested structures: names that scripts import from `accelerate.utils.operations`."""

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
from trainer_lib.collectives.shape_check import chained_operation as chained_operation
from trainer_lib.collectives.shape_check import verify_operation as verify_operation
from trainer_lib.collectives.tensor_collectives import TENSOR_INT_TO_DTYPE as TENSOR_INT_TO_DTYPE
from trainer_lib.collectives.tensor_collectives import TENSOR_TYPE_TO_INT as TENSOR_TYPE_TO_INT
from trainer_lib.collectives.tensor_collectives import gather_tensor_shape as gather_tensor_shape
from trainer_lib.foundation.compat import GatheredParameters as GatheredParameters
from trainer_lib.foundation.errors import DistributedOperationException as DistributedOperationException
from trainer_lib.foundation.tensors.pytree import get_shape as get_shape
from trainer_lib.foundation.tensors.pytree import is_torch_xpu_tensor as is_torch_xpu_tensor
from trainer_lib.modules.forwards import ConvertOutputsToFp32 as ConvertOutputsToFp32
from trainer_lib.modules.forwards import convert_outputs_to_fp32 as convert_outputs_to_fp32
from trainer_lib.options.accelerate_constants import (
    TORCH_DISTRIBUTED_OPERATION_TYPES as TORCH_DISTRIBUTED_OPERATION_TYPES,
)
