"""This file is where the loss of a batch comes from: a loss function beside the model, or the model itself."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.trainer.batches import (
    as_mapping,
    call_model,
    check_names,
    label_names_in,
    loss_of,
    predictions_of,
    split,
)
from trainer_lib.trainer.losses import LossResult, Weight, sum_from_mean, summed

CountItems = Callable[[Any], Weight]


class Objective(Protocol):
    """How a model's loss on a batch is found."""

    def __call__(self, model: Any, batch: Any) -> LossResult:
        """Return the loss of a batch."""
        ...

    def describe(self) -> str:
        """Return, in a few words, what the loss is a mean over."""
        ...


class LossFunction:
    """A loss function of the model's outputs and the batch's targets.

    Args:
        loss_fn: The function. Where torch has it, it gets the predictions (`outputs.logits` of a model that returns
            several values); any other gets the outputs as they are.
        bare: The user's model.
        label_names: Which names of a batch are targets.
    """

    def __init__(self, loss_fn: Callable[[Any, Any], Any], bare: nn.Module, label_names: Sequence[str] | None) -> None:
        if not callable(loss_fn):
            raise ConfigurationError(
                f"loss_fn must be a function of outputs and targets, got a {type(loss_fn).__name__}. For example "
                "torch.nn.functional.cross_entropy."
            )
        self._loss_fn, self._bare, self._label_names = loss_fn, bare, label_names
        self._summed = summed(loss_fn)
        self._is_checked = False

    def __call__(self, model: Any, batch: Any) -> LossResult:
        """Return the loss of a batch."""
        if not self._is_checked:
            named = as_mapping(batch)
            check_names(self._bare, batch, label_names_in(named, self._label_names) if named is not None else ())
            self._is_checked = True
        inputs, targets = split(batch, self._label_names)
        outputs = call_model(model, inputs)
        if self._summed is not None:
            predictions = outputs if type(outputs) is Tensor else predictions_of(outputs)
            loss, weight = self._summed(predictions, targets)
            return LossResult(loss, weight, outputs)
        loss = self._loss_fn(outputs, targets)
        if isinstance(loss, LossResult):
            return loss if loss.outputs is not None else loss._replace(outputs=outputs)
        return LossResult(loss, None, outputs)

    def describe(self) -> str:
        """Return, in a few words, what the loss is a mean over."""
        if self._summed is None:
            return "the mean of loss_fn over what num_items counts"
        return "the mean over what counts for " + getattr(self._loss_fn, "__name__", type(self._loss_fn).__name__)


class OwnLoss:
    """The loss that a model returns by itself, a mean over its items.

    transformers' models take the number of items that their loss is divided by; where a model uses it, the loss is
    made a sum. Whether it does is not guessed from its signature: on the first batch the loss is asked if it depends on
    that number.

    Args:
        bare: The user's model.
        count: Counts the items of a batch.
        nominal: What losses are divided by before it is known what the window weighs.
    """

    def __init__(self, bare: nn.Module, count: CountItems, nominal: Callable[[], float]) -> None:
        self._bare, self._count, self._nominal = bare, count, nominal
        self._is_checked = False
        self._divides = None if _may_take_items(bare) else False  # None: not known yet

    def __call__(self, model: Any, batch: Any) -> LossResult:
        """Return the loss of a batch."""
        if not self._is_checked:
            check_names(self._bare, batch)
            self._is_checked = True
        weight = self._count(batch)
        if self._divides is False or not torch.is_grad_enabled():
            outputs = call_model(model, batch)
            return LossResult(sum_from_mean(_checked(outputs), weight), weight, outputs)
        # It takes part in a product, so that whether the loss depends on it can be asked.
        items = torch.tensor(self._nominal(), requires_grad=self._divides is None)
        outputs = call_model(model, batch, num_items_in_batch=items)
        loss = _checked(outputs)
        if self._divides is None:
            (gradient,) = torch.autograd.grad(loss, items, retain_graph=True, allow_unused=True)
            self._divides = gradient is not None
            if not self._divides:
                return LossResult(sum_from_mean(loss, weight), weight, outputs)
        return LossResult(loss * items.detach(), weight, outputs)

    def describe(self) -> str:
        """Return, in a few words, what the loss is a mean over."""
        return "the mean that the model returns"


def is_shifted(bare: nn.Module) -> bool:
    """Whether a model compares each token with the next by itself, as transformers' causal models do."""
    inner = bare.get_base_model() if hasattr(bare, "get_base_model") else bare  # type: ignore[operator]  # PEFT's
    name = type(inner).__name__
    return getattr(inner, "loss_type", None) == "ForCausalLM" or name.endswith(("ForCausalLM", "LMHeadModel"))


def _may_take_items(bare: nn.Module) -> bool:
    if not hasattr(bare, "loss_function"):  # transformers' models have it; others would be told what they do not know
        return False
    parameters = inspect.signature(bare.forward).parameters
    return "num_items_in_batch" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _checked(outputs: Any) -> Tensor:
    loss = loss_of(outputs)
    if loss is None:
        shape = f" of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else ""
        named = as_mapping(outputs)
        names = f" with {', '.join(map(str, named))}" if named is not None else ""
        raise ConfigurationError(
            f"The model returned a {type(outputs).__name__}{shape}{names}, and no loss. Give Trainer(loss_fn=…), for "
            "example torch.nn.functional.cross_entropy, put the labels into the batch of a model that computes its "
            "loss from them, or override compute_loss(model, batch)."
        )
    return loss
