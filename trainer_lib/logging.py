"""This file is loggers that know of the other processes: a line comes once, not once a process."""

import contextlib
import logging
from collections.abc import MutableMapping
from typing import Any

from trainer_lib import process_group
from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError, unknown
from trainer_lib.process_group import LoneProcess, ProcessGroup
from trainer_lib.state.partial_state import PartialState, is_initialized

# By name of the logger, since each call of get_logger makes another adapter.
_said_once: set[tuple[str, str, str]] = set()


class MultiProcessAdapter(logging.LoggerAdapter[logging.Logger]):
    """A logger whose lines come from the main process, unless asked for otherwise.

    All methods of `logging.Logger` that log take two more arguments: `main_process_only=False` has every process log,
    and `in_order=True` has them log one after the other, so that all of them have to make the call.
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a line at a numeric level."""
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        # The frame of this method is no caller that anybody wants to see.
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        turns, barrier = _turns(main_process_only, in_order)
        for is_mine in turns:
            if is_mine and self.isEnabledFor(level):
                message, extended = self.process(msg, kwargs)
                self.logger.log(level, message, *args, **extended)
            # Also where the level is off here: it may be on elsewhere, and that process waits.
            barrier()

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Add this adapter's extra fields to those of the call."""
        return msg, {**kwargs, "extra": {**(self.extra or {}), **(kwargs.get("extra") or {})}}

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a warning the first time it is given with these arguments."""
        line = (self.logger.name, str(msg), repr(args))
        if line in _said_once:
            return
        _said_once.add(line)
        self.warning(msg, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return the logger of a name, which logs on the main process only.

    Before the processes have come together it goes by the launcher's variables; to log never brings them together.

    Args:
        name: The logger's name; `__name__`, as a rule.
        log_level: From which level on it logs; by default what ACCELERATE_LOG_LEVEL says, else as `logging` is set up.

    Example:
        >>> logger = get_logger(__name__, log_level="INFO")
        >>> logger.info("One line, from the main process.")
        >>> logger.debug("One line of each process, by rank.", in_order=True)
    """
    logger = logging.getLogger(name)
    level = log_level or environment.log_level_requested()
    if level is not None:
        known = logging.getLevelNamesMapping()
        if level.upper() not in known:
            raise ConfigurationError(unknown("log level", level, known))
        logger.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})


def _turns(main_process_only: bool, in_order: bool) -> tuple[list[bool], Any]:
    """Return for each turn whether it is this process's, and what comes after a turn."""
    rank, group = _place()
    if in_order:
        return [turn == group.rank for turn in range(group.size)], group.barrier
    return [rank == 0 or not main_process_only], _go_on


def _place() -> tuple[int, ProcessGroup]:
    if is_initialized():
        state = PartialState()
        return state.process_index, state.group
    group = process_group.adopted()
    if group is not None:
        return group.rank, group
    world = None
    # Variables that make no sense are reported where a world is to form, not by a log line.
    with contextlib.suppress(ConfigurationError):
        world = environment.read_world()
    return (0 if world is None else world.rank), LoneProcess()


def _go_on() -> None:
    pass
