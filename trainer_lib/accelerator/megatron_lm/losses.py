"""Losses averaged, and tensors gathered, over the ranks that read data of their own."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainer_lib.foundation.tensors.pytree import recursively_apply
from trainer_lib.state import PartialState


def avg_losses_across_data_parallel_group(losses: Sequence[Tensor]) -> Tensor:
    """Return the mean of each loss over the ranks that read data of their own, as one tensor.

    Example:
        >>> avg_losses_across_data_parallel_group([torch.tensor(2.0), torch.tensor(3.0)])
        tensor([2., 3.])
    """
    group = PartialState().data_group
    return group.all_reduce(torch.cat([loss.detach().reshape(1) for loss in losses])) / group.size


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """Return tensors of all ranks that read data of their own, one after the other along their first dimension.

    Args:
        tensor: A tensor, or nested containers of tensors; all ranks give the same shapes.

    Example:
        >>> gather_across_data_parallel_groups({"loss": torch.tensor(2.0)})
        {'loss': tensor([2.])}
    """
    group = PartialState().data_group

    def gathered(value: Tensor) -> Tensor:
        rows = value.detach()[None] if value.ndim == 0 else value.detach()
        return torch.cat(group.all_gather(rows.contiguous()))

    return recursively_apply(gathered, tensor, error_on_other_type=True)
