"""A Hub on this machine for tests, which speaks as much as its client needs to make a repository and a commit."""

import base64
import hashlib
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN, READER = "hf_of_me", "hf_that_only_reads"


@dataclass
class Hub:
    """What there is, and what was asked for.

    Attributes:
        files: The files of each repository.
        commits: The messages of its commits.
        private: Whether it can be seen by its owner only.
        asked: All requests, as "POST /api/…".
        failing: Statuses that the next requests are answered with, by a part of their path.
    """

    url: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict[str, dict[str, bytes]])
    commits: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    private: dict[str, Any] = field(default_factory=dict[str, Any])
    asked: list[str] = field(default_factory=list[str])
    failing: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    large: dict[str, bytes] = field(default_factory=dict[str, bytes])

    def answer(self, method: str, path: str, token: str, body: bytes) -> tuple[int, Any]:
        """Return the status and the answer to a request."""
        self.asked.append(f"{method} {path}")
        for part, statuses in self.failing.items():
            if part in path and statuses:
                return statuses.pop(0), {"error": "not now"}
        if path.startswith("/large/"):
            return self._stored(path.rpartition("/")[2], method, body)
        if token not in (TOKEN, READER):
            return 401, {"error": "Invalid username or password."}
        if path == "/api/repos/create":
            return self._create(token, json.loads(body))
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.endswith("/info/lfs/objects/batch"):
            return 200, {"objects": [self._place(item) for item in json.loads(body)["objects"]]}
        _, _, _, owner, name, *verb = path.split("/")
        if f"{owner}/{name}" not in self.files or not verb:
            return 404, {"error": "Repository not found"}
        return getattr(self, f"_{verb[0]}")(f"{owner}/{name}", body)

    def _create(self, token: str, asked: dict[str, Any]) -> tuple[int, Any]:
        owner = asked.get("organization") or "me"
        name = f"{owner}/{asked['name']}"
        reply = {"url": f"{self.url}/{name}", "name": name}
        if owner != "me" or token == READER:
            return 403, {"error": f"You don't have the rights to create a model under the namespace {owner!r}."}
        if name in self.files:
            return 409, {**reply, "error": "You already created this model repo"}
        self.files[name], self.commits[name], self.private[name] = {}, [], asked.get("visibility")
        return 200, reply

    def _preupload(self, name: str, body: bytes) -> tuple[int, Any]:
        paths = [file["path"] for file in json.loads(body)["files"]]
        large = {True: "lfs", False: "regular"}
        return 200, {
            "files": [
                {"path": path, "uploadMode": large[path.endswith(".safetensors")], "shouldIgnore": False}
                for path in paths
            ]
        }

    def _place(self, item: dict[str, Any]) -> dict[str, Any]:
        return {**item, "actions": {"upload": {"href": f"{self.url}/large/{item['oid']}"}}}

    def _stored(self, oid: str, method: str, body: bytes) -> tuple[int, Any]:
        assert method == "PUT"
        assert hashlib.sha256(body).hexdigest() == oid
        self.large[oid] = body
        return 200, {}

    def _commit(self, name: str, body: bytes) -> tuple[int, Any]:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.commits[name].append(value["summary"])
            elif line["key"] == "file":
                self.files[name][value["path"]] = base64.b64decode(value["content"])
            else:
                self.files[name][value["path"]] = self.large[value["oid"]]
        oid = hashlib.sha1(body).hexdigest()
        reply = {"success": True, "commitOid": oid, "commitUrl": f"{self.url}/{name}/commit/{oid}"}
        return 200, {**reply, "pullRequestUrl": f"{self.url}/{name}/discussions/1"}


@contextmanager
def served() -> Generator[Hub]:
    """Return a Hub that is there for the length of a block."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            status, reply = hub.answer(self.command, self.path.partition("?")[0], token, body)
            content = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_PUT = do_GET = _answer  # noqa: N815 - the names of the server

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
