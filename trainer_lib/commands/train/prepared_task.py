"""What a task makes of its arguments and data: a model, datasets, metrics, and what to say of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(kw_only=True)
class PreparedTask:
    """What a trainer is made of.

    Attributes:
        model: The model.
        train: The training data.
        evaluation: The evaluation data; `None` without.
        processor: The tokenizer, or what prepares images; saved with the model.
        loss_fn: The loss, for a model that does not compute its own.
        metrics: The metrics of evaluations.
        compute_metrics: A function of all predictions and labels, where metrics need them.
        columns: Which column is what, for the banner.
        facts: What is saved with the model so that it can be used: classes, columns, statistics.
    """

    model: nn.Module
    train: Any
    evaluation: Any = None
    processor: Any = None
    loss_fn: Callable[[Any, Any], Any] | None = None
    metrics: list[str] | None = None
    compute_metrics: Callable[[Any], dict[str, float]] | None = None
    columns: str = ""
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
