"""What the losses of models of transformers average over, where their labels alone do not show it."""

import sys
from typing import Any

from torch import nn

from trainer_lib.foundation.tensors.batch_fields import IGNORE_INDEX
from trainer_lib.modules.forwards import forward_signature
from trainer_lib.modules.unwrapping import without_adapter
from trainer_lib.trainer.losses.label_shift import is_from_transformers

_SEGMENTATION = "ForSemanticSegmentation"
_IGNORED_LABELS = "semantic_loss_ignore_index", "loss_ignore_index"  # as the configurations call it
# All parts of their losses are sums divided by the number of boxes.
_OVER_BOXES = (
    *("DeformableDetrForObjectDetection", "ConditionalDetrForObjectDetection", "DabDetrForObjectDetection"),
    *("RTDetrForObjectDetection", "RTDetrV2ForObjectDetection", "LwDetrForObjectDetection"),
)
_REDUCING = "LwDetrForObjectDetection", "RfDetrForObjectDetection", "RfDetrForInstanceSegmentation"
_DETECTION = "ForObjectDetection", "ForSegmentation", "ForUniversalSegmentation", "ForInstanceSegmentation"


def label_ignored_by(bare: nn.Module) -> int:
    """Return the label that a model leaves out of its loss: that of its configuration if it labels pixels, else -100.

    Example:
        >>> label_ignored_by(nn.Linear(1, 1))
        -100
    """
    if not _is_model(bare, _SEGMENTATION):
        return IGNORE_INDEX
    config = getattr(without_adapter(bare), "config", None)
    if getattr(config, "num_labels", None) == 1:  # SegFormer then averages over all pixels, of which some count 0
        return IGNORE_INDEX
    labels = (getattr(config, name, None) for name in _IGNORED_LABELS)
    return next((label for label in labels if type(label) is int), IGNORE_INDEX)


def labels_taken_by(model: nn.Module) -> list[str]:
    """Return the names of labels that a model of transformers takes, if these are not just "labels".

    Example:
        >>> labels_taken_by(nn.Linear(1, 1))
        []
    """
    if not is_from_transformers(model):
        return []
    names = [name for name in forward_signature(without_adapter(model)).parameters if "label" in name]
    return [] if names == ["labels"] else names


def averages_samples(bare: nn.Module) -> bool:
    """Whether a model computes a CTC loss: each sample counts alike, however many labels it has."""
    return _is_model(bare, "ForCTC")


def averages_boxes(bare: nn.Module) -> bool:
    """Whether a model divides its loss by the number of boxes in its own batch."""
    return _is_model(bare, _OVER_BOXES)


def reduces_counts(bare: nn.Module) -> bool:
    """Whether a model adds up the boxes or masks of all ranks in its forward, where there are several.

    Most do it only where Accelerate has a state, which `transformers.TrainingArguments` creates.
    """
    state: Any = getattr(sys.modules.get("accelerate"), "PartialState", None)
    has_state = bool(getattr(state, "_shared_state", None))  # as these models ask for it
    return _is_model(bare, _DETECTION if has_state else _REDUCING)


def _is_model(bare: nn.Module, endings: str | tuple[str, ...]) -> bool:
    kinds = type(without_adapter(bare)).__mro__
    return is_from_transformers(bare) and any(kind.__name__.endswith(endings) for kind in kinds)
