"""This file is the generators of a process that was not there when a state was saved."""

from typing import Any

import torch

from trainer_lib.checkpointing.format.rng_state import Generators
from trainer_lib.data_loader.order.data_rng import derived_seed
from trainer_lib.seeding import set_seed


class DerivedGenerators(Generators):
    """Generators that are seeded from those of the first process: a function of its seed, the process and the step.

    Args:
        device: The device of this process.
        rank: The number of this process.
        step: How far the training was.
    """

    def __init__(self, device: torch.device, rank: int, step: int) -> None:
        super().__init__(device)
        self._rank, self._step = rank, step

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the generators begin where only this process does."""
        # A generator's state tells what it was seeded with.
        generator = torch.Generator()
        generator.set_state(state["torch"].cpu())
        set_seed(derived_seed(generator.initial_seed(), self._rank, self._step, "generators") % 2**32)
