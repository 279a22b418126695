"""Functions that scripts import from `accelerate.utils.memory`."""

from trainer_lib.memory import clear_device_cache as clear_device_cache
from trainer_lib.memory import find_executable_batch_size as find_executable_batch_size
from trainer_lib.memory import release_memory as release_memory
from trainer_lib.memory.executable_batch_size import is_out_of_memory

should_reduce_batch_size = is_out_of_memory
