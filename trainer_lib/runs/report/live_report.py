"""A live report: a local web page that updates while its runs train."""

import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.runs.report.report_data import Source, contents
from trainer_lib.runs.report.report_page import page

_HOST = "127.0.0.1"


class LiveReport:
    """Serves the report of some runs on this machine only.

    Args:
        sources: The runs.
        port: The port; 0 selects a free one.

    Attributes:
        url: The address of the page.
    """

    def __init__(self, sources: Sequence[Source], port: int = 0) -> None:
        lock = threading.Lock()  # one reader at a time: histories are read incrementally

        def current_data() -> dict[str, Any]:
            with lock:
                return contents(sources, is_live=True)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                # Refuse requests of foreign pages whose host name resolves to this machine (DNS rebinding).
                if self.headers.get("Host", "").rpartition(":")[0] not in (_HOST, "localhost"):
                    self.send_error(403)
                elif self.path == "/":
                    self._answer("text/html", page(current_data()))
                elif self.path == "/data.json":
                    self._answer("application/json", json.dumps(current_data(), allow_nan=False, separators=(",", ":")))
                else:
                    self.send_error(404)

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing: a page polls every two seconds."""

            def _answer(self, kind: str, text: str) -> None:
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
            raise ConfigurationError(
                f"--port {port} cannot be used: {error}. Leave --port out to use a free one."
            ) from error
        self._server.daemon_threads = True
        self.url = f"http://{_HOST}:{self._server.server_port}/"

    def serve(self) -> None:
        """Serve until another thread calls `close`, or until Ctrl-C."""
        self._server.serve_forever(poll_interval=0.1)

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
