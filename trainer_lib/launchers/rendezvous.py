"""The rendezvous of processes: of one machine at a port of the launcher or in a file, or of several machines."""

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from trainer_lib.foundation import environment
from trainer_lib.launchers.launch_plan import LOCALHOST
from trainer_lib.launchers.local.local_store import port_is_taken
from trainer_lib.processes.ports import free_port, is_port_in_use


class _OneMachine(RendezvousHandler):
    """The rendezvous of a single agent, for torch's elastic agent; one store for each attempt."""

    def __init__(self, port: int, run_id: str) -> None:
        self._port = port
        self._run_id = run_id

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return "one-machine"

    def get_run_id(self) -> str:
        """Return the name of the run."""
        return self._run_id

    def num_nodes_waiting(self) -> int:
        """Return how many other machines wait to join: none."""
        return 0

    def is_closed(self) -> bool:
        """Whether the rendezvous is closed: never."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def shutdown(self) -> bool:
        """Return at once."""
        return True


class MeetAtPort(_OneMachine):
    """A rendezvous at a store that the launcher serves; with port 0 the system assigns a free port."""

    _store: dist.TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        """Whether the processes use the agent's store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store, with rank 0 of 1 machine."""
        if self._store is None or self._port == 0:
            self._store = _serve(self._port)
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOCALHOST, self._store.port))

    def shutdown(self) -> bool:
        """Release the store."""
        self._store = None
        return True


class MeetInFile(_OneMachine):
    """A rendezvous of forked processes through a file.

    A store on a port has a serving thread in the parent, which may hold a lock of the resolver at a fork: then the
    child would wait for it without end.
    """

    def __init__(self, port: int, run_id: str, folder: Path) -> None:
        super().__init__(port, run_id)
        self._folder = folder
        self._attempts = 0

    def next_rendezvous(self) -> RendezvousInfo:
        """Return a store, with rank 0 of 1 machine."""
        if self._port and is_port_in_use(self._port):
            raise port_is_taken(self._port)
        environment.set_variables({"TRAINER_LIB_STORE_FILE": str(self._folder / f"store_{self._attempts}")})
        self._attempts += 1
        # The port is for functions that form another group.
        return RendezvousInfo(dist.HashStore(), 0, 1, RendezvousStoreInfo(LOCALHOST, self._port or free_port()))


class MachineRound(NamedTuple):
    """What the launchers of several machines agree on each time they start their processes.

    Args:
        place: The address of the store of the processes.
        served: That store, on the first machine.
        restarts: How many restarts have been used, on any machine.
    """

    place: RendezvousStoreInfo
    served: dist.TCPStore | None
    restarts: int


def agree_on_round(launchers: dist.Store, machine: int, machines: int, address: str | None, used: int) -> MachineRound:
    """Serve a new store to the processes of all machines, and count the restarts of all.

    Processes that start again would find the addresses of processes that have ended in a store of an earlier round, and
    would not find each other if machines counted apart: torch puts the count before all names.

    Args:
        launchers: The store of the launchers, new in each round.
        machine: The rank of this machine.
        machines: How many there are.
        address: The address of this machine for the others; `None`: its host name.
        used: How many restarts this machine has counted.
    """
    store = dist.PrefixStore("round", launchers)
    store.set(f"restarts_{machine}", str(used))
    restarts = max(int(store.get(f"restarts_{other}")) for other in range(machines))
    served = None
    if machine == 0:
        served = dist.TCPStore(address or socket.getfqdn(), 0, is_master=True, wait_for_workers=False)
    place = RendezvousStoreInfo.build(machine, store, address, served and served.port)
    return MachineRound(place, served, restarts)


def wait_interruptibly(call: Callable[[], Any]) -> Any:
    """Return what a call returns that waits for other machines in C++, where Python could not answer a signal."""
    outcome: Future[Any] = Future()

    def wait() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            outcome.set_exception(error)

    threading.Thread(target=wait, daemon=True).start()
    return outcome.result()


def _serve(port: int) -> dist.TCPStore:
    try:
        return dist.TCPStore(LOCALHOST, port, is_master=True, wait_for_workers=False)
    except dist.DistNetworkError as error:
        raise port_is_taken(port) from error
