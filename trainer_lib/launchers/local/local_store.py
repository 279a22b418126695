"""The store of the processes of one machine: at a port that is bound at once, and served a little later."""

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trainer_lib.foundation.errors import WorldError
from trainer_lib.launchers.launch_plan import LOCALHOST
from trainer_lib.launchers.local import store_server
from trainer_lib.launchers.process_failures import Failure


class LocalStore:
    """A store for the processes of this machine, until the context ends.

    The port listens at once, and a process that connects waits for the server. The server is a process of its own, so
    that the launcher starts its processes without importing torch first; where torch is imported already, this process
    serves the store.

    Args:
        port: The port; 0 for a free one.
        is_lazy: Whether to serve it only once a process connects.

    Raises:
        WorldError: If the port cannot be used.
    """

    def __init__(self, port: int, *, is_lazy: bool = False) -> None:
        self._is_lazy = is_lazy
        self._server: subprocess.Popen[bytes] | None = None
        self._served: Any = None
        try:
            self._listener = socket.create_server((LOCALHOST, port), backlog=socket.SOMAXCONN)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise port_is_taken(port) from error
            reason = os.strerror(error.errno or 0)
            raise WorldError(f"Port {port} cannot be used: {reason}. Leave it out to use a free one.") from error
        self.address: str = LOCALHOST
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        """Start the server."""
        if "torch" in sys.modules:
            import torch.distributed

            self._served = store_server.serve(torch.distributed, self._listener)
            return self
        descriptor = self._listener.fileno()
        words = [sys.executable, str(Path(store_server.__file__)), str(descriptor)]
        # A session of its own: the processes may need it to save after a Ctrl-C.
        self._server = subprocess.Popen(
            words + [store_server.LAZILY] * self._is_lazy,
            stdin=subprocess.PIPE,
            pass_fds=[descriptor],
            start_new_session=True,
        )
        self._listener.close()
        return self

    @property
    def is_dead(self) -> bool:
        """Whether the server has ended: processes that connect would wait for minutes."""
        return self._server is not None and self._server.poll() is not None

    def died(self) -> WorldError:
        """Return the error for a server that has ended."""
        assert self._server is not None
        end = Failure(rank=0, exit_code=self._server.wait())
        return WorldError(
            f"The process that serves the store, where the ranks meet, {end.how}. All ranks were asked to save and end."
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        """Release the port."""
        self._served = None
        if self._server is not None:
            self._server.kill()
            self._server.communicate()


def port_is_taken(port: int) -> WorldError:
    """Return the error for a port that is in use."""
    return WorldError(f"Port {port} is in use by another program. Use another port, or leave it out to use a free one.")
