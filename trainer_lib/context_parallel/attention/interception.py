"""torch's `scaled_dot_product_attention`, computed over the ranks that hold parts of sequences."""

import functools
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer_lib.context_parallel.active import CutSequences
from trainer_lib.foundation.errors import UnsupportedError

_attention: Callable[..., Tensor] = F.scaled_dot_product_attention
_HIDDEN = -1e4  # what a mask adds to the scores of padding, at most

Place = tuple[ModuleType, str]  # a file, and a name in it


@contextmanager
def intercepted(places: Sequence[Place] = ()) -> Generator[None]:
    """Return the context in which `F.scaled_dot_product_attention` runs over the ranks of the sequences in use.

    Args:
        places: Where else the function has a name (`places_of`).
    """
    everywhere, over_ranks = [(F, _attention.__name__), *places], _uncompiled()
    for file, name in everywhere:
        setattr(file, name, over_ranks)
    try:
        yield
    finally:
        if CutSequences.active() is None:  # else an outer loop still has parts of sequences
            for file, name in everywhere:
                setattr(file, name, _attention)


def places_of(model: nn.Module) -> list[Place]:
    """Return the names under which the files of a model's modules imported torch's attention."""
    names = {type(module).__module__ for module in model.modules()} - {F.__name__}
    files = [sys.modules[name] for name in sorted(names) if name in sys.modules]
    return [(file, name) for file in files for name, value in vars(file).items() if value is _attention]


def attention_over_ranks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute what `F.scaled_dot_product_attention` computes, on parts of sequences."""
    del enable_gqa  # heads of keys that are fewer are always for groups of query heads
    sequences = CutSequences.active()
    if sequences is None:  # something kept the function beyond its context
        return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
    if query.ndim != 4:
        raise UnsupportedError(
            f"Attention on parts of sequences needs tensors of [batch, heads, positions, features] (got "
            f"{query.ndim} dimensions)."
        )
    keep = None if attn_mask is None else _kept(sequences, attn_mask, key.shape[2])
    return sequences.attention(query, key, value, keep=keep, is_causal=is_causal, scale=scale, dropout_p=dropout_p)


@functools.cache
def _uncompiled() -> Callable[..., Tensor]:
    """Return the attention that stays out of compiled graphs. A decorator would import the compiler with this file."""
    return cast(Any, torch.compiler.disable(attention_over_ranks))


def _kept(sequences: CutSequences, mask: Tensor, local_length: int) -> Tensor:
    """Return the keys of the whole sequences that are no padding, by a mask that is the same for all queries."""
    is_same = mask.ndim == 4 and mask.shape[-2] == 1 and mask.shape[-1] == local_length
    if not is_same or (mask.shape[1] > 1 and mask.stride(1) != 0 and not bool((mask == mask[:, :1]).all())):
        raise UnsupportedError(
            f"attn_mask of shape {tuple(mask.shape)} cannot be cut: context parallelism takes is_causal=True and "
            f"masks of padding keys, [batch, 1, 1, {local_length}]. Leave the mask out and give is_causal=True; for "
            "packed documents use a model of transformers with position_ids."
        )
    row = mask[:, 0, 0]
    if row.dtype == torch.bool:
        return sequences.whole_mask(row)
    if not bool(((row == 0) | (row <= _HIDDEN)).all()):
        raise UnsupportedError(
            "attn_mask adds a bias to the scores, which context parallelism does not cut. Give a mask of 0 and -inf, "
            "or of bools."
        )
    return sequences.whole_mask(row == 0)
