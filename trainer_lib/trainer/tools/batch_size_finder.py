"""This file is the search for a batch size: some updates with batches that double, until one does not fit."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from trainer_lib.events import Callback, Run
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.memory.release_memory import clear_device_cache
from trainer_lib.options.base import check_count
from trainer_lib.trainer import defaults
from trainer_lib.trainer.arguments.value_types import AUTO
from trainer_lib.trainer.data.datasets import as_dataset, length_of
from trainer_lib.trainer.tools.sandbox import check_can_sandbox, short_sandbox

if TYPE_CHECKING:
    from trainer_lib.trainer.trainer import Trainer

_TOOL = "find_batch_size"


def find_batch_size(trainer: "Trainer", largest: int, updates: int) -> int:
    """Do what `Trainer.find_batch_size` says."""
    check_count("largest", largest)
    check_count("updates", updates, at_least=2)  # the first one makes the optimizer's state, which the second one has
    check_can_sandbox(trainer, _TOOL)
    _check(trainer)
    world = trainer.accelerator.num_processes
    samples = length_of(as_dataset(trainer.train_dataset, "train_dataset"))
    most = largest if samples is None else max(1, min(largest, samples // world))
    size = min(most, trainer.args.train_batch_size_for(world))
    fits = _fitting(trainer, size, updates)
    while fits == size and 2 * size <= most:
        size *= 2
        fits = size if _fitting(trainer, size, updates) == size else fits
    return fits


def _fitting(trainer: "Trainer", size: int, updates: int) -> int:
    """Train with batches of a size, and return how many samples of them fit at once, on all processes."""
    from trainer_lib.trainer.trainer import Trainer

    args, watch = trainer.args, _Watch(size)
    accumulates = args.global_batch_size is not None or (args.gradient_accumulation_steps or 1) > 1
    changes: dict[str, Any] = {
        # A process whose batch does not fit goes on with parts of it: the others wait for it.
        "per_device_train_batch_size": AUTO,
        "global_batch_size": None,
        "gradient_accumulation_steps": 2 if accumulates else 1,  # gradients are there while the second one computes
        "max_steps": updates,
    }
    with short_sandbox(trainer, _TOOL, [watch], takes_part=lambda callback: not callback.saves_memory, **changes):
        vars(trainer)["train_dataloader"] = _loader(trainer, size)
        Trainer.fit(trainer)
    # What this size took is to be free for the next; on a CPU there is plenty, and cycles go by themselves.
    clear_device_cache(garbage_collection=trainer.accelerator.device.type != "cpu")
    return min(trainer.accelerator.group.all_gather_objects(watch.fits))


class _Watch(Callback):
    """Keeps how many samples fit at once on this process."""

    def __init__(self, size: int) -> None:
        self.fits = size

    def on_batch_size_reduced(self, run: Run, batch_size: int) -> None:
        del run
        self.fits = batch_size


def _loader(trainer: "Trainer", size: int) -> Callable[[], DataLoader[Any]]:
    """Return what makes the loader of batches of a size, whatever the arguments say of it."""

    def train_dataloader() -> DataLoader[Any]:
        args = trainer.args
        trainer.args = replace(args, per_device_train_batch_size=size)
        try:
            return defaults.train_loader(trainer, trainer.train_dataset)
        finally:
            trainer.args = args

    return train_dataloader


def _check(trainer: "Trainer") -> None:
    from trainer_lib.trainer.trainer import Trainer

    if isinstance(trainer.train_dataset, DataLoader) or type(trainer).train_dataloader is not Trainer.train_dataloader:
        raise ConfigurationError(
            f"{_TOOL}() makes batches of several sizes, and those of a DataLoader are made already. Give the dataset: "
            "Trainer(train_dataset=…)."
        )
    if trainer.has_own_step:
        raise ConfigurationError(
            f"{_TOOL}() computes what does not fit in parts, and what your training_step does besides would be done "
            "for each. Override compute_loss instead."
        )
    if callback := next((callback for callback in trainer.events if not callback.supports_batch_splitting), None):
        raise ConfigurationError(
            f"{_TOOL}() splits batches that do not fit into memory, and {type(callback).__name__} does not support "
            "split batches. Search without it: the memory needed is about the same."
        )
    if trainer.accelerator.strategy.needs_lockstep and trainer.accelerator.num_processes > 1:
        raise UnsupportedError(
            f"{_TOOL}() lets a process whose batch does not fit compute it in parts, and the processes of a sharded "
            "model compute all together. Try sizes by hand, in a run each."
        )
