"""The task that every contestant trains: the same data, model, optimizer, schedule and loss."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.shapes import TUPLES, Shape

FEATURES, HIDDEN, CLASSES, BATCH_SIZE = 64, 64, 10, 32
MAX_NORM = 1.0
IGNORED = -100  # the label of what does not count, as `cross_entropy` knows it
LOG_EVERY = 100
SCORES = 100  # the classes of what is evaluated
TOKENS = 16  # what the transformer makes of a sample's features


class Block(nn.Module):
    """A layer of the deeper model, as sharding treats one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.inner = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.outer = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, inputs: Tensor) -> Tensor:
        """Add to the inputs."""
        return inputs + self.outer(torch.relu(self.inner(self.norm(inputs))))


class Transformer(nn.Module):
    """A classifier of short sequences, of some milliseconds a step."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.inlet = nn.Linear(FEATURES // TOKENS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the scores of the classes."""
        return self.head(self.encoder(self.inlet(inputs.unflatten(1, (TOKENS, -1)))).mean(1))


class Parts(NamedTuple):
    """What a training loop is made of."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    loader: DataLoader[Any]


@dataclass(frozen=True, kw_only=True)
class Task:
    """So many batches a process, and how they are used.

    The model is small on purpose: arithmetic would hide what an engine adds to it.
    """

    steps: int
    accumulation: int = 1
    shuffle: bool = False
    some_ignored: bool = False  # a quarter of the labels does not count
    blocks: int = 0  # layers between the first and the last; each is sharded over the processes (FSDP2)
    layers: int = 0  # those of a transformer, in the place of the perceptron
    width: int = 64  # of the transformer
    bar: bool = False  # a progress bar is shown
    folder: bool = False  # the run has a folder: history, checkpoints and a report
    shape: Shape = TUPLES
    world_size: int = 1
    device: str = "cpu"  # or "cuda"

    def parts(self) -> Parts:
        """Return a fresh set, always with the same weights."""
        model = self.model()
        return Parts(model, *optimization(model), self.loader())

    def model(self) -> nn.Module:
        """Return the model."""
        torch.manual_seed(0)
        if self.layers:
            return Transformer(self.layers, self.width)
        middle = [Block() for _ in range(self.blocks)] or [nn.ReLU()]
        return self.shape.model(nn.Sequential(nn.Linear(FEATURES, HIDDEN), *middle, nn.Linear(HIDDEN, CLASSES)))

    def loader(self) -> DataLoader[Any]:
        """Return a loader that is not shared out yet: it holds the batches of all processes."""
        rows = self.steps * self.world_size * BATCH_SIZE
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(rows, FEATURES, generator=generator)
        labels = torch.randint(CLASSES, (rows,), generator=generator)
        if self.some_ignored:
            labels[torch.rand(rows, generator=generator) < 0.25] = IGNORED
        return self._loader(self.shape.dataset(inputs, labels), shuffle=self.shuffle)

    def scores(self, steps: int | None = None) -> DataLoader[tuple[Tensor, ...]]:
        """Return a loader, not shared out yet, of what is evaluated: what a model said, and the labels."""
        rows = (steps or self.steps) * self.world_size * BATCH_SIZE
        generator = torch.Generator().manual_seed(1)
        scores = torch.randn(rows, SCORES, generator=generator)
        labels = torch.randint(SCORES, (rows,), generator=generator)
        return self._loader(TensorDataset(scores, labels))

    def _loader(self, dataset: Dataset[Any], shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(dataset, BATCH_SIZE, shuffle=shuffle, pin_memory=self.device != "cpu")


def optimization(model: nn.Module) -> tuple[Optimizer, LRScheduler]:
    """Return optimizer and schedule."""
    optimizer = AdamW(model.parameters(), lr=1e-3, foreach=True)
    return optimizer, LambdaLR(optimizer, rate)


def rate(step: int) -> float:
    """Return the factor of the learning rate."""
    return 1 - step / 1_000_000


def weights_norm(model: nn.Module) -> float:
    """Return one number that tells whether two trainings came to the same weights."""
    return float(torch.stack([_whole(parameter.detach()).double().norm() for parameter in model.parameters()]).norm())


def labels_sum(batches: list[Tensor]) -> float:
    """Return one number that tells whether two loaders gave the same samples, in whatever order."""
    return float(torch.cat(batches).sum())


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
