"""The structures that collectives have to go through."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import BatchEncoding
from transformers.utils import ModelOutput


class Point(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Batch:
    inputs: Tensor
    points: list[Point]


@dataclass
class Output(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None


def nested(value: float, rows: int = 2) -> dict[str, Any]:
    """Return every kind of container, each with tensors full of `value`."""

    def full(*shape: int) -> Tensor:
        return torch.full((rows, *shape), value)

    return {
        "list": [full(), (full(3),)],
        "point": Point(full(), full(1)),
        "batch": Batch(full(2), [Point(full(), full())]),
        "output": Output(logits=full(2)),
        "encoding": BatchEncoding({"input_ids": full(4)}),
    }
