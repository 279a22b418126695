"""Which parts of a sequence each rank holds: one piece in order, or one of the head and one of the tail."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.light_dataclasses import frozen_dataclass


@frozen_dataclass
class SequenceLayout:
    """How sequences are cut for a group of ranks.

    With causal attention a late position attends to more keys than an early one. A balanced layout cuts a sequence
    into twice as many chunks as there are ranks and gives rank `r` the chunks `r` and `2 × size - 1 - r`, so that all
    ranks have the same work.

    Args:
        size: How many ranks share a sequence.
        rank: This one of them.
        balanced: Whether each rank gets a chunk of the head and one of the tail.

    Example:
        >>> [SequenceLayout(2, rank, balanced=True).positions(8).tolist() for rank in range(2)]
        [[0, 1, 6, 7], [2, 3, 4, 5]]
    """

    size: int
    rank: int
    balanced: bool = False

    @property
    def multiple(self) -> int:
        """What the length of a sequence has to be a multiple of."""
        return 2 * self.size if self.balanced else self.size

    def chunks(self, rank: int) -> list[int]:
        """Return the numbers of a rank's chunks, in order."""
        return [rank, self.multiple - 1 - rank] if self.balanced else [rank]

    def padded(self, length: int) -> int:
        """Return the smallest length that can be cut and is at least `length`."""
        return -(-length // self.multiple) * self.multiple

    def shard(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a whole tensor, as a copy.

        Raises:
            ConfigurationError: If its length along `dim` cannot be cut into equal chunks.
        """
        length = tensor.shape[dim]
        if length % self.multiple:
            raise ConfigurationError(
                f"A sequence of {length} cannot be cut for {self.size} ranks: its length must be a multiple of "
                f"{self.multiple}. Pad it to {self.padded(length)}, with labels that the loss ignores."
            )
        pieces = tensor.chunk(self.multiple, dim)
        return torch.cat([pieces[number] for number in self.chunks(self.rank)], dim)

    def join(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        """Return the whole tensor of the parts of all ranks."""
        pieces: dict[int, Tensor] = {}
        for rank, shard in enumerate(shards):
            numbers = self.chunks(rank)
            pieces |= zip(numbers, shard.chunk(len(numbers), dim), strict=True)
        return torch.cat([pieces[number] for number in range(self.multiple)], dim)

    def positions(self, length: int, rank: int | None = None, device: torch.device | None = None) -> Tensor:
        """Return the positions that a rank, by default this one, holds of a sequence of `length`."""
        chunk = length // self.multiple
        numbers = self.chunks(self.rank if rank is None else rank)
        return torch.cat([torch.arange(n * chunk, (n + 1) * chunk, device=device) for n in numbers])
