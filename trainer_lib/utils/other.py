"""Names that scripts import from `accelerate.utils.other`."""

from trainer_lib.checkpointing.save.torch_save import TORCH_SAFE_GLOBALS as TORCH_SAFE_GLOBALS
from trainer_lib.checkpointing.save.torch_save import load as load
from trainer_lib.checkpointing.save.torch_save import save as save
from trainer_lib.foundation.byte_sizes import convert_bytes as convert_bytes
from trainer_lib.foundation.compat import get_pretty_name as get_pretty_name
from trainer_lib.foundation.compat import merge_dicts as merge_dicts
from trainer_lib.foundation.compat import recursive_getattr as recursive_getattr
from trainer_lib.modules.blocks import get_module_children_bottom_up as get_module_children_bottom_up
from trainer_lib.modules.blocks import has_repeated_blocks as has_repeated_blocks
from trainer_lib.modules.blocks import is_repeated_blocks as is_repeated_blocks
from trainer_lib.modules.compilation import compile_regions as compile_regions
from trainer_lib.modules.module_kinds import get_model_tp_size as get_model_tp_size
from trainer_lib.modules.module_kinds import model_has_dtensor as model_has_dtensor
from trainer_lib.modules.unwrapping import extract_model_from_parallel as extract_model_from_parallel
from trainer_lib.modules.unwrapping import has_compiled_regions as has_compiled_regions
from trainer_lib.modules.unwrapping import is_compiled_module as is_compiled_module
from trainer_lib.options.accelerate_constants import FSDP_PYTORCH_VERSION as FSDP_PYTORCH_VERSION
from trainer_lib.processes.kernel import check_os_kernel as check_os_kernel
from trainer_lib.processes.ports import free_port
from trainer_lib.processes.ports import is_port_in_use as is_port_in_use
from trainer_lib.state.partial_state import wait_for_everyone as wait_for_everyone
from trainer_lib.tensor_files.tensor_storage import clean_state_dict_for_safetensors as clean_state_dict_for_safetensors

compile_regions_fsdp2 = compile_regions  # always in place, as FSDP2 needs it
compile_regions_deepspeed = compile_regions  # and DeepSpeed
get_free_port = free_port
