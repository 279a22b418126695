"""The address at which other machines reach this one."""

import contextlib
import socket

from trainer_lib.processes.ports import is_port_in_use


def own_address(endpoint: str) -> str | None:
    """Return the address of this machine on the network of an endpoint; `None` if there is no way to it.

    The name of a machine does not always help: it may belong to another network, mean localhost, or be unknown.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_parts(endpoint))  # sends nothing, and chooses the interface
        return probe.getsockname()[0]
    return None


def serves_rendezvous(endpoint: str) -> bool | None:
    """Whether an endpoint is an address of this machine; `None` where torch finds that out by the machine's name."""
    host, port = _parts(endpoint)
    address = own_address(endpoint)
    if address is None or address.startswith("127."):
        return None
    is_own = address == socket.gethostbyname(host)
    try:
        by_name = {str(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        return is_own
    return True if is_own and address not in by_name and not is_port_in_use(port) else None


def _parts(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.partition(":")
    return host, int(port or 29400)  # torch's default
