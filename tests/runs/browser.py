"""A headless Chromium, driven over pipes by the DevTools protocol."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--remote-debugging-pipe",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
TIMEOUT = 30.0


def find_browser() -> str | None:
    """Return the program, if it is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A browser with one page at a time.

    Attributes:
        problems: What the page wrote to its console as an error, and what was thrown in it.
        requests: What the page asked for.
    """

    def __init__(self, home: Path) -> None:
        program = find_browser()
        assert program is not None
        # For its temporary files, some of which it leaves behind; short, as paths of sockets have a limit.
        self._temporary = tempfile.TemporaryDirectory()
        read_commands, self._commands = os.pipe()
        self._answers, write_answers = os.pipe()
        # It reads from 3 and writes to 4, whatever numbers the pipes have here.
        shell = f'exec "$@" 3<&{read_commands} 4>&{write_answers}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", program, *FLAGS, f"--user-data-dir={home}", "about:blank"],
            pass_fds=(read_commands, write_answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"HOME": str(home), "TMPDIR": self._temporary.name},
        )
        os.close(read_commands)
        os.close(write_answers)
        self._number, self._rest, self._session = 0, b"", ""
        self.problems: list[str] = []
        self.requests: list[str] = []

    def __enter__(self) -> Self:
        """Attach to the page."""
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        answer = self.send("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = answer["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait(timeout=TIMEOUT)
        os.close(self._commands)
        os.close(self._answers)
        shutil.rmtree(self._temporary.name, ignore_errors=True)  # its last processes may still write there
        self._temporary.cleanup()

    def open(
        self, url: str, width: int = 1280, height: int = 900, is_dark: bool = False, is_phone: bool = False
    ) -> None:
        """Open a page, and wait until it is there."""
        scale = 2 if is_phone else 1
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": is_phone}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.problems, self.requests = [], []
        self.send("Page.navigate", url=url)
        self.wait_until(f"document.readyState === 'complete' && location.href === {json.dumps(url)}")

    def run(self, script: str) -> Any:
        """Return what a script gives."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_until(self, script: str) -> None:
        """Wait until a script gives what is true."""
        self._wait(lambda: bool(self.run(script)), script)

    def press(self, key: str, shift: bool = False) -> None:
        """Press a key."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        code = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}.get(
            key, 0
        )
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                text=text if kind == "keyDown" else "",
                windowsVirtualKeyCode=code,
                modifiers=8 if shift else 0,
            )

    def mouse(self, kind: str, x: float, y: float) -> None:
        """Move the mouse ("mouseMoved"), or press or release its button there."""
        button = {"mouseMoved": "none"}.get(kind, "left")
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=1)

    def screenshot(self, file: Path, whole: bool = False) -> None:
        """Write what is seen to a file, or the whole page."""
        picture = self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(picture["data"]))

    def send(self, method: str, **options: Any) -> dict[str, Any]:
        """Send a command, and return the answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": options}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._answers, 1 << 20)
            assert part, "the browser is gone"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, message: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(message["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and message["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(message["args"]))
        elif event == "Log.entryAdded" and message["entry"]["level"] in ("error", "warning"):
            self.problems.append(message["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(message["request"]["url"])

    def _wait(self, is_so: Callable[[], bool], told_as: str) -> None:
        until = time.monotonic() + TIMEOUT
        while not is_so():
            assert time.monotonic() < until, f"not so in {TIMEOUT} s: {told_as}"
