"""Random generators for a rank that did not exist when the checkpoint was saved."""

from typing import Any

import torch

from trainer_lib.checkpointing.format.rng_state import Generators
from trainer_lib.data_loader.order.data_rng import derived_seed
from trainer_lib.seeding import set_seed


class DerivedGenerators(Generators):
    """Generators seeded by a function of rank 0's seed, this rank and the step.

    Args:
        device: The device of this rank.
        rank: This rank.
        step: The step of the checkpoint.
    """

    def __init__(self, device: torch.device, rank: int, step: int) -> None:
        super().__init__(device)
        self._rank, self._step = rank, step

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Seed the generators for this rank from rank 0's saved state."""
        # A generator's state holds its initial seed.
        generator = torch.Generator()
        generator.set_state(state["torch"].cpu())
        set_seed(derived_seed(generator.initial_seed(), self._rank, self._step, "generators") % 2**32)
