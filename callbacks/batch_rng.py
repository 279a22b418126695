"""Random number generators seeded by the run's seed and the batch's position, so that no state is saved."""

import zlib

import numpy as np
import torch

from trainer_lib.events import Run


def generator_of_batch(run: Run, name: str) -> np.random.Generator:
    """Return the generator of the current batch: the same numbers each time the run reaches this batch.

    Args:
        run: The run.
        name: The name of the caller, so that each caller draws different numbers.
    """
    seed = getattr(run.args, "seed", None)
    rank = 0 if run.accelerator is None else run.accelerator.data_group.rank
    base = torch.initial_seed() if seed is None else seed
    return np.random.default_rng([base, rank, run.state.micro_batches, zlib.crc32(name.encode())])
