"""Whether a model shifts its labels (compares each position with the next label), measured on the first batch.

Class names are not enough: some `*ForCausalLM` models shift their labels, others take labels that are shifted already.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.foundation.tensors.batch_fields import IGNORE_INDEX, targets_of, with_targets
from trainer_lib.memory.executable_batch_size import is_out_of_memory
from trainer_lib.modules.module_buffers import buffers_kept
from trainer_lib.modules.module_kinds import is_transformers_model
from trainer_lib.modules.unwrapping import without_adapter
from trainer_lib.trainer.evaluation.eval_mode import evaluating, generators_kept
from trainer_lib.trainer.losses.model_io import call_model, loss_of


class LabelShift:
    """Whether a model shifts its labels.

    The first batch with token labels decides for a model of transformers: its loss is computed with only the first
    label of each row. A model that shifts has no target left then, and its loss is NaN or 0. For other models, and with
    a loss function, the class name decides.

    Args:
        bare: The model.
        has_loss_fn: Whether a loss function computes the loss instead of the model.
        label_names: The names of a batch that are targets.

    Attributes:
        answer: Whether the model shifts, by the current knowledge.
        is_known: Whether the answer is final.
    """

    def __init__(self, bare: nn.Module, has_loss_fn: bool, label_names: Sequence[str] | None) -> None:
        self._bare, self._label_names = bare, label_names
        self.answer = is_shifted_by_name(bare)
        self.is_known = has_loss_fn or not is_from_transformers(bare)

    def __call__(self, batch: Any) -> bool:
        """Return whether the labels of a batch are shifted; the first batch with token labels measures it."""
        if not self.is_known and has_token_labels(targets_of(batch, self._label_names)):
            self.is_known: bool = True
            answer = shifts_labels(self._bare, batch, self._label_names)
            self.answer: bool = self.answer if answer is None else answer
        return self.answer


def has_token_labels(labels: Any) -> bool:
    """Whether labels are rows of class indices, one per position, which a model may shift."""
    return isinstance(labels, Tensor) and labels.ndim == 2 and labels.dtype in (torch.int32, torch.int64)


def shifts_labels(bare: nn.Module, batch: Any, label_names: Sequence[str] | None = None) -> bool | None:
    """Whether a model's loss compares each position with the next label.

    Evaluates the model once; its modes, its buffers and the random generators do not change.

    Args:
        bare: A model that ignores the label -100.
        batch: A batch with token labels.
        label_names: The names of a batch that are targets.

    Returns:
        `None` if the model raises an error or returns no loss.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=8))
        >>> tokens = torch.arange(8).reshape(2, 4)
        >>> shifts_labels(model, {"input_ids": tokens, "labels": tokens})
        True
    """
    labels: Tensor = targets_of(batch, label_names)
    valid = labels[labels != IGNORE_INDEX]
    first = torch.full_like(labels, IGNORE_INDEX)
    first[:, :1] = valid[0] if len(valid) else 0
    try:
        with probing(bare):
            loss: Any = loss_of(call_model(bare, with_targets(batch, first, label_names)))
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
        if is_out_of_memory(error):
            raise
        return None
    if loss is None:
        return None
    return not bool(torch.isfinite(loss)) or not float(loss)


def is_shifted_by_name(bare: nn.Module) -> bool:
    """Whether the class name is one of models that shift their labels."""
    inner = without_adapter(bare)
    name = type(inner).__name__
    return getattr(inner, "loss_type", None) == "ForCausalLM" or name.endswith(("ForCausalLM", "LMHeadModel"))


@contextmanager
def probing(bare: nn.Module) -> Generator[None]:
    """Return a context in which a model computes a loss without side effects."""
    # Compiled code for these shapes would not be used again.
    eager = torch.compiler.set_stance("force_eager")
    drawn = generators_kept(device_of(bare), {"model": bare})
    with drawn, torch.no_grad(), buffers_kept([bare]), evaluating([bare]), eager:
        yield


def device_of(bare: nn.Module) -> torch.device:
    """Return the device of a model's parameters."""
    return next((parameter.device for parameter in bare.parameters()), torch.device("cpu"))


def is_from_transformers(bare: nn.Module) -> bool:
    """Whether a model is from transformers, where all models ignore the label -100."""
    return is_transformers_model(without_adapter(bare))
