"""This file is the random numbers of a batch: known from the run's seed and its place, so that nothing is saved."""

import zlib

import numpy as np
import torch

from trainer_lib.events import Run


def generator_of_batch(run: Run, name: str) -> np.random.Generator:
    """Return a generator for the batch in hand, the same one whenever the run comes to it.

    Args:
        run: The run.
        name: What draws, so that each draws something else.
    """
    seed = getattr(run.args, "seed", None)
    rank = 0 if run.accelerator is None else run.accelerator.process_index
    base = torch.initial_seed() if seed is None else seed
    return np.random.default_rng([base, rank, run.state.micro_batches, zlib.crc32(name.encode())])
