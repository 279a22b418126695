"""The kinds of models that are converted: names and layouts of weights in Megatron-LM and in transformers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer_lib.foundation.errors import CheckpointError, UnsupportedError
from trainer_lib.foundation.light_dataclasses import frozen_dataclass

Weights = dict[str, Tensor]


@frozen_dataclass
class Shape:
    """The sizes of a model.

    Attributes:
        layers: The number of layers.
        heads: The attention heads.
        groups: The heads of keys and values.
        head_size: The size of a head.
        is_gated: Whether the feed-forward network has a gate.
    """

    layers: int
    heads: int
    groups: int
    head_size: int
    is_gated: bool = False


@frozen_dataclass
class Kind:
    """A kind of models.

    Attributes:
        name: Its name.
        stack: The module with the layers, in Megatron-LM.
        layer: The layers in transformers, with `{}` for the number.
        whole: The names outside of layers: in Megatron-LM, and in transformers.
        parts: The names in layers, without the projection of queries, keys and values and a gated network.
        projections: The modules of queries, keys and values in transformers; one: they are together.
        gate: The modules of the gate and of what it multiplies; empty: none.
        is_transposed: Whether linear layers are `Conv1D` in transformers.
    """

    name: str
    stack: str
    layer: str
    whole: Mapping[str, str]
    parts: Mapping[str, str]
    projections: Sequence[str]
    gate: Sequence[str] = ()
    is_transposed: bool = False


_NORMS = ("input_layernorm", "pre_mlp_layernorm")
# Where Transformer Engine's layers keep the norms before them.
FUSED = {
    f"{norm}.{kind}": f"{linear}.layer_norm_{kind}"
    for norm, linear in zip(_NORMS, ("self_attention.linear_qkv", "mlp.linear_fc1"), strict=True)
    for kind in ("weight", "bias")
}
QKV, FC1 = "self_attention.linear_qkv", "mlp.linear_fc1"

KINDS = {
    "gpt2": Kind(
        "gpt2", "decoder", "transformer.h.{}.",
        {
            "embedding.word_embeddings": "transformer.wte",
            "embedding.position_embeddings": "transformer.wpe",
            "decoder.final_layernorm": "transformer.ln_f",
            "output_layer": "lm_head",
        },
        {
            "input_layernorm": "ln_1", "self_attention.linear_proj": "attn.c_proj", "pre_mlp_layernorm": "ln_2",
            FC1: "mlp.c_fc", "mlp.linear_fc2": "mlp.c_proj",
        },
        ("attn.c_attn",), is_transposed=True,
    ),
    "llama": Kind(
        "llama", "decoder", "model.layers.{}.",
        {
            "embedding.word_embeddings": "model.embed_tokens",
            "decoder.final_layernorm": "model.norm",
            "output_layer": "lm_head",
        },
        {
            "input_layernorm": "input_layernorm", "self_attention.linear_proj": "self_attn.o_proj",
            "pre_mlp_layernorm": "post_attention_layernorm", "mlp.linear_fc2": "mlp.down_proj",
        },
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"),
    ),
    "megatron-bert": Kind(
        "megatron-bert", "encoder", "bert.encoder.layer.{}.",
        {
            "embedding.word_embeddings": "bert.embeddings.word_embeddings",
            "embedding.position_embeddings": "bert.embeddings.position_embeddings",
            "embedding.tokentype_embeddings": "bert.embeddings.token_type_embeddings",
            "encoder.final_layernorm": "bert.encoder.ln",
            "lm_head.dense": "cls.predictions.transform.dense",
            "lm_head.layer_norm": "cls.predictions.transform.LayerNorm",
            "output_layer": "cls.predictions",
            "pooler.dense": "bert.pooler.dense",
            "binary_head": "cls.seq_relationship",
        },
        {
            "input_layernorm": "attention.ln", "self_attention.linear_proj": "attention.output.dense",
            "pre_mlp_layernorm": "ln", FC1: "intermediate.dense", "mlp.linear_fc2": "output.dense",
        },
        ("attention.self.query", "attention.self.key", "attention.self.value"),
    ),
}  # fmt: skip


def to_megatron(kind: Kind, shape: Shape, weights: Mapping[str, Tensor]) -> Weights:
    """Return the weights of a model of transformers under Megatron-LM's names, whole."""
    remaining = _with_prefix(weights) if kind.name == "gpt2" else dict(weights)
    _check_layers(kind, shape, remaining)
    result: Weights = {}
    for name, theirs in kind.whole.items():
        _move(remaining, f"{theirs}.", result, f"{name}.")
    for index in range(shape.layers):
        theirs, ours = kind.layer.format(index), f"{kind.stack}.layers.{index}."
        _take_projection(kind, shape, remaining, theirs, result, f"{ours}{QKV}.")
        if kind.gate:
            gate, up = (remaining.pop(f"{theirs}{name}.weight") for name in kind.gate)
            result[f"{ours}{FC1}.weight"] = torch.cat([gate, up])
        for name, part in kind.parts.items():
            is_linear = "layernorm" not in name
            _move(remaining, f"{theirs}{part}.", result, f"{ours}{name}.", kind.is_transposed and is_linear)
    unknown = [name for name in remaining if name not in _COPIES.get(kind.name, ())]
    if unknown:
        raise UnsupportedError(
            f"This model of kind {kind.name} has weights without a place in Megatron-LM: {', '.join(unknown[:5])}."
        )
    return result


def from_megatron(kind: Kind, shape: Shape, weights: Mapping[str, Tensor]) -> Weights:
    """Return whole weights of Megatron-LM under the names of transformers."""
    remaining = dict(weights)
    result: Weights = {}
    for name, theirs in kind.whole.items():
        _move(remaining, f"{name}.", result, f"{theirs}.")
    for index in range(shape.layers):
        theirs, ours = kind.layer.format(index), f"{kind.stack}.layers.{index}."
        _give_projection(kind, shape, remaining, f"{ours}{QKV}.", result, theirs)
        if kind.gate:
            pair = remaining.pop(f"{ours}{FC1}.weight").chunk(2)
            result |= {f"{theirs}{name}.weight": part.contiguous() for name, part in zip(kind.gate, pair, strict=True)}
        for name, part in kind.parts.items():
            is_linear = "layernorm" not in name
            _move(remaining, f"{ours}{name}.", result, f"{theirs}{part}.", kind.is_transposed and is_linear)
    if remaining:
        raise UnsupportedError(
            f"This checkpoint has weights that a model of kind {kind.name} has not: {', '.join(list(remaining)[:5])}."
        )
    return result


def _with_prefix(weights: Mapping[str, Tensor]) -> Weights:
    """Return GPT-2's weights as `GPT2LMHeadModel` names them: files of `GPT2Model` lack a prefix; some have masks."""
    kept = {name: value for name, value in weights.items() if not name.endswith((".attn.bias", ".attn.masked_bias"))}
    if any(name.startswith("transformer.") for name in kept):
        return kept
    return {name if name.startswith("lm_head.") else f"transformer.{name}": value for name, value in kept.items()}


def _check_layers(kind: Kind, shape: Shape, weights: Mapping[str, Tensor]) -> None:
    linear = (*kind.projections, *kind.gate)
    names = [f"{kind.layer.format(index)}{name}.weight" for index in range(shape.layers) for name in linear]
    missing = [name for name in names if name not in weights]
    if missing:
        raise CheckpointError(f"This model of kind {kind.name} lacks weights: {', '.join(missing[:5])}.")


# Names under which transformers saves a weight a second time.
_COPIES = {
    "gpt2": ("lm_head.weight",),
    "megatron-bert": ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias"),
}


def grouped(query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
    """Return queries, keys and values as Megatron-LM has them: by group, its queries, its keys and its values."""
    rest = query.shape[1:]
    parts = [part.reshape(shape.groups, -1, shape.head_size, *rest) for part in (query, key, value)]
    return torch.cat(parts, dim=1).reshape(-1, *rest)


def ungrouped(joined: Tensor, shape: Shape) -> list[Tensor]:
    """Return queries, keys and values from what `grouped` returns."""
    rest, each = joined.shape[1:], shape.heads // shape.groups
    parts = joined.reshape(shape.groups, each + 2, shape.head_size, *rest).split([each, 1, 1], dim=1)
    return [part.reshape(-1, *rest) for part in parts]


def _take_projection(
    kind: Kind, shape: Shape, weights: Weights, theirs: str, result: Weights, ours: str
) -> None:  # fmt: skip
    for ending in ("weight", "bias"):
        names = [f"{theirs}{name}.{ending}" for name in kind.projections]
        if names[0] not in weights:
            continue
        parts = [weights.pop(name) for name in names]
        if len(parts) == 1:
            parts = list((parts[0].t() if ending == "weight" else parts[0]).chunk(3))
        result[f"{ours}{ending}"] = grouped(parts[0], parts[1], parts[2], shape)


def _give_projection(
    kind: Kind, shape: Shape, weights: Weights, ours: str, result: Weights, theirs: str
) -> None:  # fmt: skip
    for ending in ("weight", "bias"):
        if f"{ours}{ending}" not in weights:
            continue
        parts = ungrouped(weights.pop(f"{ours}{ending}"), shape)
        if len(kind.projections) == 1:
            joined = torch.cat(parts)
            parts = [joined.t().contiguous() if ending == "weight" else joined]
        result |= {f"{theirs}{name}.{ending}": part for name, part in zip(kind.projections, parts, strict=True)}


def _move(source: Weights, old: str, target: Weights, new: str, is_transposed: bool = False) -> None:
    for ending in ("weight", "bias"):
        value = source.pop(f"{old}{ending}", None)
        if value is not None:
            target[f"{new}{ending}"] = value.t().contiguous() if is_transposed and value.ndim == 2 else value


def with_norms_apart(weights: Mapping[str, Tensor], stack: str) -> Weights:
    """Return weights in which the norms of Transformer Engine's layers have names of their own."""
    apart = {fused: norm for norm, fused in FUSED.items()}
    return {_renamed(name, stack, apart): value for name, value in weights.items()}


def with_norms_fused(weights: Mapping[str, Tensor], stack: str) -> Weights:
    """Return weights with the names of Transformer Engine's layers."""
    return {_renamed(name, stack, FUSED): value for name, value in weights.items()}


def _renamed(name: str, stack: str, names: Mapping[str, str]) -> str:
    head, separator, rest = name.partition(f"{stack}.layers.")
    number, dot, part = rest.partition(".")
    return f"{head}{separator}{number}{dot}{names.get(part, part)}" if separator else name


def check_kind(name: Any) -> Kind:
    """Return a kind of models by transformers' name."""
    known = {"mistral": "llama", "qwen2": "llama"}
    kind = KINDS.get(str(known.get(name, name)))
    if kind is None:
        raise CheckpointError(
            f"Models of kind {name!r} are not converted for Megatron-LM. Known: {', '.join([*KINDS, *known])}."
        )
    return kind
