from trainer_lib.memory.device_memory import get_max_memory as get_max_memory
from trainer_lib.memory.executable_batch_size import find_executable_batch_size as find_executable_batch_size
from trainer_lib.memory.peak_memory import MemoryUse as MemoryUse
from trainer_lib.memory.peak_memory import PeakMemory as PeakMemory
from trainer_lib.memory.release_memory import clear_device_cache as clear_device_cache
from trainer_lib.memory.release_memory import release_memory as release_memory

__all__: list[str]
