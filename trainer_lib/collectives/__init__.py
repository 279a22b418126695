"""Collectives over nested structures of tensors, and over any objects.

A world of one takes the same path as a larger world.
"""

from trainer_lib.collectives.gather_for_metrics import gather_real_objects, gather_real_rows
from trainer_lib.collectives.object_collectives import broadcast_object_list, gather_object
from trainer_lib.collectives.ragged_gather import gather_rows
from trainer_lib.collectives.tensor_collectives import (
    CannotPadNestedTensorWarning,
    broadcast,
    copy_tensor_to_devices,
    gather,
    pad_across_processes,
    pad_input_tensors,
    reduce,
)
from trainer_lib.foundation.pytree import (
    TensorInformation,
    concatenate,
    convert_to_fp32,
    find_batch_size,
    find_device,
    get_data_structure,
    honor_type,
    ignorant_find_batch_size,
    initialize_tensors,
    is_namedtuple,
    is_tensor_information,
    is_torch_tensor,
    listify,
    recursively_apply,
    send_to_device,
    slice_tensors,
)

__all__ = [
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
    "gather_real_objects",
    "gather_real_rows",
    "gather_rows",
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
]
