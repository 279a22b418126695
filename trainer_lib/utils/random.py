"""Random seeds and generators: names that scripts import from `accelerate.utils.random`."""

from trainer_lib.options.accelerate_constants import CUDA_DISTRIBUTED_TYPES as CUDA_DISTRIBUTED_TYPES
from trainer_lib.seeding import set_seed as set_seed
from trainer_lib.seeding import synchronize_rng_state as synchronize_rng_state
from trainer_lib.seeding import synchronize_rng_states as synchronize_rng_states
