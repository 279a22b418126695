"""The styles of tensor parallelism: which dimension of a module's weights is split, and what goes in and out."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

# What each rank has of a tensor: all of it, or its part of the last dimension, of the sequence, or of the heads.
WHOLE, SPLIT, SEQUENCE, HEADS = "whole", "split", "sequence", "heads"
LOGITS = "logits"  # the part of the last dimension while training, all of it in an evaluation
PARTIAL = "partial"  # a part of a sum


class Style(NamedTuple):
    """How a module is split.

    Args:
        splits: "out" or "in", the dimension of the matrix, or "experts"; `None`: weights stay whole.
        takes: What each rank has of the input.
        uses: What the module computes with.
        gives: What each rank gets of the output; `None`: the module's inner modules decide.
    """

    splits: str | None
    takes: str
    uses: str
    gives: str | None


STYLES: Mapping[str, Style] = {
    "colwise": Style("out", WHOLE, WHOLE, SPLIT),
    "colwise_gather_output": Style("out", WHOLE, WHOLE, WHOLE),
    "colwise_rep": Style("out", WHOLE, WHOLE, WHOLE),
    "colwise_loss_parallel": Style("out", WHOLE, WHOLE, LOGITS),
    "rowwise": Style("in", SPLIT, SPLIT, WHOLE),
    "rowwise_split_input": Style("in", WHOLE, SPLIT, WHOLE),
    "rowwise_rep": Style("in", WHOLE, SPLIT, WHOLE),
    "rowwise_scatter_sequence": Style("in", SPLIT, SPLIT, SEQUENCE),
    "embedding_rowwise": Style("in", WHOLE, WHOLE, WHOLE),
    "embedding_colwise": Style("out", WHOLE, WHOLE, WHOLE),
    "experts": Style("experts", WHOLE, WHOLE, WHOLE),
    "replicated_with_grad_allreduce": Style(None, HEADS, HEADS, HEADS),
    "sequence_parallel": Style(None, SEQUENCE, SEQUENCE, SEQUENCE),
    "sequence_parallel_gather": Style(None, SEQUENCE, SEQUENCE, WHOLE),
    "scatter_sequence": Style(None, WHOLE, SEQUENCE, None),
    "gather_sequence": Style(None, SEQUENCE, WHOLE, None),
}


def is_matrix(module: nn.Module) -> bool:
    """Whether a module has a weight that styles can split: a linear layer, an embedding, transformers' Conv1D."""
    return isinstance(module, (nn.Linear, nn.Embedding)) or is_conv1d(module)


def style_of(name: str, module: nn.Module) -> Style:
    """Return the style for a module; an embedding takes whole indices."""
    style = STYLES[name]
    return style._replace(takes=WHOLE, uses=WHOLE) if isinstance(module, nn.Embedding) else style


def features(module: nn.Module) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a matrix."""
    weight: Any = module.weight
    inputs, outputs = weight.shape if isinstance(module, nn.Embedding) or is_conv1d(module) else weight.shape[::-1]
    return inputs, outputs


def placements(module: nn.Module, style: Style) -> "dict[str, Placement]":
    """Return how each of a module's own parameters is split, by name."""
    from torch.distributed.tensor import Replicate, Shard

    names = [name for name, _ in module.named_parameters(recurse=False)] if style.gives is not None else []
    if style.splits is None:
        return dict.fromkeys(names, Replicate())
    if style.splits == "experts":
        return dict.fromkeys(names, Shard(0))
    transposed = isinstance(module, nn.Embedding) or is_conv1d(module)  # a linear layer has (outputs, inputs)
    of_weight = Shard(int((style.splits == "in") != transposed))
    of_bias = Replicate() if style.splits == "in" else Shard(0)
    return {name: of_weight if name == "weight" else of_bias for name in names}


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D, a linear layer whose weight is transposed."""
    # By name: transformers need not be installed.
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")
