"""The loss of a batch, from a loss function or from the model itself."""

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks  # pyright: ignore[reportPrivateUsage] - the only way to ask

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.public_names.signatures import parameter_names
from trainer_lib.foundation.tensors.pytree import find_device
from trainer_lib.memory.executable_batch_size import is_out_of_memory
from trainer_lib.modules.unwrapping import without_adapter
from trainer_lib.precision.base import FullPrecision
from trainer_lib.state.accumulation_window import sum_from_mean
from trainer_lib.trainer.losses.loss_checks import check_compared, check_loss, comparison_error
from trainer_lib.trainer.losses.loss_result import LossResult, Weight, ignored_label, summed
from trainer_lib.trainer.losses.mean_check import MeanCheck
from trainer_lib.trainer.losses.model_io import (
    as_mapping,
    call_model,
    check_names,
    check_values,
    is_scalar,
    loss_of,
    predictions_of,
    split,
    targets_of,
)

CountItems = Callable[[Any], Weight]
_HALF = torch.float16, torch.bfloat16
_NO_HOOKS: list[Mapping[int, Any]] = [{}, {}, {}, {}]


class Objective(Protocol):
    """Computes a model's loss on a batch."""

    def __call__(self, model: Any, batch: Any, keeps_outputs: bool = True) -> LossResult:
        """Return the loss of a batch; outputs that are not kept are freed before the backward."""
        ...

    def evaluate(self, model: Any, batch: Any, keeps_outputs: bool = True) -> tuple[Any, LossResult | None]:
        """Return the outputs of a model, and the loss if the batch allows it, with the outputs if they are kept."""
        ...

    def describe(self) -> str:
        """Return a short text that names the items the loss averages over."""
        ...


class LossFunction:
    """A loss function of the model's outputs and the batch's targets.

    Args:
        loss_fn: The function. One of torch's gets the predictions (`outputs.logits` of a model that returns several
            values); a custom one gets the outputs unchanged, and the count of the batch if it takes
            `num_items_in_batch` by name.
        bare: The user's model.
        label_names: The names of a batch that are targets.
        check_mean: Warns if the loss is not a mean over items.
        count: Counts the items of a batch, for a function that takes `num_items_in_batch`.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        bare: nn.Module,
        label_names: Sequence[str] | None,
        check_mean: MeanCheck | None = None,
        count: CountItems | None = None,
    ) -> None:
        self._loss_fn, self._bare, self._label_names = loss_fn, bare, label_names
        self._check_mean = check_mean
        self._count = count if _names_items(loss_fn) else None
        self._summed = summed(loss_fn)
        self._is_checked = self._has_compared = False
        self._options = without_cache(bare)

    def __call__(self, model: Any, batch: Any, keeps_outputs: bool = True) -> LossResult:
        """Return the loss of a batch."""
        inputs, targets = split(batch, self._label_names)
        if not self._is_checked:
            self._check(inputs)
        outputs = call_model(model, inputs, **self._options)
        if self._summed is not None:
            predictions = outputs if type(outputs) is Tensor else predictions_of(outputs)
            if not self._has_compared:
                self._compare(predictions, targets)
            try:
                loss, weight = self._summed(predictions, targets)
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                if is_out_of_memory(error):
                    raise
                raise comparison_error(error, self._name, predictions, targets) from error
            return LossResult(loss, weight, outputs if keeps_outputs else None)
        if self._check_mean is not None and not self._check_mean.is_done:
            self._check_mean.check_function(self._loss_fn, self._mean, self._name, (batch, outputs, targets))
        if self._count is None:
            loss, weight = self._loss_fn(outputs, targets), None
        else:
            loss, weight = self._per_item(self._count, batch, outputs, targets)
        kept = outputs if keeps_outputs else None
        if isinstance(loss, LossResult):
            return loss if keeps_outputs and loss.outputs is not None else loss._replace(outputs=kept)
        if not is_scalar(loss):
            check_loss(loss, "loss_fn")
        return LossResult(loss if weight is None else sum_from_mean(loss, weight), weight, kept)

    def evaluate(self, model: Any, batch: Any, keeps_outputs: bool = True) -> tuple[Any, LossResult | None]:
        """Return the outputs of a model, and the loss if there are targets."""
        if targets_of(batch, self._label_names) is None:
            self._check(batch)
            return call_model(model, batch, **self._options), None
        result = self(model, batch, keeps_outputs)
        return result.outputs, result

    def describe(self) -> str:
        """Return a short text that names the items the loss averages over."""
        over = "items (see num_items)" if self._summed is None and self._count is None else "targets"
        return f"{self._name}, averaged over all {over} of an update"

    def _per_item(self, count: CountItems, batch: Any, outputs: Any, targets: Any) -> tuple[Any, Weight]:
        """Return the loss of a batch by a function that takes the number of items, and this number."""
        weight = count(batch)
        return self._loss_fn(outputs, targets, num_items_in_batch=_items(weight, find_device(targets))), weight

    def _mean(self, batch: Any, outputs: Any, targets: Any) -> Any:
        if self._count is None:
            return self._loss_fn(outputs, targets)
        return self._per_item(self._count, batch, outputs, targets)[0]

    @property
    def _name(self) -> str:
        function = getattr(self._loss_fn, "func", self._loss_fn)
        return getattr(function, "__name__", type(function).__name__)

    def _compare(self, predictions: Any, targets: Any) -> None:
        function = getattr(self._loss_fn, "func", self._loss_fn)
        check_compared(function, self._name, predictions, targets, ignored_label(self._loss_fn))
        self._has_compared = True

    def _check(self, inputs: Any) -> None:
        if not self._is_checked:
            check_names(self._bare, inputs)
            check_values(self._bare, inputs, has_loss_fn=True)
            self._is_checked = True


class ModelLoss:
    """The loss that a model returns itself, a mean over its items.

    Models of transformers can take the number of items to divide their loss by. A model that uses it gets the number
    counted here, so that the two cannot differ. Autograd shows on the first batch whether the loss depends on that
    number; the signature of the model would not be enough. As in Hugging Face's Trainer, a batch without labels has no
    such number, and neither has a model that says so by `accepts_loss_kwargs = False`: such models may pass what
    they get on to modules that do not take it.

    Args:
        bare: The user's model.
        count: Counts the items of a batch.
        precision: The precision that the model is prepared for.
        check_mean: Warns if the loss is not a mean over items.
        label_names: The names of a batch that are targets.
    """

    def __init__(
        self,
        bare: nn.Module,
        count: CountItems,
        precision: FullPrecision,
        check_mean: MeanCheck | None = None,
        label_names: Sequence[str] | None = None,
    ) -> None:
        self._bare, self._count, self._precision, self._check_mean = bare, count, precision, check_mean
        self._label_names = label_names
        self._module: nn.Module = getattr(bare, "_orig_mod", bare)  # whose forward the precision wraps
        self._is_checked = False
        self._device: torch.device | None = None  # of batches
        self._divides = None if _may_take_items(bare) else False  # None: not known yet
        self._options = without_cache(bare)

    def __call__(self, model: Any, batch: Any, keeps_outputs: bool = True) -> LossResult:
        """Return the loss of a batch.

        Raises:
            ConfigurationError: If the model returns no loss.
        """
        outputs, result = self.evaluate(model, batch, keeps_outputs)
        return _no_loss(outputs) if result is None else result

    def evaluate(self, model: Any, batch: Any, keeps_outputs: bool = True) -> tuple[Any, LossResult | None]:
        """Return the outputs of a model, and its loss if there is one."""
        # Logits of a language model as fp32 take long and much memory.
        around = getattr(model, "_forward_hooks", {})  # `compute_loss` may call a function around the model
        hooks = [_global_forward_hooks, around, self._bare._forward_hooks, self._module._forward_hooks]  # pyright: ignore[reportPrivateUsage] - there is no public way to ask
        is_seen = keeps_outputs or (hooks != _NO_HOOKS and _are_of_users(hooks))
        self._precision.unconverted = None if is_seen else self._module
        try:
            outputs, loss, weight = self._run(model, batch)
        finally:
            self._precision.unconverted = None
        return outputs, None if loss is None else LossResult(loss, weight, outputs if keeps_outputs else None)

    def _run(self, model: Any, batch: Any) -> tuple[Any, Tensor | None, Weight | None]:
        """Return the outputs of a model, and its loss with the weight if that is known."""
        if not self._is_checked:
            check_names(self._bare, batch)
            check_values(self._bare, batch, has_loss_fn=False)
            self._device = find_device(batch)
            self._count(batch)  # the first count may run the model, which has to be before its forward
            self._is_checked = True
        if self._check_mean is not None and not self._check_mean.is_done:
            self._check_mean.check_model(self._plain_loss, batch)
        is_unasked = self._divides is None and not _has_labels(batch, self._label_names)
        if self._divides is False or is_unasked or not torch.is_grad_enabled():
            outputs = call_model(model, batch, **self._options)
            return outputs, _loss_of(outputs), None
        weight = self._count(batch)
        items = _items(weight, self._device)
        items.requires_grad_(self._divides is None)  # until it is known whether the loss depends on it
        outputs = call_model(model, batch, num_items_in_batch=items, **self._options)
        loss = _loss_of(outputs)
        if loss is None:
            return outputs, None, None
        if self._divides is None:
            self._divides = _depends(loss, items)
        return (outputs, loss * items.detach(), weight) if self._divides else (outputs, loss, None)

    def describe(self) -> str:
        """Return a short text that names the items the loss averages over."""
        return "the model's own, averaged over all items of an update"

    def _plain_loss(self, batch: Any) -> Any:
        return _loss_of(call_model(self._bare, batch, **self._options))


def without_cache(bare: nn.Module) -> dict[str, bool]:
    """Return the option with which a model of transformers does not fill its cache of keys and values.

    Generation alone reads it. A forward that fills it copies keys and values, and lets the samples of a packed row
    attend to those before them. Prefixes of PEFT are in it, so a model with them gets no option.
    """
    model: Any = getattr(bare, "_orig_mod", bare)  # of torch.compile
    base = without_adapter(model)
    if not getattr(getattr(base, "config", None), "use_cache", False):
        return {}
    from trainer_lib.modules.module_kinds import is_transformers_model

    has_prefix = getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)
    takes_option = "use_cache" in inspect.signature(type(base).forward).parameters
    return {"use_cache": False} if takes_option and is_transformers_model(base) and not has_prefix else {}


def _names_items(loss_fn: Any) -> bool:
    return "num_items_in_batch" in parameter_names(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn)


def _depends(loss: Tensor, items: Tensor) -> bool:
    # A search, not a backward: that would run hooks on the outputs, by which DeepSpeed knows that its own has begun.
    nodes, seen = deque([loss.grad_fn]), set[Any]()
    while nodes:
        node = nodes.popleft()
        if node is None or node in seen:
            continue
        if getattr(node, "variable", None) is items:
            return True
        seen.add(node)
        nodes.extend(following for following, _ in node.next_functions)
    return False


def _has_labels(batch: Any, label_names: Sequence[str] | None) -> bool:
    targets = targets_of(batch, label_names)
    return any(isinstance(each, Tensor) for each in (targets.values() if isinstance(targets, dict) else [targets]))


def _may_take_items(bare: nn.Module) -> bool:
    model: Any = without_adapter(getattr(bare, "_orig_mod", bare))
    if not hasattr(model, "loss_function"):  # only models of transformers take the argument
        return False
    if getattr(model, "accepts_loss_kwargs", True) is False:
        return False
    parameters = inspect.signature(model.forward).parameters
    return "num_items_in_batch" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _are_of_users(hooks: Iterable[Mapping[int, Any]]) -> bool:
    """Whether there are forward hooks, which see outputs, besides those of FSDP."""
    each = (hook for of_module in hooks for hook in of_module.values())
    return any(not str(getattr(hook, "__module__", "")).startswith("torch.distributed.") for hook in each)


def _loss_of(outputs: Any) -> Tensor | None:
    loss: Any = loss_of(outputs)
    if loss is not None and not is_scalar(loss):
        check_loss(loss, "The model")
    return loss.float() if loss is not None and loss.dtype in _HALF else loss


def _items(weight: Weight, device: torch.device | None) -> Tensor:
    """Return a number of items as a tensor; at least 1, since without any items the sum is 0 as well."""
    if isinstance(weight, Tensor):
        return weight.to(torch.float32).clamp(min=1)
    return torch.full((), max(weight, 1.0), dtype=torch.float32, device=device)


def _no_loss(outputs: Any) -> NoReturn:
    shape = f" of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else ""
    named = as_mapping(outputs)
    names = f" with {', '.join(map(str, named))}" if named is not None else ""
    raise ConfigurationError(
        f"The model returned a {type(outputs).__name__}{shape}{names}, and no loss. Give Trainer(loss_fn=…), for "
        "example torch.nn.functional.cross_entropy; add labels to the batch if the model computes its loss from "
        "them; or override compute_loss(model, batch)."
    )
