"""`CheckProbe`: ends a run after two updates, and measures its batches, times and memory."""

import hashlib
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer_lib.accelerator import Accelerator
from trainer_lib.events import Modifier, Run
from trainer_lib.foundation.device_types import synchronize
from trainer_lib.foundation.lengths import length_of
from trainer_lib.foundation.tensors.pytree import leaves, tensors
from trainer_lib.foundation.tensors.tensor_operations import as_bytes
from trainer_lib.trainer.tools.learning_rate_curve import learning_rates

UPDATES = 2


class CheckProbe(Modifier):
    """Ends a run after two updates, and notes its batches, times and sizes."""

    order = 1000  # after the callbacks that change batches

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.has_begun: bool = False
        self.step: int = 0
        self.batches: dict[int, list[str]] = {}
        self.facts: dict[str, Any] = {}
        self.memory: dict[str, int] = {}
        self.step_seconds: float = 0.0
        self.save_seconds: float = 0.0
        self._mark = 0.0
        self._saved = _SavedTensors()

    def on_fit_begin(self, run: Run) -> None:
        """Note the run as it would be, and have it end after two updates."""
        self.has_begun = True
        self.facts = _facts(run)
        state = run.state
        state.max_steps = UPDATES if state.max_steps is None else min(state.max_steps, UPDATES)
        self._mark = time.perf_counter()

    def on_micro_batch_begin(self, run: Run) -> None:
        """Note a digest of a batch, and what the first one keeps for its backward."""
        self.batches.setdefault(run.state.step, []).append(_digest(run.batch))
        if "activations" not in self.memory and not run.args.compile:
            self._saved.enter(run)

    def on_micro_batch_end(self, run: Run) -> None:
        """Note the memory of activations."""
        if "activations" not in self.memory:
            self.close()
            self.memory["activations"] = self._saved.bytes

    def close(self) -> None:
        """Stop counting the memory of activations."""
        self._saved.exit()

    def on_optimizer_step_end(self, run: Run) -> None:
        """Note what weights, gradients and optimizers take."""
        parameters = [parameter for model in run.modules.values() for parameter in model.parameters()]
        states = [run.optimizers[name].state for name in run.optimizers]
        self.memory |= {
            "weights": sum(map(_bytes, parameters)),
            "gradients": sum(_bytes(each.grad) for each in parameters if each.grad is not None),
            "optimizer": sum(_bytes(tensor) for state in states for tensor in tensors([*state.values()])),
        }

    def on_step_end(self, run: Run) -> None:
        """Note the time of an update; the first one also warms up."""
        synchronize(self._accelerator.device)
        self.step, self.step_seconds = run.state.step, time.perf_counter() - self._mark

    def on_save_begin(self, run: Run, folder: Path) -> None:
        """Note when a save begins."""
        del run, folder
        self._mark = time.perf_counter()

    def on_save_end(self, run: Run, folder: Path) -> None:
        """Note the time of a save."""
        del run, folder
        self.save_seconds = time.perf_counter() - self._mark
        self._mark = time.perf_counter()


class _SavedTensors:
    """Counts the bytes that forwards keep for their backward, without the weights."""

    def __init__(self) -> None:
        self._hooks: Any = None
        self._seen: set[int] = set()
        self.bytes = 0

    def enter(self, run: Run) -> None:
        """Begin to count."""
        self._seen = {_address(parameter) for model in run.modules.values() for parameter in model.parameters()}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._count, lambda tensor: tensor)
        self._hooks.__enter__()

    def exit(self) -> None:
        """Count no more."""
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None

    def _count(self, tensor: Tensor) -> Tensor:
        address = _address(tensor)
        if address not in self._seen:
            self._seen.add(address)
            self.bytes += _local(tensor).untyped_storage().nbytes()
        return tensor


def _facts(run: Run) -> dict[str, Any]:
    """Return what is known of a run when it begins, in the words of the report."""
    accelerator, state = run.accelerator, run.state
    loader = accelerator.prepared.dataloaders[-1]
    of_round, ranks = loader.total_batch_size, accelerator.num_processes
    accumulated = accelerator.gradient_accumulation_steps
    count = sum(parameter.numel() for model in run.modules.values() for parameter in model.parameters())
    schedule_length = run.args.schedule_steps or state.max_steps
    return {
        "model": f"{', '.join(type(model).__name__ for model in run.modules.values())}, {count:,} parameters",
        "devices": f"{ranks} {'process' if ranks == 1 else 'processes'} on {accelerator.device.type}",
        "batch_size": None if of_round is None else of_round * accumulated,
        "per_device_batch_size": None if of_round is None else of_round // accelerator.data_group.size,
        "accumulation": accumulated,
        "processes": ranks,
        "replicas": accelerator.data_group.size,
        "samples_per_epoch": length_of(loader.dataset),
        "steps_per_epoch": state.steps_per_epoch,
        "steps": state.max_steps,
        "epochs": state.max_epochs,
        "learning_rates": {
            name: learning_rates(optimizer, run.schedulers.get(name), state.max_steps or schedule_length)
            for name, optimizer in run.optimizers.items()
        },
    }


def _digest(batch: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            values = leaf.detach().cpu()
            digest.update(f"{values.dtype}{tuple(values.shape)}".encode())
            digest.update(as_bytes(values).numpy().tobytes())
        else:
            digest.update(leaf.tobytes() if isinstance(leaf, np.ndarray) else repr(leaf).encode())
    return digest.hexdigest()


def _local(tensor: Any) -> Tensor:
    """Return the part of a tensor that is on this rank."""
    return getattr(tensor, "_local_tensor", tensor)


def _address(tensor: Any) -> int:
    return _local(tensor).untyped_storage().data_ptr()


def _bytes(tensor: Any) -> int:
    tensor = _local(tensor)
    return tensor.numel() * tensor.element_size()
