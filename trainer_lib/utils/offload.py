"""Weights in files on the disk: names that scripts import from `accelerate.utils.offload`."""

from trainer_lib.tensor_files.offloaded_weights import OffloadedWeightsLoader as OffloadedWeightsLoader
from trainer_lib.tensor_files.offloaded_weights import PrefixedDataset as PrefixedDataset
from trainer_lib.tensor_files.offloaded_weights import extract_submodules_state_dict as extract_submodules_state_dict
from trainer_lib.tensor_files.offloaded_weights import load_offloaded_weight as load_offloaded_weight
from trainer_lib.tensor_files.offloaded_weights import offload_state_dict as offload_state_dict
from trainer_lib.tensor_files.offloaded_weights import offload_weight as offload_weight
from trainer_lib.tensor_files.offloaded_weights import save_offload_index as save_offload_index
