"""A warning about ranks that do not join a world in time."""

import logging
import socket
from typing import Any

from trainer_lib.foundation.launcher_variables import World

_logger = logging.getLogger(__name__)  # not get_logger: the rank that warns need not be the first one
_MOST_NAMED = 8  # ranks in the warning


class JoinWarning:
    """Logs which ranks a world still waits for.

    Args:
        world: The rank and world size of this process.
        address: Where the ranks meet.
        seconds: How long this rank has waited when `log` is called.
    """

    def __init__(self, world: World, address: str, seconds: float) -> None:
        self._world, self._address, self._seconds = world, address, seconds
        self._store: Any = None

    def reached(self, store: Any) -> Any:
        """Tell the other ranks that this one has reached the store, and return it."""
        store.set(_key(self._world.rank), "")
        self._store = store
        return store

    def log(self) -> None:
        """Log what this rank waits for, unless a lower rank does."""
        waited = f"Rank {self._world.rank} of {self._world.size} has waited {self._seconds:g} seconds"
        if self._store is None:
            _logger.warning(
                "%s to reach %s, where the ranks meet.%s %s", waited, self._address, self._unknown_host, self._hint
            )
            return
        store = self._store.clone()  # the first one is in use by the thread that waits
        missing = [rank for rank in range(self._world.size) if not store.check([_key(rank)])]
        if missing and self._world.rank == next(rank for rank in range(self._world.size) if rank not in missing):
            _logger.warning("%s at %s for %s. %s", waited, self._address, _named(missing), self._hint)

    @property
    def _hint(self) -> str:
        return (
            "Check that all processes are started and have not failed. To run this process alone, unset its variables "
            f"{self._world.variables}."
        )

    @property
    def _unknown_host(self) -> str:
        host = self._world.master_addr or ""
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            return f" {host!r} is unknown here ({error.strerror}): set MASTER_ADDR to the address of the first machine."
        return ""


def _key(rank: int) -> str:
    return f"reached/{rank}"


def _named(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks[:_MOST_NAMED]))
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}{more}"
