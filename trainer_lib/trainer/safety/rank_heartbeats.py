"""Where the other ranks are: each rank answers the others over TCP, without a store and without rank 0."""

import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from trainer_lib.foundation.light_dataclasses import LightDataclass
from trainer_lib.process_group import ProcessGroup
from trainer_lib.processes.proc_stat import began_at

_LOCALHOST = "127.0.0.1"
_OUTSIDE = "192.0.2.1"  # an address that no host has; nothing is sent to it
_ANY_PORT = 9
_BLOCK = 1 << 16
_END = b"\n"  # of an answer: a forked data worker may keep the connection open

Facts = dict[str, Any]


@dataclass(repr=False, eq=False)
class _Question(LightDataclass):
    """A connection to another rank that has not answered yet."""

    rank: int
    received: bytes = b""


@dataclass(repr=False, eq=False)
class Answers(LightDataclass):
    """What other ranks answered.

    Attributes:
        facts: What they said, by rank.
        refused: The ranks where nobody listens any more.
    """

    facts: dict[int, Facts] = field(default_factory=dict[int, Facts])
    refused: set[int] = field(default_factory=set[int])


class Peers:
    """Answers the other ranks of a group, and asks them. All ranks have to construct it; one thread uses it then.

    Args:
        group: The ranks. They exchange their addresses through it, once.
        tell: Returns what this rank answers; it has to be JSON.
        master: The address at which the ranks met, if that is known.
    """

    def __init__(self, group: ProcessGroup, tell: Callable[[], Facts], master: str | None = None) -> None:
        self._rank, self._tell = group.rank, tell
        self._selector = selectors.DefaultSelector()
        self._waker, self._wakes = socket.socketpair()
        self._is_closed = False
        self._selector.register(self._wakes, selectors.EVENT_READ, self._close)
        host = socket.gethostname()
        is_local = len(set(group.all_gather_objects(host))) == 1
        self._server = _listen(is_local) if group.size > 1 else None
        addresses = [_LOCALHOST] if is_local else _own_addresses(master, host)
        card: Facts = {
            "host": host,
            "addresses": addresses,
            "port": None if self._server is None else self._server.getsockname()[1],
            "token": secrets.token_hex(16),
            "process": _own_process(),
        }
        self._token = card["token"].encode()
        self._cards: list[Facts] = group.all_gather_objects(card)
        self._attempts = dict.fromkeys(range(group.size), 0)  # at other addresses of a rank that did not answer
        if self._server is not None:
            self._selector.register(self._server, selectors.EVENT_READ, self._accept)

    @property
    def can_answer(self) -> bool:
        """Whether all ranks listen."""
        return len(self._cards) == 1 or all(card["port"] is not None for card in self._cards)

    @property
    def ranks(self) -> list[int]:
        """The other ranks."""
        return [rank for rank in range(len(self._cards)) if rank != self._rank]

    def serve(self, seconds: float) -> bool:
        """Answer the others for some time; return whether `close` was called."""
        self._run_until(time.monotonic() + seconds, lambda: self._is_closed)
        return self._is_closed

    def ask(self, ranks: Iterable[int], patience: float) -> Answers:
        """Ask other ranks, and answer them meanwhile.

        Args:
            ranks: Whom.
            patience: The seconds after which those that did not answer are given up.
        """
        answers, pending = Answers(), dict[socket.socket, _Question]()
        for rank in ranks:
            self._connect(rank, answers, pending)
        self._run_until(time.monotonic() + patience, lambda: self._is_closed or not pending)
        for connection in list(pending):
            self._attempts[pending[connection].rank] += 1
            self._drop(connection, pending)
        return answers

    def kill(self, rank: int) -> bool:
        """Kill the process of another rank, if it runs on this machine; return whether it did."""
        process, own = self._cards[rank]["process"], self._cards[self._rank]["process"]
        if process is None or own is None or process["space"] != own["space"] or process != _process(process["pid"]):
            return False
        with suppress(OSError):
            os.kill(process["pid"], 9)
            return True
        return False

    def close(self) -> None:
        """End `serve` and `ask`, from another thread."""
        self._waker.send(b"x")

    def release(self) -> None:
        """Close all connections, once no thread uses them."""
        for key in list(self._selector.get_map().values()):
            self._drop(key.fileobj, {})
        self._selector.close()
        self._waker.close()

    # -- connections ---------------------------------------------------------------------------------------------

    def _run_until(self, deadline: float, is_done: Callable[[], bool]) -> None:
        while not is_done() and (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                key.data(key.fileobj)

    def _close(self, wakes: socket.socket) -> None:
        wakes.recv(1)
        self._is_closed = True

    def _accept(self, server: socket.socket) -> None:
        with suppress(OSError):
            connection, _ = server.accept()
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, self._answer)

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError):
            if secrets.compare_digest(connection.recv(len(self._token)), self._token):
                connection.sendall(json.dumps(self._tell()).encode() + _END)
        self._drop(connection, {})

    def _connect(self, rank: int, answers: Answers, pending: dict[socket.socket, _Question]) -> None:
        address = self._address(rank)
        connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        connection.setblocking(False)
        pending[connection] = _Question(rank)
        send = partial(self._send, answers=answers, pending=pending)
        self._selector.register(connection, selectors.EVENT_WRITE, send)
        with suppress(OSError):  # an error shows when the connection is written to
            connection.connect_ex((address, self._cards[rank]["port"]))

    def _address(self, rank: int) -> str:
        card, own = self._cards[rank], self._cards[self._rank]
        addresses = [*([_LOCALHOST] if card["host"] == own["host"] else []), *card["addresses"]]
        return addresses[self._attempts[rank] % len(addresses)]

    def _send(self, connection: socket.socket, answers: Answers, pending: dict[socket.socket, _Question]) -> None:
        rank = pending[connection].rank
        try:
            if error := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error, os.strerror(error))
            connection.sendall(self._cards[rank]["token"].encode())
        except OSError:
            self._attempts[rank] += 1
            answers.refused.add(rank)
            self._drop(connection, pending)
            return
        receive = partial(self._receive, answers=answers, pending=pending)
        self._selector.modify(connection, selectors.EVENT_READ, receive)

    def _receive(self, connection: socket.socket, answers: Answers, pending: dict[socket.socket, _Question]) -> None:
        question = pending[connection]
        try:
            received = connection.recv(_BLOCK)
        except OSError:
            received = b""
        question.received += received
        if not received or received.endswith(_END):
            with suppress(ValueError):  # from a port that another program has by now
                answers.facts[question.rank] = json.loads(question.received)
            if question.rank not in answers.facts:
                self._attempts[question.rank] += 1
            self._drop(connection, pending)

    def _drop(self, connection: Any, pending: dict[socket.socket, _Question]) -> None:
        pending.pop(connection, None)
        self._selector.unregister(connection)
        connection.close()


def _listen(is_local: bool) -> socket.socket | None:
    try:
        if is_local:
            server = socket.create_server((_LOCALHOST, 0), backlog=1024)
        elif socket.has_dualstack_ipv6():
            server = socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
        else:
            server = socket.create_server(("", 0), backlog=1024)
    except OSError:
        return None
    server.setblocking(False)
    return server


def _own_addresses(master: str | None, host: str) -> list[str]:
    """Return the addresses at which other machines may reach this one, the likeliest first."""
    found: list[str] = []
    for target in (master, _OUTSIDE):
        with suppress(OSError):
            if target is not None:
                family, *_, address = socket.getaddrinfo(target, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect(address)
                    found.append(probe.getsockname()[0])
    with suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    others = [address for address in dict.fromkeys(found) if not address.startswith("127.") and address != "::1"]
    return others or [_LOCALHOST]


def _own_process() -> Facts | None:
    return _process(os.getpid())


def _process(pid: int) -> Facts | None:
    """Return by what a process is known on its machine, where the kernel tells that; `None` elsewhere."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - it points to nothing
        # The system uses pids again, so the time of the start identifies the process.
        return {"pid": pid, "space": f"{boot} {space}", "began": began_at(pid)}
    except OSError:
        return None
