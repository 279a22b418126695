"""The model, the data and the meshes of the comparison."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

MAX_NORM = 1.0


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama and of its batches."""

    width: int = 128
    layers: int = 4
    vocabulary: int = 1000
    length: int = 128
    rows: int = 4  # of a replica's micro-batch


TINY = Shape(width=32, layers=2, vocabulary=64, length=16, rows=2)


@dataclass(frozen=True)
class Mesh:
    """A mesh to train on.

    Args:
        name: The name on the command line.
        title: The title in the table.
        sizes: The sizes for `ParallelismConfig`.
        micro_batches: The micro-batches of an optimizer step.
    """

    name: str
    title: str
    sizes: dict[str, Any] = field(default_factory=dict[str, Any])
    micro_batches: int = 1

    @property
    def num_ranks(self) -> int:
        """The number of processes."""
        ranks = 1
        for size in self.sizes.values():
            ranks *= size
        return ranks


MESHES = {
    mesh.name: mesh
    for mesh in (
        Mesh("tp", "tensor parallelism, 2 ranks", {"tp_size": 2}),
        Mesh("cp", "context parallelism, 2 ranks", {"cp_size": 2}),
        Mesh("sp", "sequence parallelism, 2 ranks", {"sp_size": 2}),
        Mesh("pp", "pipeline of 2 stages, 4 micro-batches", {"pp_size": 2}, micro_batches=4),
        Mesh("fsdp_tp", "FSDP2 × tensor parallelism, 4 ranks", {"dp_shard_size": 2, "tp_size": 2}),
    )
}


def llama(shape: Shape) -> nn.Module:
    """Return a Llama, always with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=shape.width, intermediate_size=shape.width * 2, num_hidden_layers=shape.layers,
        num_attention_heads=8, vocab_size=shape.vocabulary,
        max_position_embeddings=shape.length, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def rows(shape: Shape, count: int, replica: int = 0) -> list[dict[str, Tensor]]:
    """Return samples, other ones for each replica."""
    generator = torch.Generator().manual_seed(replica)
    tokens = torch.randint(shape.vocabulary, (count, shape.length), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


def batch(shape: Shape, replica: int = 0) -> dict[str, Tensor]:
    """Return a batch of a replica."""
    samples = rows(shape, shape.rows, replica)
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def optimizer_of(parameters: Any) -> Optimizer:
    """Return the optimizer of all contestants."""
    return torch.optim.AdamW(parameters, lr=1e-4)
