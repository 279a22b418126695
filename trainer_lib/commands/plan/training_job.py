"""`TrainingJob`: what a plan is made for: a model without memory, one of its batches, and training arguments."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.foundation.tensors.batch_fields import as_mapping, label_names_in, replaced
from trainer_lib.modules.example_inputs import example_batch
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments
from trainer_lib.trainer.losses.label_shift import is_shifted_by_name
from trainer_lib.trainer.losses.model_io import call_model, loss_of, predictions_of
from trainer_lib.trainer.losses.objectives import without_cache

MakeOptimizer = Callable[[Sequence[dict[str, Any]]], Optimizer]


@frozen_dataclass
class TrainingJob:
    """A training whose ranks are simulated.

    Args:
        model: The model; its weights may be shapes without memory. It is never changed.
        batch: A micro-batch of one replica.
        args: The training arguments: precision, optimizer, accumulation, memory levers.
        loss: Returns the loss of a model, and a batch.
        make_optimizer: Makes the optimizer from parameter groups; `None`: the arguments name it.
        shifts_labels: Whether the model compares each position with the next label.
    """

    model: nn.Module
    batch: Any
    args: TrainingArguments
    loss: Callable[[Any, Any], Any]
    make_optimizer: MakeOptimizer | None = None
    shifts_labels: bool = False

    @property
    def micro_batches(self) -> int:
        """The micro-batches of an optimizer step."""
        return self.args.gradient_accumulation_steps or 1

    def with_arguments(self, **changes: Any) -> "TrainingJob":
        """Return the job with other training arguments."""
        optimizer = self.make_optimizer
        if "optimizer" in changes:
            changes, optimizer = {"optimizer_kwargs": {}, **changes}, None
        args = dataclasses.replace(self.args, **changes)
        return dataclasses.replace(self, args=args, make_optimizer=optimizer)


def job_of_model(model: nn.Module, batch_size: int, sequence_length: int, args: TrainingArguments) -> TrainingJob:
    """Return the job of a model of transformers or timm, on a batch of zeros."""
    batch: Any = example_batch(model, batch_size, sequence_length)
    batch = batch.get("pixel_values", batch)  # models of timm have another name for images
    return TrainingJob(model, batch, args, loss_or_outputs, shifts_labels=is_shifted_by_name(model))


def loss_or_outputs(model: Any, batch: Any) -> Any:
    """Return the loss that a model computes itself, or else its outputs."""
    outputs = call_model(model, batch, **without_cache(model))
    loss = loss_of(outputs)
    return predictions_of(outputs) if loss is None else loss


def describe_batch(batch: Any) -> str:
    """Return the size of a batch in words.

    Example:
        >>> import torch
        >>> describe_batch({"input_ids": torch.zeros(2, 512)})
        '2 × 512'
    """
    tensors = [value for value in _values(batch) if isinstance(value, Tensor) and value.ndim]
    return " × ".join(map(str, max(tensors, key=lambda tensor: tensor.ndim).shape)) if tensors else "unknown size"


def with_length(batch: Any, length: int) -> Any:
    """Return a batch whose sequences have another length.

    Only the shapes count: values are repeated, or cut off.
    """
    named = as_mapping(batch)
    values: dict[Any, Any] = dict(enumerate(_values(batch))) if named is None else dict(named)
    now = next((value.shape[1] for value in values.values() if isinstance(value, Tensor) and value.ndim > 1), 0)
    for key, value in values.items():
        if isinstance(value, Tensor) and value.ndim > 1 and now and value.shape[1] == now:
            copies = -(-length // now)
            values[key] = value.repeat(1, copies, *[1] * (value.ndim - 2))[:, :length]
    if named is not None:
        return dict(values) if isinstance(batch, Mapping) else replaced(batch, values)
    return type(batch)(values.values()) if isinstance(batch, (tuple, list)) else values[0]


def label_names(job: TrainingJob) -> Sequence[str] | None:
    """Return the names of a batch that are targets."""
    named = as_mapping(job.batch)
    return None if named is None else list(label_names_in(dict(named), job.args.label_names))


def _values(batch: Any) -> list[Any]:
    named = as_mapping(batch)
    if named is not None:
        return list(dict(named).values())
    return list(batch) if isinstance(batch, (tuple, list)) else [batch]
