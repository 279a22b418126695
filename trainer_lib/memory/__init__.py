"""Memory: release it, measure its peak, and find the largest batch size that fits."""

from trainer_lib.memory.device_memory import get_max_memory
from trainer_lib.memory.executable_batch_size import find_executable_batch_size
from trainer_lib.memory.peak_memory import MemoryUse, PeakMemory
from trainer_lib.memory.release_memory import clear_device_cache, release_memory

__all__ = [
    "MemoryUse",
    "PeakMemory",
    "clear_device_cache",
    "find_executable_batch_size",
    "get_max_memory",
    "release_memory",
]
