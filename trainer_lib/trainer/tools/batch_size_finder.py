"""Finding the largest batch size that fits into memory: some updates for each size, doubling until one fails."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from trainer_lib.events import Callback, Run
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.foundation.lengths import length_of
from trainer_lib.foundation.tensors.kept_state import attributes_kept
from trainer_lib.memory.release_memory import clear_device_cache
from trainer_lib.options.base import check_count
from trainer_lib.trainer import defaults
from trainer_lib.trainer.arguments.value_checks import AUTO
from trainer_lib.trainer.data.datasets import as_dataset
from trainer_lib.trainer.fit.fit_run import fit
from trainer_lib.trainer.overridable import is_overridden
from trainer_lib.trainer.tools.sandbox import check_can_sandbox, short_sandbox
from trainer_lib.trainer.trainer_interface import TrainerInterface

_TOOL = "find_batch_size"


def find_batch_size(trainer: TrainerInterface, largest: int, updates: int) -> int:
    """Find the batch size; see `Trainer.find_batch_size`."""
    check_count("largest", largest)
    check_count(
        "updates", updates, at_least=2
    )  # the first update allocates the optimizer's state, so the second needs the most memory
    check_can_sandbox(trainer, _TOOL)
    _check(trainer)
    ranks = trainer.accelerator.data_group.size
    samples = length_of(as_dataset(trainer.train_dataset, "train_dataset"))
    most = largest if samples is None else max(1, min(largest, samples // ranks))
    size = min(most, trainer.args.train_batch_size_for(ranks))
    fits = _fitting(trainer, size, updates)
    while fits == size and 2 * size <= most:
        size *= 2
        fits = size if _fitting(trainer, size, updates) == size else fits
    return fits


def _fitting(trainer: TrainerInterface, size: int, updates: int) -> int:
    """Train with batches of a size, and return how many of their samples fit at once on all ranks."""
    args, watch = trainer.args, _Watch(size)
    accumulates = args.global_batch_size is not None or (args.gradient_accumulation_steps or 1) > 1
    changes: dict[str, Any] = {
        # A rank whose batch does not fit continues with parts of it, as the others wait for it.
        "per_device_train_batch_size": AUTO,
        "global_batch_size": None,
        "gradient_accumulation_steps": 2
        if accumulates
        else 1,  # so that the second micro-batch computes while gradients are in memory
        "max_steps": updates,
    }
    with short_sandbox(trainer, _TOOL, [watch], takes_part=lambda callback: not callback.saves_memory, **changes):
        vars(trainer)["train_dataloader"] = _loader(trainer, size)
        fit(trainer)
    # Free the memory of this size before the next. A CPU has enough, and collects cycles by itself.
    clear_device_cache(garbage_collection=trainer.accelerator.device.type != "cpu")
    return min(trainer.accelerator.group.all_gather_objects(watch.fits))


class _Watch(Callback):
    """Records how many samples fit at once on this rank."""

    def __init__(self, size: int) -> None:
        self.fits = size

    def on_batch_size_reduced(self, run: Run, batch_size: int) -> None:
        del run
        self.fits = batch_size


def _loader(trainer: TrainerInterface, size: int) -> Callable[[], DataLoader[Any]]:
    """Return a `train_dataloader` with a given batch size instead of the arguments' one."""

    def train_dataloader() -> DataLoader[Any]:
        with attributes_kept([trainer], ["args"]):
            trainer.args = replace(trainer.args, per_device_train_batch_size=size)
            return defaults.train_loader(trainer, trainer.train_dataset)

    return train_dataloader


def _check(trainer: TrainerInterface) -> None:
    if isinstance(trainer.train_dataset, DataLoader) or is_overridden(type(trainer), "train_dataloader"):
        raise ConfigurationError(
            f"{_TOOL}() makes batches of several sizes, but a DataLoader has its batch size already. Give the dataset: "
            "Trainer(train_dataset=…)."
        )
    if trainer.parts.loss.has_own_step:
        raise ConfigurationError(
            f"{_TOOL}() splits batches that do not fit, so training_step would run once for each part. Override "
            "compute_loss instead."
        )
    if callback := next((callback for callback in trainer.events if not callback.supports_batch_splitting), None):
        raise ConfigurationError(
            f"{_TOOL}() splits batches that do not fit into memory, and {type(callback).__name__} does not support "
            "split batches. Search without it: the memory needed is about the same."
        )
    if trainer.accelerator.strategy.is_in_lockstep:
        raise UnsupportedError(
            f"{_TOOL}() splits a batch that does not fit on a rank, but all ranks of a sharded model compute together. "
            "Try batch sizes in separate runs."
        )
