"""Functions of blocks that take too long are called, once each, by one thread that does not wake up for the others."""

import sys
import threading
import time
from collections.abc import Iterator

import pytest

from trainer_lib.launchers import run_forked
from trainer_lib.processes.deadlines import Deadlines

SOON, LATE = 0.05, 60.0  # seconds


@pytest.fixture
def deadlines() -> Iterator[Deadlines]:
    made = Deadlines()
    yield made
    made.end_thread()


def waited_for(event: threading.Event) -> bool:
    return event.wait(10)


def test_a_block_that_takes_too_long_is_told_once(deadlines: Deadlines) -> None:
    told: list[float] = []
    event = threading.Event()
    start = time.monotonic()
    with deadlines.call_after(SOON, lambda: (told.append(time.monotonic() - start), event.set())):
        assert waited_for(event)
        time.sleep(3 * SOON)
    assert len(told) == 1
    assert told[0] >= SOON


def test_a_block_that_ends_in_time_is_not(deadlines: Deadlines) -> None:
    told: list[str] = []
    after = threading.Event()
    with deadlines.call_after(20 * SOON, lambda: told.append("ended in time")):
        pass
    with deadlines.call_after(21 * SOON, after.set):
        assert waited_for(after)
    assert told == []


@pytest.fixture
def waits(deadlines: Deadlines, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the seconds that the thread has begun to wait for."""
    seconds: list[float] = []
    wait = deadlines._wake.wait
    monkeypatch.setattr(deadlines._wake, "wait", lambda timeout: seconds.append(timeout) or wait(timeout))
    return seconds


def test_an_earlier_deadline_wakes_the_thread_once(deadlines: Deadlines, waits: list[float]) -> None:
    event = threading.Event()
    with deadlines.call_after(LATE, event.clear):
        while not waits:
            time.sleep(0.001)
        with deadlines.call_after(SOON, event.set):
            assert waited_for(event)
            time.sleep(SOON)
    assert len(waits) <= 3


def test_blocks_share_a_thread_that_they_do_not_wake(deadlines: Deadlines, waits: list[float]) -> None:
    before = threading.active_count()
    for _ in range(100):
        with deadlines.call_after(LATE, print):
            assert threading.active_count() == before + 1
            while not waits:
                time.sleep(0.001)
    assert len(waits) == 1
    deadlines.end_thread()
    assert threading.active_count() == before


def test_the_thread_ends_where_no_block_is_left(deadlines: Deadlines) -> None:
    before = threading.active_count()
    with deadlines.call_after(SOON, print):
        pass
    ends = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < ends
        time.sleep(0.01)
    event = threading.Event()
    with deadlines.call_after(SOON, event.set):
        assert waited_for(event)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_function_that_raises_leaves_the_thread_to_others(
    deadlines: Deadlines, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda details: shown.append(details.exc_type))
    event = threading.Event()
    with deadlines.call_after(SOON, lambda: sys.exit(1)), deadlines.call_after(2 * SOON, event.set):
        assert waited_for(event)
    assert shown == [SystemExit]


def test_a_function_that_takes_long_delays_no_deadline_after_it(deadlines: Deadlines, waits: list[float]) -> None:
    event = threading.Event()
    with (
        deadlines.call_after(SOON, lambda: time.sleep(20 * SOON)),
        deadlines.call_after(22 * SOON, event.set),
    ):
        assert waited_for(event)
    assert max(waits) < 10 * SOON


def test_a_thread_that_cannot_be_started_fails_one_block_alone(
    deadlines: Deadlines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"), deadlines.call_after(LATE, print):
            pass
    event = threading.Event()
    with deadlines.call_after(SOON, event.set):
        assert waited_for(event)


def test_the_thread_can_be_ended_by_a_function_that_it_calls(deadlines: Deadlines) -> None:
    event = threading.Event()
    with deadlines.call_after(SOON, lambda: (deadlines.end_thread(), event.set())):
        assert waited_for(event)


def test_a_process_that_was_forked_in_the_middle_has_deadlines_of_its_own(deadlines: Deadlines) -> None:
    event = threading.Event()

    def body() -> tuple[bool, bool]:
        began = threading.active_count() == 1
        with deadlines.call_after(SOON, event.set):
            return began, waited_for(event)

    with deadlines.call_after(LATE, print), deadlines._lock:
        assert run_forked(body, num_processes=1) == [(True, True)]
