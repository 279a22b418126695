"""Average parameters or gradients over ranks, many tensors in one all-reduce."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_lib.process_group import ProcessGroup

_BYTES_A_MESSAGE = 25 * 2**20


@torch.no_grad()
def average(tensors: Sequence[Tensor], group: ProcessGroup) -> None:
    """Overwrite tensors with their mean over the ranks; 16-bit tensors are summed in 32 bits and rounded once."""
    for chosen in _messages(tensors):
        dtype = torch.promote_types(chosen[0].dtype, torch.float32)
        flat = torch.cat([tensor.reshape(-1).to(dtype) for tensor in chosen])
        group.all_reduce(flat).div_(group.size)
        sizes = [tensor.numel() for tensor in chosen]
        for tensor, mean in zip(chosen, flat.split(sizes), strict=True):
            tensor.copy_(mean.view(tensor.shape))


def trained_parameters(model: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients or that an optimizer holds, by name.

    A parameter that is frozen within a round of local SGD differs between the ranks, and still needs the mean.
    """
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    held = {id(parameter) for group in groups for parameter in group["params"]}
    named = model.named_parameters()
    return {name: parameter for name, parameter in named if parameter.requires_grad or id(parameter) in held}


@torch.no_grad()
def average_gradients(parameters: Sequence[Tensor], extra_values: Tensor, group: ProcessGroup) -> None:
    """Overwrite gradients and `extra_values` with their mean over the ranks.

    A parameter without a gradient on this rank counts as zero; one without a gradient on any rank gets none.
    """
    has_any = torch.tensor([float(parameter.grad is not None) for parameter in parameters], dtype=torch.float32)
    header = torch.cat([extra_values, has_any.to(extra_values)])
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    average([header, *gradients], group)
    extra_values.copy_(header[: extra_values.numel()])
    for parameter, ranks_with_gradient in zip(parameters, header[extra_values.numel() :].tolist(), strict=True):
        if not ranks_with_gradient:
            parameter.grad = None


def _messages(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    message: list[Tensor] = []
    size = 0
    for tensor in tensors:
        size += tensor.nbytes
        if message and (size > _BYTES_A_MESSAGE or tensor.dtype != message[0].dtype):
            yield message
            message, size = [], tensor.nbytes
        message.append(tensor)
    if message:
        yield message
