"""This file is where the processes of one machine meet: a store on a port that the launcher holds."""

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from trainer_lib.foundation.errors import WorldError
from trainer_lib.launchers.plan import LOCALHOST


def open_store(port: int = 0) -> dist.TCPStore:
    """Serve a store on `port` of this machine; with 0, on one that is free.

    The system picks the free port as it is bound, so two launches at one time never get the same.
    """
    try:
        return dist.TCPStore(LOCALHOST, port, is_master=True, wait_for_workers=False)
    except dist.DistNetworkError as error:
        raise WorldError(
            f"Port {port} cannot be used, another program may have it: {str(error).splitlines()[0]} "
            "Name another port, or none: then a free one is taken."
        ) from error


class OneMachine(RendezvousHandler):
    """The meeting of a single agent with itself, as torch's elastic agent wants it."""

    def __init__(self, port: int, run_id: str) -> None:
        self._port = port
        self._run_id = run_id
        self._store: dist.TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        """Whether the processes use this store too."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return a store and the only place there is."""
        if self._store is None or self._port == 0:
            # A new store for each restart: what a dead attempt left in the old one would mislead the next.
            self._store = open_store(self._port)
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOCALHOST, self._store.port))

    def get_backend(self) -> str:
        """Return the name of this kind of meeting."""
        return "one-machine"

    def get_run_id(self) -> str:
        """Return the name of the run."""
        return self._run_id

    def num_nodes_waiting(self) -> int:
        """Return how many other machines would like to join."""
        return 0

    def is_closed(self) -> bool:
        """Whether nobody can join any more."""
        return False

    def set_closed(self) -> None:
        """Let nobody join any more."""

    def shutdown(self) -> bool:
        """Let go of the store."""
        self._store = None
        return True
