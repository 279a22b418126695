"""A local web server of pages that update while runs train."""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from trainer_lib.foundation.errors import ConfigurationError

_HOST = "127.0.0.1"

Answer = tuple[str, str]


class LivePages:
    """Serves pages on this machine only.

    Args:
        answer: A function that returns the content type and the text at a path; `None` for an unknown path. One thread
            at a time calls it.
        port: The port; 0 selects a free one.

    Attributes:
        url: The address of the first page.
    """

    def __init__(self, answer: Callable[[str], Answer | None], port: int = 0) -> None:
        lock = threading.Lock()  # histories are read incrementally

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                # Refuse requests of foreign pages whose host name resolves to this machine (DNS rebinding).
                if self.headers.get("Host", "").partition(":")[0] not in (_HOST, "localhost"):
                    self.send_error(403)
                    return
                with lock:
                    found = answer(urlsplit(self.path).path)
                if found is None:
                    self.send_error(404)
                else:
                    self._send(*found)

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing: a page polls every two seconds."""

            def _send(self, kind: str, text: str) -> None:
                body = text.encode()
                self.send_response(200)
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                self.wfile.write(body)

        try:
            self._server = ThreadingHTTPServer((_HOST, port), Handler)
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "ports are numbers from 0 to 65535"
            raise ConfigurationError(
                f"--port {port} cannot be used: {reason}. Leave --port out to use a free one."
            ) from error
        self._server.daemon_threads = True
        self.url: str = f"http://{_HOST}:{self._server.server_port}/"

    def serve(self) -> None:
        """Serve until another thread calls `close`, or until Ctrl-C."""
        self._server.serve_forever(poll_interval=0.1)

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
