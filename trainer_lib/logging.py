"""Loggers that write a line once, on rank 0, instead of once per rank."""

import contextlib
import logging
import sys
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError, unknown

if TYPE_CHECKING:
    from trainer_lib.process_group import ProcessGroup

# By logger name, since each call of get_logger makes another adapter.
_said_once: set[tuple[str, str, str]] = set()


class MultiProcessAdapter(logging.LoggerAdapter[logging.Logger]):
    """A logger that logs on rank 0 by default.

    All logging methods take two more arguments: with `main_process_only=False` every rank logs, and with
    `in_order=True` ranks log one after the other, so all of them must make the call. A `stacklevel` counts from this
    adapter, as in Accelerate: 2, the default, is the line of the call, and 3 that of its caller.
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a line at a numeric level."""
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        kwargs.setdefault("stacklevel", 2)
        turns, barrier = _turns(main_process_only, in_order)
        for is_mine in turns:
            if is_mine and self.isEnabledFor(level):
                message, extended = self.process(msg, kwargs)
                self.logger.log(level, message, *args, **extended)
            # Even if the level is disabled on this rank: another rank may log, and waits here.
            barrier()

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Add this adapter's extra fields to those of the call."""
        return msg, {**kwargs, "extra": {**(self.extra or {}), **(kwargs.get("extra") or {})}}

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a warning once per message and arguments."""
        line = (self.logger.name, str(msg), repr(args))
        if line in _said_once:
            return
        _said_once.add(line)
        self.warning(msg, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 2) + 1})


def get_logger(
    name: str, log_level: str | None = None, *, accelerate_log_level: str | None = None
) -> MultiProcessAdapter:
    """Return the logger of a name, which logs on rank 0 only.

    Before the process group exists, the logger reads the rank from the launcher's environment variables; logging never
    initializes the process group.

    Args:
        name: The logger's name, usually `__name__`.
        log_level: The lowest level to log; by default the variable ACCELERATE_LOG_LEVEL or LOG_LEVEL, else the
            configuration of `logging`.
        accelerate_log_level: An older name of `log_level`.

    Example:
        >>> logger = get_logger(__name__, log_level="INFO")
        >>> logger.info("One line, from rank 0.")
        >>> logger.debug("One line of each rank, by rank.", in_order=True)
    """
    logger = logging.getLogger(name)
    level = log_level or accelerate_log_level or environment.log_level_requested()
    if level is not None:
        known = logging.getLevelNamesMapping()
        if level.upper() not in known:
            raise ConfigurationError(unknown("log level", level, known))
        logger.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})


def _turns(main_process_only: bool, in_order: bool) -> tuple[list[bool], Any]:
    """Return for each turn whether it is this rank's, and the function to call after a turn."""
    if "torch" not in sys.modules:  # so there is no group; and in the exit of a program it can no longer be imported
        return [in_order or not main_process_only or _requested_rank() == 0], _no_barrier
    rank, group = _rank_and_group()
    if in_order:
        return [turn == group.rank for turn in range(group.size)], group.barrier
    return [rank == 0 or not main_process_only], _no_barrier


def _rank_and_group() -> tuple[int, "ProcessGroup"]:
    # Here, since the commands that make a logger and do not log start without torch.
    from trainer_lib import process_group
    from trainer_lib.state.partial_state import PartialState, is_initialized

    if is_initialized():
        state = PartialState()
        return state.process_index, state.group
    group = process_group.adopted()
    if group is not None:
        return group.rank, group
    return _requested_rank(), process_group.LoneProcess()


def _requested_rank() -> int:
    # Invalid variables raise when the process group is initialized, not in a log call.
    with contextlib.suppress(ConfigurationError):
        world = environment.read_world()
        return 0 if world is None else world.rank
    return 0


def _no_barrier() -> None:
    pass
