"""This file is checking something on each process, and raising on all where one of them finds it wrong."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from trainer_lib.foundation.errors import DistributedOperationException, WorldError
from trainer_lib.process_group import ProcessGroup

T = TypeVar("T")


def together(group: ProcessGroup, function: Callable[[], T]) -> T:
    """Call a function on each process, and return what it returned here.

    What it raises on one process only would leave the others waiting for it; so they raise too, and say why.

    Raises:
        WorldError: If it raised on another process.

    Example:
        >>> from trainer_lib.process_group import LoneProcess
        >>> together(LoneProcess(), lambda: 3)
        3
    """
    if group.size == 1:
        return function()
    value, failure = None, None
    try:
        value = function()
    except Exception as error:  # noqa: BLE001 - raised below, when all have been told
        failure = error
    told: list[str | None] = group.all_gather_objects(failure and f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, text in enumerate(told):
        if text is not None:
            raise WorldError(f"Process {rank} cannot go on, so none can. It says: {text}")
    return value  # type: ignore[return-value]  # without a failure it is what the function returned


def check_same(group: ProcessGroup, facts: Mapping[str, Any]) -> None:
    """Check that all processes say the same of themselves.

    Args:
        group: The processes.
        facts: What is to be the same, by what it is called in the error.

    Raises:
        DistributedOperationException: If they do not; on all processes.
    """
    if group.size == 1:
        return
    told = group.all_gather_objects(dict(facts))
    different = [name for name in told[0] if any(one.get(name) != told[0][name] for one in told)]
    if different:
        lines = "".join(
            f"\n  {name}: " + ", ".join(f"{one.get(name)} on process {rank}" for rank, one in enumerate(told))
            for name in different
        )
        raise DistributedOperationException(
            f"The processes are about to do different things, and would wait for each other for ever:{lines}\nGive all "
            "of them the same; what one process alone is to read, print or write is decided inside."
        )
