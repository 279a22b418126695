"""An S3 server in its own process, and a proxy that can drop its connections."""

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator

import pytest

from trainer_lib.processes.ports import free_port

LOOPBACK = "127.0.0.1"
_PATIENCE = 60.0


@contextlib.contextmanager
def server() -> Generator[int]:
    """Run the server; give its port."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", LOOPBACK, "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            until = time.monotonic() + _PATIENCE
            while not answers(port):
                assert process.poll() is None, "the server ended"
                assert time.monotonic() < until, "the server does not start"
                time.sleep(0.05)
            yield port
        finally:
            process.kill()


def answers(port: int) -> bool:
    """Whether something listens there."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=1):
            return True
    except OSError:
        return False


def speak(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Have s3fs go to a port, and not try for long."""
    import fsspec.config
    import s3fs

    variables = {
        "AWS_ENDPOINT_URL": f"http://{LOOPBACK}:{port}",
        "AWS_ACCESS_KEY_ID": "key-of-a-test",
        "AWS_SECRET_ACCESS_KEY": "secret-of-a-test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("trainer_lib.filesystem.remote_paths.PAUSES", (0.01, 0.02))
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)
    monkeypatch.setitem(fsspec.config.conf, "s3", {"default_block_size": 5 << 20})  # so that 8 MB are several parts
    s3fs.S3FileSystem.clear_instance_cache()


class Line:
    """A way to the server, over which so many bytes go, and no more until it is mended.

    Args:
        port: The port of the server.
    """

    def __init__(self, port: int) -> None:
        self.is_cut = threading.Event()
        self.has_stalled = threading.Event()
        self._to = port
        self._left: dict[str, int | None] = {"up": None, "down": None}
        self._stalls = self._once = False
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server((LOOPBACK, 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._listen, daemon=True).start()

    def cut_after(self, count: int, way: str = "up", stalls: bool = False, once: bool = False) -> None:
        """Cut all connections, and refuse further ones, after so many bytes "up" to the server or "down" from it.

        Args:
            count: The bytes.
            way: Which are counted.
            stalls: Let nothing through any more, instead of telling both ends.
            once: Mend it at once.
        """
        with self._lock:
            self._left[way], self._stalls, self._once = count, stalls, once

    def mend(self) -> None:
        """Let everything through again."""
        with self._lock:
            self._left = {"up": None, "down": None}
        self.is_cut.clear()
        self.has_stalled.clear()

    def close(self) -> None:
        """Refuse everything, for good."""
        self._listener.close()
        self._drop()

    def _listen(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        with near:
            if self.is_cut.is_set():
                return
            with socket.create_connection((LOOPBACK, self._to)) as far:
                self._open |= {near, far}
                back = threading.Thread(target=self._carry, args=(far, near, "down"), daemon=True)
                back.start()
                self._carry(near, far, "up")
                back.join()
                self._open -= {near, far}

    def _carry(self, source: socket.socket, target: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                part = data[: self._allowed(way, len(data))]
                target.sendall(part)
                if len(part) < len(data):
                    self._end()
        for connection in (source, target):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _allowed(self, way: str, count: int) -> int:
        with self._lock:
            left = self._left[way]
            if left is None:
                return count
            self._left[way] = max(left - count, 0)
            return min(left, count)

    def _end(self) -> None:
        if self._stalls:
            self.has_stalled.set()
            return
        if self._once:
            self.mend()
        else:
            self.is_cut.set()
        self._drop()

    def _drop(self) -> None:
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
