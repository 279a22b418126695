"""Raise on all ranks what one rank raised, and check that all ranks do the same."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

from trainer_lib.foundation.errors import (
    CheckpointError,
    ConfigurationError,
    DamagedError,
    DistributedOperationException,
    PreparationError,
    RunInUseError,
    StateError,
    TrainerLibError,
    UnwritableError,
    WorldError,
)
from trainer_lib.logging import get_logger
from trainer_lib.process_group import ProcessGroup

_logger = get_logger(__name__)

# Seconds after which a rank that waits for the other ranks logs a warning.
PATIENCE = 60.0

# Callers act on these classes, so all ranks raise the same one, if every failure is of it. The first match counts.
_SHARED_CLASSES = (
    DamagedError,
    UnwritableError,
    CheckpointError,
    StateError,
    ConfigurationError,
    PreparationError,
    RunInUseError,
)

T = TypeVar("T")


class ErrorReport(NamedTuple):
    """An error as one rank reports it to the others."""

    shared_class: type[TrainerLibError] | None
    class_name: str
    text: str


class HeldError:
    """An error on this rank, held back until all ranks know of it.

    Raised at once, it would leave the other ranks waiting for this one.

    Args:
        doing: The call that the block is part of, as the user knows it. Error messages on other ranks name it.
        error_class: What the other ranks raise, unless callers act on the class of the error itself.
    """

    def __init__(self, doing: str, error_class: type[TrainerLibError] = WorldError) -> None:
        self._doing = doing
        self._error_class = error_class
        self._error: Exception | None = None

    @contextmanager
    def held(self) -> Generator[None]:
        """Hold back the first error of a block. Later blocks still run."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - `raise_first` raises it
            self._error = self._error or error

    @property
    def report(self) -> ErrorReport | None:
        """What the other ranks have to know; `None` without an error."""
        error = self._error
        return None if error is None else ErrorReport(_shared_class(error), type(error).__name__, str(error))

    def raise_first(self, reports: Sequence[ErrorReport | None]) -> None:
        """Raise if any rank reports an error: the error itself on its rank, the first report on the others.

        Args:
            reports: One for each rank, in order of rank; the same on all ranks.
        """
        failures = [(rank, report) for rank, report in enumerate(reports) if report is not None]
        if not failures:
            return
        classes = {report.shared_class for _, report in failures}
        error_class = (classes.pop() if len(classes) == 1 else None) or self._error_class
        if self._error is not None:
            if _shared_class(self._error) not in (None, error_class):
                raise self._error_class(str(self._error)) from self._error
            raise self._error
        rank, report = failures[0]
        text = report.text if report.class_name == error_class.__name__ else f"{report.class_name}: {report.text}"
        raise error_class(f"{self._doing} failed on rank {rank}: {text}")

    def pack(self, value: Any) -> tuple[ErrorReport | None, Any]:
        """Return the value together with this rank's report, to send both in one message."""
        return self.report, None if self._error is not None else value

    def unpack(self, packed: tuple[ErrorReport | None, Any]) -> Any:
        """Return the value that the main process packed, or raise its error."""
        report, value = packed
        self.raise_first([report])
        return value


@contextmanager
def raise_on_all_ranks(
    group: ProcessGroup, doing: str, error_class: type[TrainerLibError] = WorldError
) -> Generator[None]:
    """Run a block on all ranks; an error on one rank is raised on all.

    Args:
        group: The ranks.
        doing: The call that the block is part of, as the user knows it.
        error_class: What ranks without an error of their own raise, unless callers act on the class of the error.

    Example:
        >>> from trainer_lib.process_group import LoneProcess
        >>> with raise_on_all_ranks(LoneProcess(), "fit"):
        ...     length = len("data")
    """
    error = HeldError(doing, error_class)
    with error.held():
        yield
    error.raise_first(gather_checked(group, error.report, doing, error_class))


def run_on_main_process(
    group: ProcessGroup, doing: str, function: Callable[[], T], error_class: type[TrainerLibError] = WorldError
) -> T:
    """Call a function on the main process, and return its result, or raise its error, on all ranks.

    Example:
        >>> from trainer_lib.process_group import LoneProcess
        >>> run_on_main_process(LoneProcess(), "fit", lambda: 3)
        3
    """
    error, value = HeldError(doing, error_class), None
    if group.rank == 0:
        with error.held():
            value = function()
    return error.unpack(group.broadcast_objects([error.pack(value)])[0])


def check_same_on_all_ranks(group: ProcessGroup, facts: Mapping[str, Any]) -> None:
    """Check that the facts are equal on all ranks.

    Args:
        group: The ranks.
        facts: What has to be equal, by the name that the error gives it.

    Raises:
        DistributedOperationException: If one of them differs; on all ranks.
    """
    by_rank = group.all_gather_objects(dict(facts))
    first, *others = by_rank
    names = dict.fromkeys(name for facts in by_rank for name in facts)
    different = [name for name in names if any(facts.get(name) != first.get(name) for facts in others)]
    if different:
        lines = "".join(
            f"\n  {name}: " + ", ".join(f"{facts.get(name)} on rank {rank}" for rank, facts in enumerate(by_rank))
            for name in different
        )
        raise DistributedOperationException(
            "The ranks differ in what they are about to do, and would wait for each other without end, or train "
            f"different weights:{lines}\n"
            "Set the same on all ranks. Whether one rank alone reads, prints or writes is decided inside."
        )


def gather_checked(
    group: ProcessGroup, value: Any, doing: str, error_class: type[TrainerLibError] = WorldError
) -> list[Any]:
    """Return the values of all ranks in order of rank, after checking that all ranks are in the same call.

    Args:
        group: The ranks.
        value: The value of this rank.
        doing: The call that this is part of, as the user knows it.
        error_class: What to raise if ranks are in different calls.
    """
    with group.noticed_after(PATIENCE, partial(warn_of_waiting, group.rank, doing)):
        by_rank = group.all_gather_objects((doing, value))
    for rank, (other, _) in enumerate(by_rank):
        if other != doing:
            raise error_class(f"Rank {group.rank} is in {doing} and rank {rank} in {other}.")
    return [value for _, value in by_rank]


def broadcast_noticed(group: ProcessGroup, value: Any, doing: str) -> Any:
    """Return the value of rank 0; a rank that waits long for it says in which call.

    Args:
        group: The ranks.
        value: The value of this rank.
        doing: The call that this is part of, as the user knows it.
    """
    with group.noticed_after(PATIENCE, partial(warn_of_waiting, group.rank, doing)):
        return group.broadcast_objects([value])[0]


def _shared_class(error: Exception) -> type[TrainerLibError] | None:
    return next((shared for shared in _SHARED_CLASSES if isinstance(error, shared)), None)


def warn_of_waiting(rank: int, doing: str) -> None:
    """Log that a rank waits long in a call for the other ranks."""
    _logger.warning(
        "Rank %d has waited %g seconds in %s for the other ranks. All ranks have to call it: "
        "is it inside `if accelerator.is_main_process`?",
        rank,
        PATIENCE,
        doing,
        main_process_only=False,
    )
