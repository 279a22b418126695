"""Label smoothing of the training loss."""

import functools
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer_lib.events import Modifier, Run
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.foundation.tensors.batch_fields import are_valid, as_mapping, split

_OTHER_LOSSES = ("multi_label_classification", "regression")  # as `problem_type` of a model's config


class LabelSmoothing(Modifier):
    """Trains on `(1 - share) * loss + share * mean over all classes`, as `cross_entropy(label_smoothing=share)`.

    It works with `Trainer(loss_fn=cross_entropy)` and with models that compute the loss from their labels, including
    causal language models. Evaluation losses are not smoothed, so they stay comparable with other runs.

    Args:
        share: The share of each target that is spread over all classes, between 0 and 1.

    Example:
        >>> smoothing = LabelSmoothing(0.1)
    """

    changes_weights: ClassVar[bool] = False

    def __init__(self, share: float = 0.1) -> None:
        if not isinstance(share, (int, float)) or not 0 < share < 1:
            raise ConfigurationError(f"LabelSmoothing(share) must be between 0 and 1, such as 0.1 (got {share!r}).")
        self.share = share
        self._ignored = -100

    def on_fit_begin(self, run: Run) -> None:
        if run.accelerator.sequence_split.ranks is not None:
            raise UnsupportedError(
                "LabelSmoothing compares the outputs with the targets of whole sequences, and with cp_size or sp_size "
                "each rank has the outputs of a part. Set them to 1, or smooth the loss in compute_loss, which gets "
                "the part."
            )
        loss_fn = run.trainer.loss_fn
        if loss_fn is None:
            return
        function: Any = getattr(loss_fn, "func", loss_fn)
        options: dict[str, Any] = loss_fn.keywords if isinstance(loss_fn, functools.partial) else vars(loss_fn)
        if function is not F.cross_entropy and not isinstance(function, nn.CrossEntropyLoss):
            name = getattr(function, "__name__", type(function).__name__)
            raise ConfigurationError(
                f"LabelSmoothing needs loss_fn=cross_entropy (got {name}). Change loss_fn or remove LabelSmoothing."
            )
        weight = getattr(loss_fn, "weight", None) if isinstance(loss_fn, nn.Module) else options.get("weight")
        if weight is not None or options.get("label_smoothing"):
            option = "weight" if weight is not None else "label_smoothing"
            raise ConfigurationError(
                f"LabelSmoothing does not support a loss_fn with {option}=…. Give loss_fn=nn.CrossEntropyLoss("
                f"label_smoothing={self.share}, …) instead, and remove the callback."
            )
        self._ignored = options.get("ignore_index", -100)

    def on_loss(self, run: Run) -> None:
        logits, targets = self._logits_and_targets(run)
        spread = -F.log_softmax(logits.float(), dim=1).mean(dim=1)
        if not targets.is_floating_point():  # class probabilities have no ignored targets
            spread = torch.where(are_valid(targets, self._ignored), spread, 0.0)
        assert run.loss_sum is not None
        run.loss_sum = torch.lerp(run.loss_sum, spread.sum().to(run.loss_sum.dtype), self.share)

    def _logits_and_targets(self, run: Run) -> tuple[Tensor, Tensor]:
        """Return the logits, with the classes in dimension 1, and the targets."""
        outputs: Any = run.outputs
        named = as_mapping(outputs)
        logits = outputs if isinstance(outputs, Tensor) else (named or {}).get("logits")
        _, targets = split(run.batch, getattr(run.args, "label_names", None))
        if not isinstance(logits, Tensor) or not isinstance(targets, Tensor) or logits.ndim < 2:
            raise ConfigurationError(
                "LabelSmoothing needs logits (a tensor that the model returns, or its `logits`) and targets in one "
                "tensor. If you override compute_loss, return the outputs too: return loss, outputs."
            )
        if run.trainer.loss_fn is None:
            _check_problem(run)
            if run.is_shifted:
                logits, targets = logits[:, :-1], targets[:, 1:]
            logits = logits.movedim(-1, 1)
        return logits, targets


def _check_problem(run: Run) -> None:
    """Check that the loss of a model of transformers is a cross-entropy: its first forward settles which one it is."""
    problem = getattr(getattr(run.modules.get(""), "config", None), "problem_type", None)
    if problem in _OTHER_LOSSES:
        raise ConfigurationError(
            f"LabelSmoothing smooths the cross-entropy of classes, and the loss of this model is another one: its "
            f"config has problem_type={problem!r}. Remove LabelSmoothing."
        )
