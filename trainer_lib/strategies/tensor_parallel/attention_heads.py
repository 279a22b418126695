"""How many attention heads a projection computes, from the attributes of the module around it."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

from trainer_lib.strategies.tensor_parallel.styles import features, is_matrix

_HEADS = ("num_heads", "n_heads", "num_attention_heads", "n_head", "nhead", "heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
_HEAD_SIZES = (
    "head_dim", "head_size", "attention_head_size", "dim_head", "d_head", "dim_per_head", "d_k", "key_value_proj_dim",
)  # fmt: skip
# Other linear layers of a block that has heads, such as its feed-forward layers, have none.
_PROJECTION = re.compile(
    r"(^|_)(w?[qkv]|w?qkv|w?kv|query|key|value|queries|keys|values|c_attn|in_proj)(_|\d|$)", re.IGNORECASE
)
_FUSED = re.compile(r"kv|query_key|c_attn|in_proj", re.IGNORECASE)


def attributes_to_divide(
    modules: Mapping[str, nn.Module], split: Collection[str], ranks: int
) -> Iterator[tuple[nn.Module, str, int]]:
    """Yield the attributes that count heads of which each rank computes a part: the module, the name and the count.

    Those that a script has divided already are left out, which a module tells that knows the size of a head.

    Args:
        modules: The modules of a model, by name.
        split: The names of matrices of which each rank has a part of the outputs.
        ranks: How many ranks split each matrix.
    """
    users: dict[tuple[str, int], list[str]] = {}
    for name, module in modules.items():
        heads = heads_of(modules, name) if is_matrix(module) else None
        if heads is not None:
            users.setdefault(heads, []).append(name)
    for (attribute, count), names in users.items():
        owner_name, _, key = attribute.rpartition(".")
        is_divided = any(is_divided_by_script(modules, name, count, ranks) for name in names)
        if not is_divided and all(name in split for name in names):
            yield modules[owner_name], key, count


def is_divided_by_script(modules: Mapping[str, nn.Module], name: str, count: int, ranks: int) -> bool:
    """Whether a count of heads is that of one rank before the weight is split, by the size of a head.

    Args:
        modules: The modules of a model, by name.
        name: The name of a projection.
        count: The number of heads that the module around it says.
        ranks: How many ranks split each matrix.
    """
    owner_name, _, attribute = name.rpartition(".")
    size = _count(modules[owner_name], _HEAD_SIZES)
    if size is None or _FUSED.search(attribute):
        return False
    return features(modules[name])[1] == count * size[1] * ranks


def heads_of(modules: Mapping[str, nn.Module], name: str) -> tuple[str, int] | None:
    """Return which attribute says how many heads a projection computes, and how many; `None`: nothing says it.

    Example:
        >>> attention = nn.Module()
        >>> attention.num_heads, attention.query = 3, nn.Linear(12, 12)
        >>> heads_of({"attention": attention, "attention.query": attention.query}, "attention.query")
        ('attention.num_heads', 3)
    """
    owner_name, _, attribute = name.rpartition(".")
    owner = modules.get(owner_name)
    if owner is None or not _PROJECTION.search(attribute):
        return None
    outputs = features(modules[name])[1]
    prefix = f"{owner_name}." if owner_name else ""
    queries, keys = _count(owner, _HEADS), _count(owner, _KEY_HEADS)
    if queries is None:
        return None
    chosen = queries
    if keys is not None and keys[1] < queries[1] and outputs == keys[1] * _head_size(owner, queries[1]):
        chosen = keys
    return (f"{prefix}{chosen[0]}", chosen[1]) if outputs % chosen[1] == 0 else None


def _head_size(owner: nn.Module, queries: int) -> int:
    """Return the size of a head: what the module says, or that of its widest projection."""
    size = _count(owner, _HEAD_SIZES)
    if size is not None:
        return size[1]
    projections = [child for name, child in owner.named_children() if _PROJECTION.search(name) and is_matrix(child)]
    return max((features(child)[1] for child in projections), default=0) // queries


def _count(owner: nn.Module, names: tuple[str, ...]) -> tuple[str, int] | None:
    values: list[tuple[str, Any]] = [(name, getattr(owner, name, None)) for name in names]
    return next(((name, value) for name, value in values if type(value) is int and value > 0), None)
