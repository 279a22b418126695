"""The random generators of a rank in a checkpoint: the global ones, and those that models and others hold."""

from typing import Any

import torch

from trainer_lib.checkpointing.format.rng_state import Generators
from trainer_lib.data_loader.order.data_rng import derived_seed
from trainer_lib.data_loader.order.held_generators import HeldGenerators
from trainer_lib.seeding import set_seed


class RankGenerators(Generators):
    """The global generators, and those that objects hold, such as one of a model for its stochastic depth.

    Args:
        device: The device of this rank.
        held: The generators that objects hold.
    """

    def __init__(self, device: torch.device, held: HeldGenerators) -> None:
        super().__init__(device)
        self._held = held

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators."""
        held = self._held.states()
        return super().state_dict() | ({"held": held} if held else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the states of the generators."""
        self._held.restore(state.get("held", {}))
        self.restore_global(state)

    def restore_global(self, state: dict[str, Any]) -> None:
        """Restore the global generators."""
        super().load_state_dict(state)


class DerivedGenerators(RankGenerators):
    """The generators of a rank that did not exist when the checkpoint was saved.

    The global ones are seeded by a function of rank 0's seed, this rank and the step. Those that objects hold are rank
    0's, since ranks may have to draw the same numbers from them.

    Args:
        device: The device of this rank.
        held: The generators that objects hold.
        rank: This rank.
        step: The step of the checkpoint.
    """

    def __init__(self, device: torch.device, held: HeldGenerators, rank: int, step: int) -> None:
        super().__init__(device, held)
        self._rank, self._step = rank, step

    def restore_global(self, state: dict[str, Any]) -> None:
        """Seed the global generators from rank 0's saved state."""
        # A generator's state holds its initial seed.
        generator = torch.Generator()
        generator.set_state(state["torch"].cpu())
        set_seed(derived_seed(generator.initial_seed(), self._rank, self._step, "generators") % 2**32)
