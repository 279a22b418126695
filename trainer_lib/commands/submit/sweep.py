"""The grid of a sweep: the arguments of the script in each task of an array of jobs."""

import itertools
from collections.abc import Sequence

from trainer_lib.foundation.errors import ConfigurationError

TASK = "{task}"


def grid(text: str) -> list[list[str]]:
    """Return the arguments of each task of "lr=0.1,0.01 batch_size=8,16": every combination, the last one fastest.

    Example:
        >>> grid("lr=0.1,0.01")
        [['--lr', '0.1'], ['--lr', '0.01']]
    """
    axes: list[list[tuple[str, str]]] = []
    for word in text.split():
        name, _, values = word.partition("=")
        if not name or not values or "" in values.split(","):
            raise ConfigurationError(
                f"--sweep must be names with values, as in 'lr=0.1,0.01 batch_size=8,16' (got {text!r})."
            )
        axes.append([(f"--{name.lstrip('-')}", value) for value in values.split(",")])
    return [[word for pair in task for word in pair] for task in itertools.product(*axes)] if axes else []


def check_places(tasks: Sequence[Sequence[str]], arguments: Sequence[str]) -> None:
    """Raise if a sweep has one output folder for all its tasks, or something else is numbered by task."""
    is_numbered = any(TASK in argument for argument in arguments)
    if tasks and not is_numbered and any(argument.startswith("--output_dir") for argument in arguments):
        raise ConfigurationError(
            f"All {len(tasks)} tasks of the sweep have the same --output_dir, so a requeued one could resume another "
            f"one's run. Write {TASK} into it: --output_dir runs/{TASK}."
        )
    if is_numbered and not tasks:
        raise ConfigurationError(f"{TASK} is the number of a task of a sweep. Add --sweep, or leave it out.")
