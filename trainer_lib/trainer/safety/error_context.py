"""Notes on an error that a step raises: the shapes and types of the batch and the model."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer_lib.foundation.tensors.pytree import leaves, named_leaves
from trainer_lib.memory.executable_batch_size import is_out_of_memory

_SHOWN = 8
_NARROW = {"bfloat16", "float16"}
_AUTO = (
    'With per_device_train_batch_size="auto" batches that do not fit into memory are computed in parts, and the '
    "updates stay the same."
)


def add_note(error: Exception, what: str, batch: Any, models: Sequence[nn.Module], memory: str = _AUTO) -> None:
    """Add to an error what was computed when it was raised; its type and text stay as they are.

    Args:
        error: The error.
        what: What failed, such as "step 3".
        batch: The batch.
        models: The models.
        memory: What helps where memory ran out.
    """
    if getattr(error, "__notes__", None):  # code nearer to the error has described it
        return
    if is_out_of_memory(error):
        error.add_note(f"In {what}, with the batch {described(batch)}. {memory}")
        return
    types = {str(parameter.dtype).removeprefix("torch.") for model in models for parameter in model.parameters()}
    note = f"In {what}, with the batch {described(batch)}; the model is of {' and '.join(sorted(types))}."
    if "float64" not in types and any(getattr(leaf, "dtype", None) is torch.float64 for leaf in leaves(batch)):
        note += " Numbers of float64, as numpy has them, become float32 by .astype('float32') or .float()."
    if not types & {"uint8"} and any(getattr(leaf, "dtype", None) is torch.uint8 for leaf in leaves(batch)):
        note += " Pixels of uint8 become float32 by .float() / 255."
    if isinstance(error, TypeError) and "Trainer.compute_loss()" in str(error):
        note += (
            " super().compute_loss takes (model, batch) alone, and returns a LossResult: give return result.mean, "
            "result.outputs."
        )
    if isinstance(error, TypeError) and "Trainer.training_step()" in str(error):
        note += (
            " super().training_step takes (model, batch) alone; a loss function with a parameter num_items_in_batch is "
            "handed the count."
        )
    if _is_target_first(batch):
        note += " The last value of a batch is the target: return (inputs, targets) from the dataset."
    if types & _NARROW and any(getattr(leaf, "dtype", None) is torch.float32 for leaf in leaves(batch)):
        note += ' mixed_precision="bf16-true" casts the inputs, and the model, to bfloat16.'
    error.add_note(note)


def _is_target_first(batch: Any) -> bool:
    """Whether a batch looks like class labels and images, in this order."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        return False
    labels, images = batch
    if not isinstance(labels, Tensor) or not isinstance(images, Tensor):
        return False
    return labels.ndim == 1 and not labels.is_floating_point() and images.ndim > 2 and images.is_floating_point()


def described(batch: Any) -> str:
    """Return a batch in a line: the shapes and types of what is in it, and no value.

    Example:
        >>> described({"x": torch.zeros(2, 3), "name": ["a", "b"]})
        "['x']: (2, 3) float32, ['name'][0]: str, ['name'][1]: str"
    """
    if isinstance(batch, (Tensor, np.ndarray)):
        return kind(batch)
    parts = [f"{name}: {kind(leaf)}" for name, leaf in named_leaves(batch)]
    more = ["…"] if len(parts) > _SHOWN else []
    return ", ".join(parts[:_SHOWN] + more) if parts else f"a {type(batch).__name__}"


def kind(value: Any) -> str:
    """Return the shape and type of a tensor or an array, or the type of anything else."""
    if not isinstance(value, (Tensor, np.ndarray)):
        return type(value).__name__
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
