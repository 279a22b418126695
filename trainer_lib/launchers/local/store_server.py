"""The store of a launch, served by a process of its own.

The launcher runs it by its path, as `store_server.py SOCKET [--lazily] [--whole-torch]`: SOCKET is a listening socket
that it inherits. It ends when the launcher closes its input, or dies.
"""

import importlib.util
import os
import select
import socket
import sys
from datetime import timedelta
from types import ModuleType
from typing import Any

LAZILY, _WHOLE_TORCH = "--lazily", "--whole-torch"
_TIMEOUT = timedelta(minutes=5)  # of this process's own requests, of which there are none


def main() -> None:
    """Serve the store until the launcher has ended."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    if LAZILY in sys.argv:
        events = select.poll()  # not `select`, which takes descriptors below 1024 alone
        for source in (listener, sys.stdin):
            events.register(source, select.POLLIN)
        events.poll()
    store = serve(_distributed(), listener)
    sys.stdin.buffer.read()
    del store
    os._exit(0)


def serve(distributed: Any, listener: socket.socket) -> Any:
    """Return a store that serves a listening socket, which it takes over.

    Args:
        distributed: `torch.distributed`, or the compiled module behind it.
        listener: The socket.
    """
    host, port = listener.getsockname()
    options = {"is_master": True, "wait_for_workers": False, "timeout": _TIMEOUT}
    return distributed.TCPStore(host, port, master_listen_fd=listener.detach(), **options)


def _distributed() -> Any:
    if _WHOLE_TORCH in sys.argv:
        import torch.distributed

        return torch.distributed
    try:
        return _compiled_part()
    except Exception:  # noqa: BLE001 - such as a library that torch finds for itself
        os.execv(sys.executable, [sys.executable, *sys.argv, _WHOLE_TORCH])


def _compiled_part() -> Any:
    """Import the compiled part of torch alone, which takes a quarter of the time of `import torch`."""
    torch = importlib.util.find_spec("torch")
    for name in ("torch", "torch.distributed"):
        sys.modules[name] = ModuleType(name)
    sys.modules["torch"].__path__ = list((torch and torch.submodule_search_locations) or ())
    compiled: Any = importlib.import_module("torch._C")
    compiled._c10d_init()
    return compiled._distributed_c10d


if __name__ == "__main__":
    main()
