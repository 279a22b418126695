"""Cut a model into stages of consecutive blocks that keep the author's parameter names."""

import copy
from collections.abc import Generator, Sequence
from contextlib import contextmanager
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


class _Order:
    """Checks that a forward runs the modules of a row, skipped ones too, in the order of the row."""

    def __init__(self) -> None:
        self._reached: int | None = None  # only in a forward: the backward of a checkpoint runs modules again

    @contextmanager
    def checked(self) -> Generator[None]:
        """Return the context of a forward."""
        self._reached = -1
        try:
            yield
        finally:
            self._reached = None

    def watch(self, module: nn.Module, name: str, position: int) -> None:
        """Raise when a module runs after one of a later position."""

        def check(module: nn.Module, args: Any) -> None:
            del args
            if self._reached is None:
                return
            if position < self._reached:
                raise PreparationError(
                    f"{name} runs after modules that the model holds after it, so the model cannot be cut there. A "
                    "pipeline needs blocks that run in a row, in the order in which the model holds them, after the "
                    "modules that it holds before them. Name all that run in a row, in that order (blocks=[…])."
                )
            self._reached = position

        module.register_forward_pre_hook(check)


class Stage(nn.Module):
    """One part of a model: tensors in, one tensor out."""

    def __init__(self, model: nn.Module, is_first: bool, order: _Order) -> None:
        super().__init__()
        self.model = model
        self.is_first = is_first
        self._order = order

    def forward(self, inputs: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return the activations for the next stage, or the model's output."""
        with self._order.checked():
            if not hasattr(self.model, "get_input_embeddings"):
                return tensor_of(self.model(inputs, **kwargs))
            name = "input_ids" if self.is_first else "inputs_embeds"
            return tensor_of(self.model(**{**kwargs, name: inputs, "use_cache": False}))


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
    order = _Order()
    row = [before, *([name] for name in blocks), after] if len(bounds) > 2 else []  # a single stage skips nothing
    for position, names in enumerate(row):
        for name in names:
            order.watch(part.get_submodule(name), name, position)
    return Stage(part, index == 0, order)
