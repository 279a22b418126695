"""The seeds of data workers: computed from seed and epoch, or drawn where torch draws them."""

from typing import TYPE_CHECKING, Any

import torch

from trainer_lib.data_loader.order.data_rng import derived_seed
from trainer_lib.data_loader.order.epoch_start import EpochStart, EpochStream

if TYPE_CHECKING:
    from torch import Generator


class WorkerSeeds:
    """The generator from which torch's iterator draws the seed of the workers.

    It is not the generator of the user's loader, so that a resume draws nothing from training's generators.
    """

    def __init__(self) -> None:
        self.generator: Generator = torch.Generator()

    def compute(self, seed: int, epoch: int, *keys: Any) -> None:
        """Let the seed of the next workers depend on the loader's seed, the epoch and other keys."""
        self.generator.manual_seed(derived_seed(seed, epoch, *keys, "workers"))

    def take(self, state: torch.Tensor) -> None:
        """Let the seed of the next workers be the one that follows from a generator's state."""
        self.generator.set_state(state)


def draw_worker_seed(stream: EpochStream, generator: torch.Generator | None) -> torch.Tensor | None:
    """Draw the seed of the workers as torch's iterator does, and return the generator's state before.

    Args:
        stream: What the epoch draws from.
        generator: The loader's generator; `None`: the global one.

    Returns:
        The state; `None` if torch draws no seed, or did before a resume and the state was not kept.
    """
    start = stream.start
    if not start.seeds_workers or not (start.is_new or generator is not None or "torch" in start.shared):
        return None
    drawn_from = torch.default_generator if generator is None else generator
    with stream:
        before = drawn_from.get_state()
        _draw_seed(drawn_from)
    if generator is None:
        stream.again(_draw_seed)
    return before


def draw_unread(start: EpochStart | None, generator: torch.Generator | None) -> None:
    """Draw the seed of the workers from training's generator, on a rank for which another one reads the epoch."""
    if start is not None and start.is_new and start.seeds_workers and generator is None:
        _draw_seed()


def _draw_seed(generator: torch.Generator | None = None) -> None:
    torch.empty((), dtype=torch.int64).random_(generator=generator)
