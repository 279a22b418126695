"""The documents that lie side by side in a packed sequence."""

import torch
from torch import Tensor


def documents_of_positions(position_ids: Tensor) -> Tensor:
    """Return the number of the document of each position, by positions that count on within a document.

    Example:
        >>> documents_of_positions(torch.tensor([[0, 1, 2, 0, 1]])).tolist()
        [[0, 0, 0, 1, 1]]
    """
    begins = torch.zeros_like(position_ids)
    begins[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return begins.cumsum(1)


def documents_of_lengths(cumulative: Tensor, length: int) -> Tensor:
    """Return the number of the document of each position in one row, by their cumulative lengths (cu_seqlens).

    Example:
        >>> documents_of_lengths(torch.tensor([0, 3, 5]), 5).tolist()
        [[0, 0, 0, 1, 1]]
    """
    positions = torch.arange(length, device=cumulative.device)
    return (torch.searchsorted(cumulative.long(), positions, right=True) - 1).unsqueeze(0)
