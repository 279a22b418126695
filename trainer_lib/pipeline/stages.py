"""Cut a model into stages of consecutive blocks that keep the author's parameter names."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trainer_lib.foundation.errors import PreparationError
from trainer_lib.modules.block_split import surroundings

_RESULTS = ("logits", "last_hidden_state")


class Skipped(nn.Module):
    """A module of another stage: it returns its first input."""

    def forward(self, first: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the first input."""
        return first


class SkippedSummand(nn.Module):
    """An embedding of the first stage whose output is added to that of another, such as positions: it adds nothing."""

    def forward(self, positions: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return zero."""
        return torch.zeros((), device=positions.device)


class Stage(nn.Module):
    """One part of a model: tensors in, one tensor out."""

    def __init__(self, model: nn.Module, is_first: bool) -> None:
        super().__init__()
        self.model = model
        self.is_first = is_first

    def forward(self, inputs: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return the activations for the next stage, or the model's output."""
        if not hasattr(self.model, "get_input_embeddings"):
            return tensor_of(self.model(inputs, **kwargs))
        name = "input_ids" if self.is_first else "inputs_embeds"
        return tensor_of(self.model(**{name: inputs}, use_cache=False, **kwargs))


def tensor_of(output: Any) -> torch.Tensor:
    """Return the tensor of a model's output."""
    for name in _RESULTS:
        output = getattr(output, name, output)
    if not isinstance(output, torch.Tensor):
        raise PreparationError(
            f"A pipeline passes one tensor from stage to stage (got {type(output).__name__}). Return a tensor, or an "
            f"object with {' or '.join(_RESULTS)}."
        )
    return output.clone() if output._is_view() else output  # zero-bubble schedules detach outputs in place


def cut(model: nn.Module, blocks: list[str], bounds: Sequence[int], index: int) -> Stage:
    """Return stage `index` of a model; parameters are shared with the model, and the others' modules are skipped."""
    kept = set(blocks[bounds[index] : bounds[index + 1]])
    tensors = [*model.parameters(), *model.buffers()]
    part = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    before, after = surroundings(model, blocks)
    for name in set(blocks) - kept:
        part.set_submodule(name, Skipped())
    if index > 0:
        for name in before:
            is_summand = name != before[0] and isinstance(part.get_submodule(name), nn.Embedding)
            part.set_submodule(name, SkippedSummand() if is_summand else Skipped())
    if index < len(bounds) - 2:
        for name in after:
            part.set_submodule(name, Skipped())
    return Stage(part, index == 0)
