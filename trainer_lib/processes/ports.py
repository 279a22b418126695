"""The ports of this machine: whether one is in use, and finding a free one."""

import socket

_DEFAULT = 29500  # the default MASTER_PORT


def is_port_in_use(port: int | None = None) -> bool:
    """Whether a program of this machine listens on `port` (29500 by default)."""
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", _DEFAULT if port is None else port)) == 0


def free_port() -> int:
    """Return a port that no program listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
