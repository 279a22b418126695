"""Whether a model compares each position with the label of the next one, found by asking it about its first batch.

Class names do not tell: some `*ForCausalLM` models shift their labels, others take them as they are.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.checkpointing.format.rng_state import preserved_generators
from trainer_lib.foundation.batch_fields import IGNORE_INDEX, targets_of, with_targets
from trainer_lib.memory.executable_batch_size import is_out_of_memory
from trainer_lib.trainer.evaluation.eval_mode import evaluating
from trainer_lib.trainer.losses.model_io import call_model, loss_of
from trainer_lib.trainer.safety.module_buffers import buffers_kept


class LabelShift:
    """Whether a model shifts its labels.

    A model of transformers is asked as soon as there are token labels: its loss is computed from the first label of
    each row alone. A model that shifts has nothing to compare then, and its loss is NaN or 0. Of other models, and
    where a loss function compares, the name of the class decides.

    Args:
        bare: The model.
        has_loss_fn: Whether a loss function computes the loss, and not the model.
        label_names: Which names of a batch are targets.

    Attributes:
        answer: Whether it shifts, as far as is known; `is_known` says whether the model was asked.
    """

    def __init__(self, bare: nn.Module, has_loss_fn: bool, label_names: Sequence[str] | None) -> None:
        self._bare, self._label_names = bare, label_names
        self.answer = is_shifted_by_name(bare)
        self.is_known = has_loss_fn or not is_from_transformers(bare)

    def __call__(self, batch: Any) -> bool:
        """Return whether the labels of a batch are shifted; the first such batch has the model asked."""
        if not self.is_known and has_token_labels(targets_of(batch, self._label_names)):
            self.is_known = True
            answer = shifts_labels(self._bare, batch, self._label_names)
            self.answer = self.answer if answer is None else answer
        return self.answer


def has_token_labels(labels: Any) -> bool:
    """Whether labels are class indices of positions, in rows: what a model may shift."""
    return isinstance(labels, Tensor) and labels.ndim == 2 and labels.dtype in (torch.int32, torch.int64)


def shifts_labels(bare: nn.Module, batch: Any, label_names: Sequence[str] | None = None) -> bool | None:
    """Whether a model's loss compares each position with the label of the next.

    The model is evaluated once; its modes, its buffers and the random generators stay as they are.

    Args:
        bare: The model, which ignores the label -100.
        batch: A batch with token labels.
        label_names: Which names of a batch are targets.

    Returns:
        `None` where the model raises or returns no loss.

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
        with asking(bare):
            loss: Any = loss_of(call_model(bare, with_targets(batch, first, label_names)))
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
        if is_out_of_memory(error):
            raise
        return None
    if loss is None:
        return None
    return not bool(torch.isfinite(loss)) or not float(loss)


def is_shifted_by_name(bare: nn.Module) -> bool:
    """Whether a class is called like those that shift their labels."""
    inner = _inner(bare)
    name = type(inner).__name__
    return getattr(inner, "loss_type", None) == "ForCausalLM" or name.endswith(("ForCausalLM", "LMHeadModel"))


@contextmanager
def asking(bare: nn.Module) -> Generator[None]:
    """Return the context in which a model computes a loss that leaves no trace."""
    # What would be compiled for these shapes is not used again.
    eager = torch.compiler.set_stance("force_eager")
    with preserved_generators(device_of(bare)), torch.no_grad(), buffers_kept([bare]), evaluating([bare]), eager:
        yield


def device_of(bare: nn.Module) -> torch.device:
    """Return the device of a model's parameters."""
    return next((parameter.device for parameter in bare.parameters()), torch.device("cpu"))


def _inner(bare: nn.Module) -> Any:
    return bare.get_base_model() if hasattr(bare, "get_base_model") else bare  # type: ignore[operator]  # PEFT's


def is_from_transformers(bare: nn.Module) -> bool:
    """Whether a model is one of transformers, which all ignore the label -100."""
    return any(base.__name__ == "PreTrainedModel" for base in type(_inner(bare)).__mro__)
