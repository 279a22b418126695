"""Ports of this machine."""

import socket

from trainer_lib.processes.ports import free_port, is_port_in_use


def test_a_port_is_in_use_while_somebody_listens() -> None:
    port = free_port()
    assert not is_port_in_use(port)
    with socket.create_server(("127.0.0.1", port)):
        assert is_port_in_use(port)
    assert is_port_in_use() == is_port_in_use(29500)
