"""Messages about a run to a webhook or to Slack: started, evaluated, new best, ended."""

import json
import math
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

from trainer_lib.events import Callback, Run
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, unknown
from trainer_lib.logging import get_logger
from trainer_lib.options.base import check_positive

_logger = get_logger(__name__)

Event = Literal["started", "evaluated", "best", "ended"]
_EVENTS = ("started", "evaluated", "best", "ended")
_WAITING = 100  # the longest queue; more messages are dropped


class Webhook(Callback):
    """Posts JSON to a URL when a run starts and when it ends, for whatever reason, on rank 0.

    A message is `{"event", "run", "status", "reason", "step", "epoch", "metrics"}`. A thread sends it, so no step
    waits; at the end of training the run waits for at most `timeout`. If the server refuses, hangs or cannot be
    reached, the message is lost and the run warns once. A killed process sends nothing.

    Args:
        url: The URL to post to. Warnings name only its host, since the rest is often a secret.
        events: The events to post: "started", "evaluated" (each evaluation), "best" (each new best), "ended".
        headers: Additional headers, such as {"Authorization": "Bearer …"}.
        timeout: The number of seconds to wait for the server.

    Example:
        >>> callback = Webhook("https://example.org/hook", events=["ended"])
    """

    events: "tuple[Event, ...]"
    timeout: float
    url: str

    order = 100  # after the callbacks that add metrics

    def __init__(
        self,
        url: str,
        events: Sequence[Event] = ("started", "ended"),
        headers: Mapping[str, str] | None = None,
        timeout: float = 5.0,
    ) -> None:
        self._host = _host_of(url)
        names: Any = (events,) if isinstance(events, str) else events
        for event in names:
            if event not in _EVENTS:
                raise ConfigurationError(unknown("event", event, _EVENTS))
        check_positive("timeout", timeout)
        self.url, self.events, self.timeout = url, tuple(names), float(timeout)
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        # Made while a run sends, so that search() can copy the callback.
        self._queue: queue.Queue[bytes | None] | None = None
        self._thread: threading.Thread | None = None
        self._error: str | None = None
        self._has_warned = False

    def message(self, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the JSON body to post; override it for a server that expects another form."""
        return facts

    def on_fit_begin(self, run: Run) -> None:
        self._error, self._has_warned = None, False
        self._post(run, "started")

    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        if run.state.status == "running":
            self._post(run, "evaluated", metrics)

    def on_best(self, run: Run, metric: str, value: float) -> None:
        self._post(run, "best", {metric: value})

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._error = f"{type(error).__name__}: {error}"

    def on_fit_end(self, run: Run) -> None:
        self._post(run, "ended", dict(run.metrics))
        if self._thread is not None:
            self._put(None)
            self._thread.join(self.timeout)
        self._queue = self._thread = None

    def _post(self, run: Run, event: str, metrics: Mapping[str, float] | None = None) -> None:
        if event not in self.events or not run.is_main_process:
            return
        state = run.state
        facts: dict[str, Any] = {"event": event, "run": state.run_id, "status": state.status}
        facts |= {"reason": self._error or state.reason, "step": state.step, "epoch": state.epochs}
        facts["metrics"] = {name: _plain(value) for name, value in (metrics or {}).items()}
        if self._thread is None:
            self._queue = queue.Queue(_WAITING)
            self._thread = threading.Thread(target=self._send_all, args=(self._queue,), name="webhook", daemon=True)
            self._thread.start()
        self._put(json.dumps(self.message(facts)).encode())

    def _put(self, body: bytes | None) -> None:
        assert self._queue is not None
        try:
            self._queue.put_nowait(body)
        except queue.Full:
            self._warn(f"the queue is full ({_WAITING} messages)")

    def _send_all(self, waiting: "queue.Queue[bytes | None]") -> None:
        while (body := waiting.get()) is not None:
            try:
                self._send(body)
            except Exception as error:  # noqa: BLE001 - a failing server never ends a run
                self._warn(_reason(error))

    def _send(self, body: bytes) -> None:
        request = urllib.request.Request(self.url, body, self._headers, method="POST")
        with urllib.request.urlopen(request, timeout=self.timeout):
            pass

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _logger.warning("A message to %s could not be sent: %s. Training continues.", self._host, reason)


class Slack(Webhook):
    """Posts to a Slack channel (or a compatible server such as Mattermost), like `Webhook`.

    Args:
        url: The URL of the incoming webhook: "https://hooks.slack.com/services/…".
        events: See `Webhook`.
        headers: See `Webhook`.
        timeout: See `Webhook`.

    Example:
        >>> Slack("https://hooks.slack.com/services/T0/B0/x").message(
        ...     {"event": "ended", "run": "digits-1a2b", "status": "finished", "reason": None, "step": 500,
        ...      "epoch": 2.0, "metrics": {"eval_loss": 0.25}}
        ... )
        {'text': 'Run digits-1a2b finished at step 500, epoch 2: eval_loss 0.25'}
    """

    def message(self, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a line of text."""
        event, run = facts["event"], f"Run {facts['run']}".rstrip()
        status = {"ended": facts["status"], "best": "is the best so far"}.get(event, event)
        text = f"{run} {status} at step {facts['step']}, epoch {facts['epoch']:.4g}"
        if facts["reason"]:
            text += f" ({facts['reason']})"
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in facts["metrics"].items() if value is not None)
        return {"text": f"{text}: {numbers}" if numbers else text}


def _host_of(url: Any) -> str:
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(f"url must be an address such as https://example.org/hook (got {shown(url)}).")
    return parts.hostname


def _plain(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        error.close()  # it is the answer too
        return f"the server answers {error.code} {error.reason}"
    return str(getattr(error, "reason", error)) or type(error).__name__
