"""The search space: for each argument the values to choose from."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from trainer_lib.foundation.errors import ConfigurationError, did_you_mean
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.trainer.arguments.declaration import checked_value
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments

Space = Mapping[str, Any] | Callable[[Any], Mapping[str, Any]]

_LOG = "log"
# Arguments that all trials share, and why.
_OF_ALL = {
    **dict.fromkeys(
        ("mixed_precision", "fp8", "compile", "fsdp", "parallelism", "ddp", "use_cpu", "optimizer_in_backward"),
        "sets up the accelerator",
    ),
    **dict.fromkeys(
        (
            "gradient_checkpointing",
            "gradient_checkpointing_every",
            "gradient_checkpointing_policy",
            "activation_offload",
            "chunked_cross_entropy",
            "use_liger_kernel",
            "sync_batchnorm",
            "parameter_groups",
        ),
        "changes the model permanently",
    ),
    **dict.fromkeys(("seed", "data_seed"), "seeds the accelerator's loaders"),
    **dict.fromkeys(("output_dir", "run_name", "resume", "dry_run"), "is set by the search"),
    **dict.fromkeys(("metric_for_best", "greater_is_better"), "is the objective of the search"),
}
_PLAIN = (bool, int, float, str, type(None))


@frozen_dataclass
class Choices:
    """Values to choose from."""

    values: list[Any]


@frozen_dataclass
class Range:
    """A range of numbers, with both ends.

    Attributes:
        low: The lowest value.
        high: The highest value.
        is_log: Whether values are drawn from the logarithm's range.
    """

    low: float
    high: float
    is_log: bool

    @property
    def is_whole(self) -> bool:
        """Whether it has whole numbers only."""
        return isinstance(self.low, int) and isinstance(self.high, int)


def read_space(space: Any, others: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Return the description of each argument: `Choices`, a `Range`, or what a backend knows itself.

    Args:
        space: The search space.
        others: Whether the backend knows a description itself.
    """
    if not isinstance(space, Mapping) or not space:
        raise ConfigurationError(
            f"space={space!r} must be a dict by the names of arguments, such as "
            '{"learning_rate": (1e-5, 1e-2, "log")}, or a function of a trial that returns arguments by name.'
        )
    check_names(space)
    is_known = others or (lambda given: False)
    return {name: given if is_known(given) else _description(name, given) for name, given in space.items()}


def _description(name: str, given: Any) -> Choices | Range:
    if isinstance(given, list) and given and all(isinstance(choice, _PLAIN) for choice in given):
        _check_values(name, given)
        return Choices(given)
    if isinstance(given, tuple) and len(given) in (2, 3) and (len(given) == 2 or given[2] == _LOG):
        low, high, is_log = given[0], given[1], len(given) == 3
        if _is_number(low) and _is_number(high) and low < high and (low > 0 or not is_log):
            _check_values(name, [low, high])
            return Range(low, high, is_log)
    raise ConfigurationError(
        f"space[{name!r}]={given!r} must be a list of numbers or strings to choose from, a range (low, high) (of "
        'integers if both are), or (low, high, "log") with low above 0. For anything else give a function of a trial.'
    )


def _check_values(name: str, values: list[Any]) -> None:
    for value in values:
        try:
            checked_value(TrainingArguments, name, value)
        except ConfigurationError as error:
            raise ConfigurationError(f"space[{name!r}]: {error}") from error


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_names(params: Mapping[str, Any]) -> None:
    """Check that arguments can differ between trials.

    Raises:
        ConfigurationError: If one is unknown, or must be the same for all trials.
    """
    known = [field.name for field in dataclasses.fields(TrainingArguments)]
    for name in params:
        if name not in known:
            raise ConfigurationError(
                f"space has {name!r}, which is not an argument of TrainingArguments.{did_you_mean(name, known)}"
            )
        if name in _OF_ALL:
            raise ConfigurationError(
                f"space has {name!r}, which {_OF_ALL[name]} and must be the same for all trials. Remove it."
            )
