"""This file is replication (DDP): each process has the whole model, and gradients are averaged over all."""

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer_lib.options.distributed import DistributedDataParallelKwargs
from trainer_lib.process_group import ProcessGroup
from trainer_lib.strategies.base import SingleProcess

# Sums in these types are good enough for counts; others would round them.
_EXACT = (torch.float32, torch.float64)


class Replicate(SingleProcess):
    """`torch.nn.parallel.DistributedDataParallel`, and a small cargo that travels with its first bucket."""

    def __init__(
        self, group: ProcessGroup, device: torch.device, options: DistributedDataParallelKwargs | None = None
    ) -> None:
        super().__init__(group, device, options)
        self._arguments: dict[str, Any] = {} if options is None else options.to_kwargs()
        self._cargo: Tensor | None = None
        self._without_hook: list[DistributedDataParallel] = []

    def distribute(self, model: nn.Module) -> nn.Module:
        """Wrap the model in DDP; one without anything to train needs none."""
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        device_ids = None if self.device.type == "cpu" else [self.device.index]
        wrapped = DistributedDataParallel(model, device_ids=device_ids, **self._arguments)
        self._without_hook.append(wrapped)
        return wrapped

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model inside DDP."""
        return model.module if isinstance(model, DistributedDataParallel) else model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return DDP's `no_sync`."""
        return model.no_sync() if isinstance(model, DistributedDataParallel) else super().no_sync(model)

    def force_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context in which the next `backward` reduces, whatever the forward was told."""
        return _reducing(model) if isinstance(model, DistributedDataParallel) else super().force_sync(model)

    def carry(self, values: Sequence[float | Tensor]) -> None:
        """Send `values` along with the first bucket of the next `backward`."""
        # Only now: a loop that never weighs its losses keeps DDP's own reduction, which needs no Python.
        for model in self._without_hook:
            model.register_comm_hook(self, _average_with_cargo)
        self._without_hook.clear()
        self._cargo = torch.stack([_on_device(value, self.device) for value in values]) if values else None

    def carried(self) -> Sequence[float | Tensor]:
        """Return the averages; by a message of their own if no bucket took them along."""
        if self._cargo is not None:
            self._carried, self._cargo = list(self.group.all_reduce(self._cargo) / self.group.size), None
        return super().carried()

    def release(self) -> None:
        """Let go of the models."""
        self._without_hook.clear()


def _average_with_cargo(strategy: Replicate, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    gradients, cargo = bucket.buffer(), strategy._cargo
    if cargo is None or gradients.is_sparse or gradients.dtype not in _EXACT:
        return _summed(gradients).then(lambda future: future.value()[0].div_(strategy.group.size))
    strategy._cargo = None
    # The first bucket is the small one, so the copy costs less than a second message.
    freight = torch.cat([gradients, cargo.to(gradients)])

    def unload(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        average = future.value()[0].div_(strategy.group.size)
        strategy._carried = list(average[gradients.numel() :])
        return average[: gradients.numel()]

    return _summed(freight).then(unload)


def _on_device(value: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(device, torch.float32, non_blocking=True)
    return torch.full((), value, dtype=torch.float32, device=device)  # written there: nothing waits for a copy


def _summed(tensor: Tensor) -> torch.futures.Future[list[Tensor]]:
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    return work.get_future()


@contextmanager
def _reducing(model: DistributedDataParallel) -> Generator[None]:
    before = model.require_backward_grad_sync, model.require_forward_param_sync
    model.require_backward_grad_sync = model.require_forward_param_sync = True
    # The forward ran without preparing the reducer; an empty list says that all parameters will be used.
    model.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        model.require_backward_grad_sync, model.require_forward_param_sync = before
