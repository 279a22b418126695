"""Tests of Webhook and Slack, with real local servers that answer, hang or refuse."""

import json
import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.trainer.tasks import arguments, points, trainer
from tests.worlds import run_world
from trainer_lib.callbacks.notifications import Slack, Webhook
from trainer_lib.events import Modifier, Run
from trainer_lib.foundation.errors import ConfigurationError


@contextmanager
def server(status: int = 200) -> Generator[tuple[str, list[dict[str, Any]]]]:
    """Return the URL of a server, and what it was told."""
    posts: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            posts.append({**json.loads(body), "token": self.headers.get("Authorization")})
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}/secret", posts
        finally:
            listening.shutdown()
            thread.join()


class Fails(Modifier):
    def on_step_end(self, run: Run) -> None:
        if run.state.step == 3:
            raise ValueError("no such thing")


def test_a_run_tells_when_it_starts_is_better_and_ends() -> None:
    with server() as (url, posts):
        events: Any = ["started", "evaluated", "best", "ended"]
        callback = Webhook(url, events, {"Authorization": "Bearer t"})
        result = trainer(arguments(num_train_epochs=1), eval_dataset=points(8), callbacks=[callback]).fit()
    assert [message["event"] for message in posts] == ["started", "evaluated", "best", "ended"]
    assert {message["token"] for message in posts} == {"Bearer t"}
    assert [message["step"] for message in posts] == [0, 5, 5, 5]
    assert posts[1]["metrics"] == {"eval_loss": result.metrics["eval_loss"]}
    assert (posts[3]["status"], posts[3]["reason"]) == ("finished", None)


def test_one_event_may_come_by_its_name_alone() -> None:
    with server() as (url, posts):
        trainer(arguments(num_train_epochs=1), callbacks=[Webhook(url, "ended")]).fit()  # type: ignore[arg-type]
    assert [message["event"] for message in posts] == ["ended"]


def test_a_run_that_fails_tells_why() -> None:
    with server() as (url, posts), pytest.raises(ValueError, match="no such thing"):
        trainer(callbacks=[Slack(url, ["ended"]), Fails()]).fit()
    assert [message["text"] for message in posts] == ["Run failed at step 3, epoch 0.6 (ValueError: no such thing)"]


def test_a_server_that_hangs_keeps_the_run_for_its_timeout_only(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:  # takes connections, and never answers
        callback = Webhook(f"http://127.0.0.1:{listening.getsockname()[1]}/secret", timeout=0.3)
        began = time.monotonic()
        assert trainer(arguments(max_steps=2), callbacks=[callback]).fit().status == "finished"
        assert time.monotonic() - began < 20
    for thread in threading.enumerate():  # it gives up later, and would warn in the next test
        if thread.name == "webhook":
            thread.join(60)
    assert sum("could not be sent" in record.getMessage() for record in caplog.records) <= 1
    assert "secret" not in caplog.text


@pytest.mark.parametrize("is_there", [False, True])
def test_a_server_that_refuses_costs_one_warning(is_there: bool, caplog: pytest.LogCaptureFixture) -> None:
    with server(status=500) as (url, posts):
        pass_on = url if is_there else "http://127.0.0.1:9/secret"
        assert trainer(arguments(max_steps=2), callbacks=[Webhook(pass_on)]).fit().status == "finished"
    assert len(posts) == (2 if is_there else 0)
    (line,) = [record.getMessage() for record in caplog.records if "could not be sent" in record.getMessage()]
    assert line.startswith("A message to 127.0.0.1 could not be sent: ")
    assert ("the server answers 500" in line) is is_there


def _train_and_tell(url: str) -> str:
    return trainer(arguments(max_steps=2), callbacks=[Webhook(url)]).fit().status


def test_only_rank_0_posts() -> None:
    with server() as (url, posts):
        assert run_world(_train_and_tell, (url,), 2, timeout=60) == ["finished"] * 2
    assert [message["event"] for message in posts] == ["started", "ended"]


def test_invalid_webhook_options_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"url must be an address such as https://example\.org/hook \(got 'x'\)"
    ):
        Webhook("x")
    with pytest.raises(ConfigurationError, match=r"Unknown event 'end'.*Did you mean 'ended'"):
        Webhook("http://x/", ["end"])  # type: ignore[list-item]
