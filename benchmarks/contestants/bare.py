"""The hand-written PyTorch loop: the baseline of all comparisons."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.contestants.base import Contestant
from benchmarks.meters import Meter
from benchmarks.task import IGNORED, MAX_NORM, Block, Parts, Task, labels_sum, optimization, weights_norm


class Bare(Contestant):
    """PyTorch and nothing else; on several processes `DistributedDataParallel`, or `fully_shard`."""

    name = "by hand"

    def update(self, task: Task, meter: Meter) -> float:
        """Train."""
        if task.accumulation > 1:
            return self._accumulate(task, meter)
        model, optimizer, scheduler, loader = parts_by_hand(task)
        loss_of, total = task.shape.loss, torch.zeros((), device=task.device)
        with meter:
            for batch in loader:
                loss = loss_of(model, batch)
                loss.backward()
                clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                total += loss.detach()
        return weights_norm(model)

    def _accumulate(self, task: Task, meter: Meter) -> float:
        model, optimizer, scheduler, loader = parts_by_hand(task)
        steps, last = task.accumulation, task.steps - 1
        no_sync = model.no_sync if isinstance(model, DistributedDataParallel) else nullcontext
        loss_of, total = task.shape.loss, torch.zeros((), device=task.device)
        with meter:
            for index, batch in enumerate(loader):
                updates = (index + 1) % steps == 0 or index == last
                with nullcontext() if updates else no_sync():
                    loss = loss_of(model, batch)
                    (loss / steps).backward()
                if updates:
                    clip_grad_norm_(model.parameters(), MAX_NORM)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                total += loss.detach()
        return weights_norm(model)

    def fit(self, task: Task, meter: Meter) -> float:
        """Train."""
        return self.update(task, meter)

    def fit_by_default(self, task: Task, meter: Meter) -> float:
        """Train."""
        return self.update(task, meter)

    def update_by_weight(self, task: Task, meter: Meter) -> float:
        """Train on sums; how many labels count is a message of its own."""
        model, optimizer, scheduler, loader = parts_by_hand(task)
        total = torch.zeros((), device=task.device)
        with meter:
            for inputs, labels in loader:
                weight = (labels != IGNORED).sum()
                if task.world_size > 1:
                    dist.all_reduce(weight)
                loss = cross_entropy(model(inputs), labels, ignore_index=IGNORED, reduction="sum")
                (loss * (task.world_size / weight)).backward()
                clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                total += loss.detach()
        return weights_norm(model)

    def evaluate(self, task: Task, meter: Meter) -> float:
        """Sum up here, and then over the processes."""
        loader = loader_by_hand(task, task.scores())
        loss, hits, count = *torch.zeros(2, device=task.device), 0
        with meter, torch.no_grad():
            for scores, labels in loader:
                loss += cross_entropy(scores, labels, reduction="sum")
                hits += (scores.argmax(1) == labels).sum()
                count += len(labels)
            sums = torch.stack([loss, hits, torch.tensor(float(count), device=task.device)])
            if task.world_size > 1:
                dist.all_reduce(sums)
            mean_loss, accuracy = (sums[:2] / sums[2]).tolist()
        return mean_loss + accuracy

    def read(self, task: Task, meter: Meter) -> float:
        """Go through the data."""
        loader = loader_by_hand(task, task.loader())
        total = labels_sum([labels for _, labels in loader])
        with meter:
            for _ in loader:
                pass
        return total


class BareAgain(Bare):
    """The same once more: how far it is from itself is how far the others have to be to mean anything."""

    name = "by hand, again"


def parts_by_hand(task: Task) -> Parts:
    """Return the parts of a task as one makes them for so many processes."""
    parts = task.parts()
    loader = loader_by_hand(task, parts.loader)
    if task.world_size == 1:
        return parts._replace(model=parts.model.to(task.device), loader=loader)
    if task.blocks:
        return Parts(*_sharded(task), loader)
    return parts._replace(model=DistributedDataParallel(parts.model), loader=loader)


def loader_by_hand(task: Task, loader: DataLoader[Any]) -> Any:
    """Return what gives this process's batches, on its device."""
    loader = shared_by_hand(task, loader)
    return loader if task.device == "cpu" else _OnDevice(loader, task.device)


def shared_by_hand(task: Task, loader: DataLoader[tuple[Tensor, ...]]) -> DataLoader[tuple[Tensor, ...]]:
    """Return a loader of this process's batches."""
    if task.world_size == 1:
        return loader
    sampler: DistributedSampler[Tensor] = DistributedSampler(loader.dataset, shuffle=False)
    return DataLoader(loader.dataset, loader.batch_size, sampler=sampler)


class _OnDevice:
    """A loader whose batches are copied to a device, without waiting for it."""

    def __init__(self, loader: DataLoader[Any], device: str) -> None:
        self.loader, self.device = loader, device

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            if isinstance(batch, dict):
                yield {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}
            else:
                yield [value.to(self.device, non_blocking=True) for value in batch]


def _sharded(task: Task) -> tuple[nn.Module, Optimizer, LRScheduler]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (task.world_size,))
    model = task.model()
    for block in model.children():
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, *optimization(model)
