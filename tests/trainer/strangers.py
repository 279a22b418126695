"""A callback, a metric and a sampler as somebody writes them who has read the pages in docs/, and nothing else."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.utils.data import Sampler

from trainer_lib import Callback, Run


class EvaluateWhenHalved(Callback):
    """Asks for an evaluation, and tells the history, whenever the loss is half of what it was at the last one."""

    def __init__(self) -> None:
        self.loss: float | None = None

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        if self.loss is None:
            self.loss = values["loss"]
        elif values["loss"] <= self.loss / 2:
            run.record_event("halved", before=self.loss, now=values["loss"])
            run.control.evaluate = True
            self.loss = values["loss"]

    def state_dict(self) -> dict[str, float | None]:
        return {"loss": self.loss}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        self.loss = state["loss"]


class BalancedAccuracy:
    """The mean over classes of the share that is found, which does not go by how many there are of each."""

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.reset()

    def reset(self) -> None:
        self.found, self.there = torch.zeros(self.num_classes), torch.zeros(self.num_classes)

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        hits = labels[predictions.argmax(dim=1) == labels]
        self.found += torch.bincount(hits, minlength=self.num_classes).cpu()
        self.there += torch.bincount(labels, minlength=self.num_classes).cpu()

    def merge(self, others: "list[BalancedAccuracy]") -> None:
        for other in others:
            self.found, self.there = self.found + other.found, self.there + other.there

    def compute(self) -> dict[str, float]:
        shares = self.found / self.there
        return {"balanced": shares.mean().item(), "worst": shares.min().item()}


class EasyFirst(Sampler[int]):
    """Each pass has the easy half of the samples first, and then the hard one, each in an order of its own."""

    def __init__(self, difficulties: Tensor) -> None:
        self.order = difficulties.argsort()

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        for half in self.order.chunk(2):
            yield from half[torch.randperm(len(half))].tolist()
