"""The address at which other machines reach this one."""

import contextlib
import re
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


def split_endpoint(endpoint: str) -> tuple[str, str]:
    """Return the host and the port of an endpoint; an empty port if it has none.

    Example:
        >>> split_endpoint("10.0.0.1:29500"), split_endpoint("[fd00::1]:29500"), split_endpoint("worker-1")
        (('10.0.0.1', '29500'), ('fd00::1', '29500'), ('worker-1', ''))
    """
    in_brackets = re.fullmatch(r"\[(.*)\](?::(.*))?", endpoint)
    if in_brackets is not None:
        return in_brackets[1], in_brackets[2] or ""
    host, colon, port = endpoint.rpartition(":")
    return (host, port) if colon else (endpoint, "")


def _parts(endpoint: str) -> tuple[str, int]:
    host, port = split_endpoint(endpoint)
    return host, int(port or 29400)  # torch's default
