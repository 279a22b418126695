"""This file is what keeps a tracker from hurting a run: a queue, and a thread that empties it.

The step puts an entry into the queue, and goes on. The thread makes values plain, delivers them, tries again with
growing pauses, and keeps on disk what is not taken. Whatever a tracker does, the step does not wait for it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from trainer_lib.logging import get_logger
from trainer_lib.tracking.base import BuiltInTracker, GeneralTracker
from trainer_lib.tracking.delivery.entries import Entry, as_given, plain, told
from trainer_lib.tracking.delivery.sender import ChildDelivery, Delivery, DeliveryError, LocalDelivery
from trainer_lib.tracking.delivery.spool import Spool

_logger = get_logger(__name__)

_AT_ONCE = 500  # entries of one delivery
_POISON = 3  # so many times in a row the same entry failed, before the one after it is tried


@dataclass(frozen=True)
class Patience:
    """How long to wait for a tracker.

    Attributes:
        linger: Seconds in which entries gather, so that they are delivered together.
        start: Seconds that a tracker may take to begin.
        call: Seconds that it may take for one delivery.
        artifact: Seconds more where it is handed files.
        finish: Seconds, after the last entry, in which all has to be through.
        working: Seconds more for one in another process that is seen to compute, so that it does not hang.
        first_pause: Seconds before a second try; each next pause is twice as long.
        longest_pause: Seconds that a pause has at most.
        capacity: Entries that may wait in the queue.
    """

    linger: float = 0.5
    artifact: float = 300.0
    start: float = 120.0
    call: float = 30.0
    finish: float = 6.0
    working: float = 30.0
    first_pause: float = 1.0
    longest_pause: float = 30.0
    capacity: int = 10_000


class Worker:
    """The queue before one tracker, and the thread behind it.

    Args:
        name: The tracker's name, for messages.
        kind: Its class.
        delivery: The way to it.
        spool: Where entries are kept that it does not take.
        patience: How long to wait for it.
    """

    def __init__(
        self,
        name: str,
        kind: type[GeneralTracker],
        delivery: LocalDelivery | ChildDelivery,
        spool: Spool,
        patience: Patience,
    ) -> None:
        self.name, self.kind, self.spool = name, kind, spool
        self.delivery: Delivery = delivery
        self.patience = patience
        self._queue: deque[Entry] = deque()
        self._in_hand: list[Entry] = []
        self._busy_since: float | None = None
        self._lock = threading.Lock()  # over what is in hand, and whether there is a cut
        self._wake, self._has_started, self._is_through = threading.Event(), threading.Event(), threading.Event()
        self._spilling: threading.Thread | None = None
        self._outcome: str | None = None  # known when it is time to finish
        self._is_cut = self._is_started = self._is_warned = self._is_failing = False
        self._pause, self._retry_at = patience.first_pause, 0.0
        self._failures = 0
        self.last_error = ""
        self.lost = 0
        self.missing = 0  # what the tracker has not got in the end: what is lost, and what waits on disk
        self._refused: set[str] = set()
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    # -- on the step's thread ------------------------------------------------------------------------------------

    def put(self, entry: Entry) -> None:
        """Take an entry, without waiting for anything."""
        self._queue.append(entry)
        if len(self._queue) > self.patience.capacity:
            self._spill()
        else:
            since = self._busy_since
            if since is not None and time.monotonic() - since > self.patience.call and self._is_started:
                self._warn(f"it has not answered for {self.patience.call:.0f} s")
                if len(self._queue) >= _AT_ONCE:
                    self._spill()

    def wait_for_start(self, timeout: float) -> bool:
        """Wait until the tracker has begun; whether it has."""
        self._wake.set()
        return self._has_started.wait(timeout)

    def ask_to_finish(self, outcome: str) -> None:
        """Have all that waits delivered, and the tracker end."""
        self._outcome = outcome
        self._wake.set()

    def finish_by(self, deadline: float) -> None:
        """Wait until it is through, or for the deadline; what is left then is kept."""
        if any(entry.kind == "artifact" for entry in [*self._in_hand, *self._queue]):
            deadline += self.patience.artifact
        self._is_through.wait(max(0.0, deadline - time.monotonic()))
        latest = deadline + self.patience.working
        while not self._is_through.is_set() and time.monotonic() < latest and self.delivery.computes(1.0):
            continue
        with self._lock:
            self._is_cut = True
        if not self._is_through.is_set():
            hung = "it did not end in time" if not self._in_hand and not self._queue else "it does not take what waits"
            self.last_error = self.last_error or hung
            self.delivery.cut()
        if self._spilling is not None:
            self._spilling.join(1.0)
        with self._lock:
            left = [*self._in_hand, *self._taken()]
            self._in_hand = []
        self._keep(left)
        self.spool.close()
        self._tell_the_end()

    # -- on its own thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_cut:
            self._wake.wait(self.patience.linger)
            outcome = self._outcome
            if outcome is None:
                self._wake.clear()
            if self._spilling is not None:
                self._spilling.join()  # what is being put aside comes first
            self._pump(is_last=outcome is not None)
            if outcome is not None:
                self._end(outcome)
                return

    def _pump(self, is_last: bool) -> None:
        """Deliver what there is, as far as the tracker takes it."""
        while not self._is_cut:
            if self._is_failing and not is_last and time.monotonic() < self._retry_at:
                self._keep(self._taken())
                return
            try:
                self._start()
                sent = self._send_spooled() or self._send_queued()
            except Exception as error:  # noqa: BLE001  # a tracker may raise anything
                self._has_failed(error)
                if is_last:
                    return
                continue
            if sent or self._is_started:
                self._has_succeeded()
            if not sent:
                return

    def _start(self) -> None:
        if not self._is_started:
            self._watched(lambda: self.delivery.start(self.patience.start))
            self._is_started = True
            self._has_started.set()

    def _send_spooled(self) -> bool:
        if self.spool.is_empty:
            return False
        entries = self.spool.first(1 if self._failures else _AT_ONCE)
        try:
            self._deliver(entries)
        except DeliveryError as error:
            self.spool.drop(0 if self._is_cut else error.done)
            if error.done or self._failures < _POISON or len(following := self.spool.first(2)) < 2:
                raise
            # The first one may be what it cannot take. If it takes the one after it, this one is lost.
            self._deliver(following[1:])
            self.lost += 1
            entries = following
        if not self._is_cut:
            self.spool.drop(len(entries))
        return True

    def _send_queued(self) -> bool:
        with self._lock:
            while self._queue and len(self._in_hand) < _AT_ONCE:
                self._in_hand.append(self._queue.popleft())
        if not self._in_hand:
            return False
        ready = [one for entry in self._in_hand if (one := self._prepared(entry)) is not None]
        try:
            if ready:
                self._deliver(ready)
        except DeliveryError as error:
            with self._lock:
                if not self._is_cut:
                    self._in_hand = []
                    self.spool.add(ready[error.done :])
            raise
        with self._lock:
            if not self._is_cut:
                self._in_hand = []
        return True

    def _prepared(self, entry: Entry) -> Entry | None:
        if not issubclass(self.kind, BuiltInTracker):
            return as_given(entry)
        ready, refused = plain(entry, self.kind)
        for name, what in refused.items():
            self._refuse(name, what)
        return ready

    def _deliver(self, entries: list[Entry]) -> None:
        has_files = any(entry.kind == "artifact" for entry in entries)
        timeout = self.patience.call + (self.patience.artifact if has_files else 0)
        self._watched(lambda: self.delivery.deliver(entries, timeout))

    def _watched(self, call: Callable[[], None]) -> None:
        self._busy_since = time.monotonic()
        try:
            call()
        finally:
            self._busy_since = None

    def _end(self, outcome: str) -> None:
        if self._is_started:
            try:
                self.delivery.finish(outcome, self.patience.finish)
            except Exception as error:  # noqa: BLE001  # a tracker may raise anything
                if not self._is_cut:
                    self.last_error = self.last_error or _told(error)
                    self._warn(f"it did not end well: {_told(error)}")
        self._is_through.set()

    # -- when it fails -------------------------------------------------------------------------------------------

    def _has_failed(self, error: Exception) -> None:
        if self._is_cut:
            return
        self._failures += 1
        self._is_failing = True
        if isinstance(self.delivery, ChildDelivery):
            self._is_started = self.delivery.is_running  # else it is started anew
        self.last_error = _told(error)
        self._retry_at = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, self.patience.longest_pause)
        self._warn(self.last_error)

    def _has_succeeded(self) -> None:
        self._is_failing, self._failures, self._pause = False, 0, self.patience.first_pause

    def _taken(self) -> list[Entry]:
        taken: list[Entry] = []
        while self._queue:
            try:
                taken.append(self._queue.popleft())
            except IndexError:  # the other thread was faster
                break
        return taken

    def _keep(self, entries: list[Entry]) -> None:
        self.spool.add([one for entry in entries if (one := self._prepared(entry)) is not None])

    def _spill(self) -> None:
        """Have another thread keep what waits: this one is the step's, and the tracker's is held up."""
        if self._spilling is None or not self._spilling.is_alive():
            self._spilling = threading.Thread(target=lambda: self._keep(self._taken()), daemon=True)
            self._spilling.start()

    def _warn(self, reason: str) -> None:
        if self._is_warned:
            return
        self._is_warned = True
        where = f"kept in {self.spool.path}" if self.spool.path is not None else "kept in memory"
        _logger.warning(
            "The tracker %s fails, and training goes on: %s. What it does not take is %s, and sent when it takes it.",
            self.name, reason, where, main_process_only=False,
        )  # fmt: skip

    def _refuse(self, name: str, what: str) -> None:
        if name not in self._refused:
            self._refused.add(name)
            _logger.warning(
                "The tracker %s does not take %s, which is %s: it is left out.", self.name, name, what,
                main_process_only=False,
            )  # fmt: skip

    def _tell_the_end(self) -> None:
        waiting, lost = len(self.spool), self.lost + self.spool.lost
        self.missing = waiting + lost
        if not waiting and not lost:
            if self.last_error and not self._is_warned:
                self._warn(self.last_error)
            return
        parts: list[str] = []
        if waiting and self.spool.path is not None:
            parts.append(
                f"{waiting} points wait in {self.spool.path}; `trainer-lib track replay {self.spool.path.parent}` "
                "sends them"
            )
        elif waiting:
            lost += waiting
        if lost:
            parts.append(f"{lost} points are lost")
        because = f" ({self.last_error})" if self.last_error else ""
        _logger.warning(
            "The tracker %s has not got everything%s: %s.", self.name, because, ", and ".join(parts),
            main_process_only=False,
        )  # fmt: skip


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, DeliveryError) else told(error)
