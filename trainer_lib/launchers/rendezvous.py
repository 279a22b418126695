"""This file is where the processes of one machine meet: at a port that the launcher holds, or in a file."""

from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import WorldError
from trainer_lib.launchers.launch_plan import LOCALHOST
from trainer_lib.processes.ports import free_port, is_port_in_use


class _OneMachine(RendezvousHandler):
    """The meeting of a single agent with itself, as torch's elastic agent wants it; one store for each attempt."""

    def __init__(self, port: int, run_id: str) -> None:
        self._port = port
        self._run_id = run_id

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
        """Return at once."""
        return True


class MeetAtPort(_OneMachine):
    """The launcher serves a store; with port 0 the system picks a free one as it is bound, so nobody else gets it."""

    _store: dist.TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        """Whether the processes use the agent's store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return a store and the only place there is."""
        if self._store is None or self._port == 0:
            self._store = _serve(self._port)
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOCALHOST, self._store.port))

    def shutdown(self) -> bool:
        """Let go of the store."""
        self._store = None
        return True


class MeetInFile(_OneMachine):
    """Forks find one another through a file.

    A store on a port has a thread that serves it. In the parent it may hold a lock of the resolver's at a fork, and
    then the child waits for it for ever.
    """

    def __init__(self, port: int, run_id: str, folder: Path) -> None:
        super().__init__(port, run_id)
        self._folder = folder
        self._attempts = 0

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the only place there is."""
        if self._port and is_port_in_use(self._port):
            raise _port_is_taken(self._port)
        environment.set_variables({"TRAINER_LIB_STORE_FILE": str(self._folder / f"store_{self._attempts}")})
        self._attempts += 1
        # The port is for functions that form a group of their own.
        return RendezvousInfo(dist.HashStore(), 0, 1, RendezvousStoreInfo(LOCALHOST, self._port or free_port()))


def _serve(port: int) -> dist.TCPStore:
    try:
        return dist.TCPStore(LOCALHOST, port, is_master=True, wait_for_workers=False)
    except dist.DistNetworkError as error:
        raise _port_is_taken(port) from error


def _port_is_taken(port: int) -> WorldError:
    return WorldError(
        f"Port {port} cannot be used, another program has it. Name another, or none: then a free one is taken."
    )
