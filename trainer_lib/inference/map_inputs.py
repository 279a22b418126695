"""`map_between_processes`: a function of inputs that all processes share, with the results in order on each."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from trainer_lib.collectives.agreement import raise_on_all_ranks
from trainer_lib.collectives.object_collectives import gather_per_data_rank
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options.base import check_count
from trainer_lib.progress import Progress, show_progress
from trainer_lib.state import PartialState


def map_between_processes(
    function: Callable[[list[Any]], Sequence[Any]],
    inputs: Sequence[Any],
    batch_size: int = 1,
    key: Callable[[Any], Any] | None = None,
    title: str | None = "inputs",
) -> list[Any]:
    """Return the results of all inputs, in their order, on all ranks; each rank computes every n-th batch.

    Args:
        function: Takes a list of at most `batch_size` inputs, and returns one result for each.
        inputs: The inputs, the same on all ranks.
        batch_size: How many inputs `function` takes at once.
        key: Sorts the inputs, the largest first, so that those of a batch are alike: `key=len` saves padding. The
            results stay in the order of the inputs.
        title: What the progress bar of rank 0 counts; `None` for no bar.

    Example:
        >>> map_between_processes(lambda words: [word.upper() for word in words], ["a", "b", "c"], title=None)
        ['A', 'B', 'C']

    Raises:
        ConfigurationError: If `function` returns more or fewer results than it got inputs.
    """
    check_count("batch_size", batch_size)
    group = PartialState().data_group
    order = list(range(len(inputs)))
    if key is not None:
        order.sort(key=lambda index: key(inputs[index]), reverse=True)
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    progress = None if title is None or group.rank or not order else show_progress(title, sys.stderr, total=len(order))
    results: dict[int, Any] = {}
    with raise_on_all_ranks(group, "map_between_processes"):
        last = 0.0
        for batch in batches[group.rank :: group.size]:
            results |= zip(batch, _results(function, [inputs[index] for index in batch]), strict=True)
            last = _show(progress, min(len(results) * group.size, len(order)), last)
    if progress is not None:
        progress.close(len(order))
    everything = {index: result for part in gather_per_data_rank(results) for index, result in part.items()}
    return [everything[index] for index in range(len(order))]


def _results(function: Callable[[list[Any]], Sequence[Any]], inputs: list[Any]) -> Sequence[Any]:
    results = function(inputs)
    if len(results) != len(inputs):
        raise ConfigurationError(
            f"The function returned {len(results)} results for {len(inputs)} inputs. Return one for each, in order."
        )
    return results


def _show(progress: Progress | None, done: int, last: float) -> float:
    """Show what is done, unless the display was changed a moment ago; return when it was changed last."""
    now = time.monotonic()
    if progress is None or now - last < progress.interval:
        return last
    progress.show(done)
    return now
