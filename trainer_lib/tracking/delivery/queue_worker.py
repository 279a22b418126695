"""A queue per tracker, and the thread that delivers its entries, so that a tracker cannot hurt a run.

The step puts an entry into the queue and continues. The thread makes values plain, delivers them, retries with growing
pauses, and spools undelivered entries to disk. The step never waits for a tracker.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from trainer_lib.logging import get_logger
from trainer_lib.tracking.base import BuiltInTracker, GeneralTracker
from trainer_lib.tracking.delivery.entries import Entry, describe_error, plain, resolved
from trainer_lib.tracking.delivery.sender import ChildDelivery, Delivery, DeliveryError, LocalDelivery
from trainer_lib.tracking.delivery.spool import Spool

_logger = get_logger(__name__)

_AT_ONCE = 500  # entries per delivery
_POISON = 3  # failures in a row of the same entry before the next one is tried


@dataclass(frozen=True)
class Patience:
    """How long to wait for a tracker.

    Attributes:
        linger: Seconds in which entries gather before they are delivered together.
        start: Seconds for a tracker to start.
        call: Seconds for one delivery.
        artifact: Additional seconds for a delivery with files.
        finish: Seconds after the last entry for all deliveries and the tracker's end.
        working: Additional seconds for a tracker process that uses the CPU and so does not hang.
        first_pause: Seconds before the first retry; each further pause is twice as long.
        longest_pause: The longest pause, in seconds.
        capacity: The most entries in the queue.
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
    """The queue of one tracker, and its thread.

    Args:
        name: The tracker's name, for messages.
        kind: The tracker's class.
        delivery: How entries reach the tracker.
        spool: The store of undelivered entries.
        patience: How long to wait for the tracker.
    """

    kind: type[GeneralTracker]
    name: str
    spool: Spool
    lost: int

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
        self._delivered: list[Entry] = []  # those of the queue that are being delivered
        self._spooled: list[Entry] = []  # those of the spool that are being delivered
        self._busy_since: float | None = None
        self._lock = threading.Lock()  # guards these lists and `_is_cut`
        self._wake, self._has_started, self._is_done = threading.Event(), threading.Event(), threading.Event()
        self._spilling: threading.Thread | None = None
        self._outcome: str | None = None  # set when it is time to finish
        self._is_cut = self._is_started = self._is_warned = self._is_failing = False
        self._pause, self._retry_at = patience.first_pause, 0.0
        self._failures = 0
        self.last_error = ""
        self.lost = 0
        self.missing = 0  # undelivered at the end: lost, or spooled
        self._refused: set[str] = set()
        self._newest_step: int | None = 0 if getattr(kind, "drops_earlier_steps", False) else None
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    # -- on the step's thread ------------------------------------------------------------------------------------

    def put(self, entry: Entry) -> None:
        """Queue an entry, without waiting."""
        if self._newest_step is not None and entry.step is not None:
            self._newest_step = self._risen(entry.step, self._newest_step)
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
        """Wait until the tracker has started; return whether it has."""
        self._wake.set()
        return self._has_started.wait(timeout)

    def ask_to_finish(self, outcome: str) -> None:
        """Ask the thread to deliver all entries, and to finish the tracker."""
        self._outcome = outcome
        self._wake.set()

    def finish_by(self, deadline: float) -> None:
        """Wait until the thread is done or the deadline is reached; spool the remaining entries."""
        if any(entry.kind == "artifact" for entry in [*self._in_hand, *self._delivered, *self._queue]):
            deadline += self.patience.artifact
        self._is_done.wait(max(0.0, deadline - time.monotonic()))
        latest = deadline + self.patience.working
        while not self._is_done.is_set() and time.monotonic() < latest and self.delivery.computes(1.0):
            continue
        with self._lock:
            self._is_cut = True
        if not self._is_done.is_set():
            is_delivered = not (self._in_hand or self._delivered or self._queue)
            hung = "it did not finish in time" if is_delivered else "it did not accept all values in time"
            self.last_error = self.last_error or hung
            self.delivery.cut()
        if self._spilling is not None:
            self._spilling.join(1.0)
        with self._lock:
            self.spool.drop(self.delivery.done(self._spooled))
            cut = self._delivered[self.delivery.done(self._delivered) :]
            remaining = [*self._in_hand, *self._drain_queue()]
            self._in_hand, self._delivered = [], []
        self.spool.add(cut)
        self._spool_entries(remaining)
        self.spool.close()
        self._report_undelivered()

    # -- on the tracker's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_cut:
            self._wake.wait(self.patience.linger)
            outcome = self._outcome
            if outcome is None:
                self._wake.clear()
            if self._spilling is not None:
                self._spilling.join()  # spooled entries come first
            self._pump(is_last=outcome is not None)
            if outcome is not None:
                self._end(outcome)
                return

    def _pump(self, is_last: bool) -> None:
        """Deliver entries as long as the tracker accepts them."""
        while not self._is_cut:
            if self._is_failing and not is_last and time.monotonic() < self._retry_at:
                self._spool_entries(self._drain_queue())
                return
            try:
                self._start()
                sent = self._send_spooled() or self._send_queued()
            except BaseException as error:  # noqa: BLE001  # a tracker may raise anything, also SystemExit
                self._record_failure(error)
                if is_last and not (self._is_started and self._failures <= _POISON):
                    return  # otherwise a single entry may be what it rejects
                continue
            if sent or self._is_started:
                self._record_success()
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
            self._spooled = entries
            self._deliver(entries)
        except DeliveryError as error:
            self._drop_spooled(error.done)
            if error.done or self._failures < _POISON or len(following := self.spool.first(2)) < 2:
                raise
            # The tracker may reject the first entry. If it accepts the next one, the first is dropped.
            self._deliver(following[1:])
            self.lost += 1
            entries = following
        self._drop_spooled(len(entries))
        return True

    def _drop_spooled(self, count: int) -> None:
        with self._lock:
            if not self._is_cut:
                self.spool.drop(count)
                self._spooled: list[Entry] = []

    def _send_queued(self) -> bool:
        with self._lock:
            while self._queue and len(self._in_hand) < _AT_ONCE:
                self._in_hand.append(self._queue.popleft())
        if not self._in_hand:
            return False
        ready = [prepared for entry in self._in_hand if (prepared := self._prepared(entry)) is not None]
        with self._lock:
            if self._is_cut:
                return False
            self._in_hand, self._delivered = [], ready
        try:
            if ready:
                self._deliver(ready)
        except DeliveryError as error:
            with self._lock:
                if not self._is_cut:
                    self._delivered = []
                    self.spool.add(ready[error.done :])
            raise
        with self._lock:
            if not self._is_cut:
                self._delivered = []
        return True

    def _prepared(self, entry: Entry) -> Entry | None:
        if not issubclass(self.kind, BuiltInTracker):
            return resolved(entry)
        try:
            ready, refused = plain(entry, self.kind)
        except Exception as error:  # noqa: BLE001  # a value may raise anything when it is read
            self.lost += 1
            self._warn_unreadable(entry, error)
            return None
        for name, description in refused.items():
            self._warn_unsupported(name, description)
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
            except BaseException as error:  # noqa: BLE001  # a tracker may raise anything, also SystemExit
                if not self._is_cut:
                    self.last_error = self.last_error or _reason(error)
                    self._warn(f"it failed to finish: {_reason(error)}")
        self._is_done.set()

    # -- when it fails -------------------------------------------------------------------------------------------

    def _record_failure(self, error: BaseException) -> None:
        if self._is_cut:
            return
        self._failures += 1
        self._is_failing = True
        if isinstance(self.delivery, ChildDelivery):
            self._is_started = self.delivery.is_running  # otherwise it is started again
        self.last_error: str = _reason(error)
        self._retry_at = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, self.patience.longest_pause)
        self._warn(self.last_error)

    def _record_success(self) -> None:
        self._is_failing, self._failures, self._pause = False, 0, self.patience.first_pause

    def _drain_queue(self) -> list[Entry]:
        taken: list[Entry] = []
        while self._queue:
            try:
                taken.append(self._queue.popleft())
            except IndexError:  # the other thread took the last entry
                break
        return taken

    def _spool_entries(self, entries: list[Entry]) -> None:
        self.spool.add([prepared for entry in entries if (prepared := self._prepared(entry)) is not None])

    def _spill(self) -> None:
        """Spool the queue on a third thread: this one is the step's, and the tracker's is blocked."""
        if self._spilling is None or not self._spilling.is_alive():
            self._spilling = threading.Thread(target=lambda: self._spool_entries(self._drain_queue()), daemon=True)
            self._spilling.start()

    def _warn(self, reason: str) -> None:
        if self._is_warned:
            return
        self._is_warned = True
        storage = str(self.spool.path) if self.spool.path is not None else "memory"
        _logger.warning(
            "The tracker %s fails, and training continues: %s. Undelivered values are kept in %s and sent later.",
            self.name, reason, storage, main_process_only=False,
        )  # fmt: skip

    def _risen(self, step: int, newest: int) -> int | None:
        """Return the newest step; `None`, with a warning, at a step before it."""
        if step >= newest:
            return step
        _logger.warning(
            "The tracker %s drops values of a step before its last one: these are of step %d, and step %d is reported "
            "already. Log them without a step. Other trackers and a Trainer's history.jsonl keep them.",
            self.name, step, newest, main_process_only=False,
        )  # fmt: skip
        return None

    def _warn_unreadable(self, entry: Entry, error: Exception) -> None:
        names = ", ".join(map(str, entry.content))
        if names not in self._refused:
            self._refused.add(names)
            _logger.warning(
                "The tracker %s cannot take %s (%s): it is left out.", self.name, names, describe_error(error),
                main_process_only=False,
            )  # fmt: skip

    def _warn_unsupported(self, name: str, description: str) -> None:
        if name not in self._refused:
            self._refused.add(name)
            takes = "numbers and texts" if getattr(self.kind, "takes_texts", True) else "numbers"
            _logger.warning(
                "The tracker %s does not support %s, which is %s: the value is left out. log takes %s; "
                "images and tables go by log_images and log_table.", self.name, name, description, takes,
                main_process_only=False,
            )  # fmt: skip

    def _report_undelivered(self) -> None:
        waiting, lost = len(self.spool), self.lost + self.spool.lost
        self.missing: int = waiting + lost
        if not waiting and not lost:
            if self.last_error and not self._is_warned:
                self._warn(self.last_error)
            return
        parts: list[str] = []
        if waiting and self.spool.path is not None:
            parts.append(
                f"{waiting} points are kept in {self.spool.path}; run `trainer-lib track replay "
                f"{self.spool.path.parent}` "
                "to send them"
            )
        elif waiting:
            lost += waiting
        if lost:
            parts.append(f"{lost} points are lost")
        cause = f" ({self.last_error})" if self.last_error else ""
        _logger.warning(
            "The tracker %s is missing values%s: %s.", self.name, cause, ", and ".join(parts),
            main_process_only=False,
        )  # fmt: skip


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, DeliveryError) else describe_error(error)
