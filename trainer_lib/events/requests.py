"""Requests of callbacks to the training loop, synchronized across ranks."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from trainer_lib.processes.exit_codes import Interruption

if TYPE_CHECKING:
    from trainer_lib.process_group import ProcessGroup


class Control:
    """The requests of a run. Setting one to `True` makes the request; setting it to `False` has no effect.

    A request takes effect at the end of a step. In a world of one rank, that is the step in which it is made. With
    several ranks, it is the step whose gradients carry the request to all of them: the current one if the request is
    made before or during `backward`, else the next. A request made at the end of an evaluation or of an epoch takes
    effect at once.

    Attributes:
        reason: Why training should stop, for the result.
        save_reasons: Why this rank requests a checkpoint: "interval", "best"; for its manifest.
        interruption: What told this rank to save and end, such as a signal; it may be set at any moment.
        sets_due: The evaluation sets that are due on this rank, until they are evaluated.
        skip_batch: Whether to skip this rank's batch, if set in `on_micro_batch_begin`: the batch has weight 0, and
            still runs through the model without a trace, because other ranks wait for its part of the gradients.
        pending_elsewhere: What `pending` returns on the other ranks, while a checkpoint is saved.
        leaves: Returns whether to stop the evaluation under way for an interruption, called for each batch; `None`:
            the evaluation cannot be stopped.

    Example:
        >>> control = Control()
        >>> control.save = True
        >>> control.save = False  # does not withdraw the request
        >>> control.save
        True
    """

    NAMES = ("log", "evaluate", "save", "stop", "end_epoch")
    _SENT = (*NAMES, "flush", "interrupt", "evaluate_sets")  # the last three: requests of the loop
    COUNT = len(_SENT)  # how many numbers `to_floats` returns

    __slots__ = (
        "_agreed",
        "_asked",
        "_sent",
        "interruption",
        "leaves",
        "pending_elsewhere",
        "reason",
        "save_reasons",
        "sets_due",
        "skip_batch",
    )

    def __init__(self) -> None:
        self._asked: set[str] = set()  # requested on this rank
        self._sent: set[str] = set()  # being sent to the other ranks
        self._agreed: set[str] = set()  # known to all ranks
        self.pending_elsewhere: dict[str, str | None] = {}
        self.reason: str | None = None
        self.save_reasons: set[str] = set()
        self.interruption: Interruption | None = None
        self.sets_due: set[str] = set()
        self.skip_batch: bool = False
        self.leaves: Callable[[], bool] | None = None

    # -- for callbacks -------------------------------------------------------------------------------------------

    @property
    def log(self) -> bool:
        """Whether a log of the values since the last one is requested."""
        return self._has("log")

    @log.setter
    def log(self, wanted: bool) -> None:
        self._ask("log", wanted)

    @property
    def evaluate(self) -> bool:
        """Whether an evaluation is requested: of all sets, or of those that are due."""
        return self._has("evaluate") or self._has("evaluate_sets")

    @evaluate.setter
    def evaluate(self, wanted: bool) -> None:
        self._ask("evaluate", wanted)

    @property
    def save(self) -> bool:
        """Whether a checkpoint is requested."""
        return self._has("save")

    @save.setter
    def save(self, wanted: bool) -> None:
        self._ask("save", wanted)

    @property
    def stop(self) -> bool:
        """Whether the end of training is requested."""
        return self._has("stop")

    @stop.setter
    def stop(self, wanted: bool) -> None:
        self._ask("stop", wanted)

    @property
    def end_epoch(self) -> bool:
        """Whether the end of this epoch is requested: the next one begins after the update."""
        return self._has("end_epoch")

    @end_epoch.setter
    def end_epoch(self, wanted: bool) -> None:
        self._ask("end_epoch", wanted)

    # -- for the loop --------------------------------------------------------------------------------------------

    def ask(self, name: str) -> None:
        """Make a request on this rank; only the loop requests "flush", the report of a written checkpoint."""
        self._asked.add(name)

    @property
    def pending(self) -> dict[str, str | None]:
        """The requests of callbacks on this rank that are not known to all ranks yet; a stop with its reason."""
        pending = self._asked | self._sent
        return {name: self.reason if name == "stop" else None for name in self.NAMES if name in pending}

    def state_dict(self) -> dict[str, str | None]:
        """Return the requests of callbacks that are not known to all ranks yet, for a checkpoint."""
        return self.pending_elsewhere | self.pending

    def load_state_dict(self, state: Mapping[str, str | None]) -> None:
        """Make the requests that `state_dict` returned."""
        for name, reason in state.items():
            self.ask(name)
            self.reason = self.reason or reason

    def agree(self, name: str) -> None:
        """Make a request that all ranks make at the same step, such as one every 100 steps; nothing is sent."""
        self._agreed.add(name)

    def sync_across_ranks(self, group: "ProcessGroup") -> None:
        """Send the requests of each rank to all ranks in a message of their own. All ranks have to call it."""
        by_rank = group.all_gather_objects(self.to_floats())
        self.receive([sum(numbers) for numbers in zip(*by_rank, strict=True)])

    def agree_alone(self) -> None:
        """Have the requests take effect at once: this is the only rank."""
        if self.interruption is not None:
            self._asked.add("interrupt")
        if self._asked:
            self._agreed |= self._asked
            self._asked.clear()

    def to_floats(self) -> list[float]:
        """Return the requests as numbers for the ranks to reduce; they now count as sent."""
        if self.interruption is not None:  # set by a signal handler, in which nothing else is safe
            self._asked.add("interrupt")
        if not self._asked:  # the most frequent case
            return [0.0] * self.COUNT
        numbers = [1.0 if name in self._asked else 0.0 for name in self._SENT]
        self._sent |= self._asked
        self._asked.clear()
        return numbers

    def send_again(self) -> None:
        """Repeat the requests that did not reach the other ranks."""
        self._asked |= self._sent
        self._sent.clear()

    def receive(self, numbers: Sequence[float]) -> None:
        """Take over the requests of all ranks."""
        if not any(numbers):  # the most frequent case
            return
        for name, number in zip(self._SENT, numbers, strict=False):
            if number:
                self._agreed.add(name)
                self._sent.discard(name)

    @property
    def is_empty(self) -> bool:
        """Whether no request is due."""
        return not self._agreed

    def take(self, name: str) -> bool:
        """Return whether `name` is due, and clear it."""
        if name in self._agreed:
            self._agreed.remove(name)
            return True
        return False

    def forget(self, name: str) -> None:
        """Drop a request of any rank, because it has been carried out."""
        for requests in (self._asked, self._sent, self._agreed):
            requests.discard(name)

    def is_due(self, name: str) -> bool:
        """Whether `name` is due."""
        return name in self._agreed

    def _has(self, name: str) -> bool:
        return name in self._asked or name in self._sent or name in self._agreed

    def _ask(self, name: str, wanted: bool) -> None:
        if wanted:
            self._asked.add(name)
