"""The result of a search."""

from dataclasses import dataclass, field
from typing import Any

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.imports import require
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search, the same on all ranks.

    Attributes:
        metric: The metric that the search optimizes.
        best_params: The searched arguments of the best trial.
        best_value: The metric of its last evaluation.
        args: The trainer's arguments with those of the best trial.
        trials: For each trial its number, its state ("complete", "pruned" or "failed"), value and params.
        study: The optuna study, on the main process; with Ray, the `ray.tune.ResultGrid`.
    """

    metric: str
    best_params: dict[str, Any]
    best_value: float
    args: TrainingArguments
    trials: list[dict[str, Any]]
    study: Any = field(default=None, repr=False)

    def to_pandas(self) -> Any:
        """Return the trials as a data frame, with a column for each argument."""
        pandas = require("pandas", "plot")
        rows = [
            {**{name: trial[name] for name in ("number", "state", "value")}, **trial["params"]} for trial in self.trials
        ]
        return pandas.DataFrame(rows).set_index("number")

    def __str__(self) -> str:
        """Return the best trial, and the counts of trials by state."""
        params = ", ".join(f"{name}={_short(value)}" for name, value in self.best_params.items())
        states = [trial["state"] for trial in self.trials]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        return f"{self.metric} {self.best_value:.6g} with {params} ({counts})"


def best_of(records: list[dict[str, Any]], is_more: bool, failure: str | None) -> dict[str, Any]:
    """Return the record of the best complete trial.

    Raises:
        ConfigurationError: If no trial completed.
    """
    complete = [record for record in records if record["state"] == "complete"]
    if not complete:
        reason = f" The last failure: {failure}" if failure else ""
        raise ConfigurationError(f"None of the {len(records)} trials completed with a value.{reason}")
    return (max if is_more else min)(complete, key=lambda record: record["value"])


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else repr(value)
