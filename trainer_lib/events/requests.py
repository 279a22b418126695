"""This file is what callbacks ask of the loop; the loop decides when it is done, in one order."""

from collections.abc import Callable, Sequence

from trainer_lib.process_group import ProcessGroup
from trainer_lib.processes.exit_codes import Interruption


class Control:
    """Requests. Setting one asks for it, and nobody takes back what another asked for.

    A request takes effect at the end of a step. With one process that is the step in which it is made; with several,
    which all have to know, the one whose gradients take it along: that of a request made before or in `backward`, else
    the next. What is asked for at the end of an evaluation or of a pass takes effect at once.

    Attributes:
        reason: Why training is to stop, for the result.
        save_reasons: Why a checkpoint is asked for, on this process: "interval", "best"; for its manifest.
        interruption: What asked this process to save and end, such as a signal; it may be noted at any moment.
        sets_due: The evaluation sets whose intervals are over, on this process, until they are evaluated.
        skip_batch: Whether this rank's batch is to be left out: asked for in `on_micro_batch_begin`, it weighs nothing,
            and runs through the model without a trace, since other ranks wait for its part of the gradients.
        leaves: Whether the evaluation under way is to be left for that, asked batch by batch; `None`: it is not.

    Example:
        >>> control = Control()
        >>> control.save = True
        >>> control.save = False  # another callback, which does not want one
        >>> control.save
        True
    """

    NAMES = ("log", "evaluate", "save", "stop", "end_epoch")
    _SENT = (*NAMES, "flush", "interrupt", "evaluate_sets")  # and what only the loop asks for
    COUNT = len(_SENT)  # the numbers that `to_floats` returns

    __slots__ = (
        "_agreed",
        "_asked",
        "_sent",
        "interruption",
        "leaves",
        "reason",
        "save_reasons",
        "sets_due",
        "skip_batch",
    )

    def __init__(self) -> None:
        self._asked: set[str] = set()  # by someone on this process
        self._sent: set[str] = set()  # and on its way to the others
        self._agreed: set[str] = set()  # and known to all
        self.reason: str | None = None
        self.save_reasons: set[str] = set()
        self.interruption: Interruption | None = None
        self.sets_due: set[str] = set()
        self.skip_batch = False
        self.leaves: Callable[[], bool] | None = None

    # -- for callbacks -------------------------------------------------------------------------------------------

    @property
    def log(self) -> bool:
        """Whether someone asked for a log of what was gathered since the last one."""
        return self._has("log")

    @log.setter
    def log(self, wanted: bool) -> None:
        self._ask("log", wanted)

    @property
    def evaluate(self) -> bool:
        """Whether an evaluation is asked for: of all sets, or of those whose intervals are over."""
        return self._has("evaluate") or self._has("evaluate_sets")

    @evaluate.setter
    def evaluate(self, wanted: bool) -> None:
        self._ask("evaluate", wanted)

    @property
    def save(self) -> bool:
        """Whether someone asked for a checkpoint."""
        return self._has("save")

    @save.setter
    def save(self, wanted: bool) -> None:
        self._ask("save", wanted)

    @property
    def stop(self) -> bool:
        """Whether someone asked for the end of training."""
        return self._has("stop")

    @stop.setter
    def stop(self, wanted: bool) -> None:
        self._ask("stop", wanted)

    @property
    def end_epoch(self) -> bool:
        """Whether someone asked for the end of this epoch: the next one begins after the update."""
        return self._has("end_epoch")

    @end_epoch.setter
    def end_epoch(self, wanted: bool) -> None:
        self._ask("end_epoch", wanted)

    # -- for the loop --------------------------------------------------------------------------------------------

    def ask(self, name: str) -> None:
        """Ask for something on this process; "flush", to hear of a written checkpoint, only the loop asks for."""
        self._asked.add(name)

    def agree(self, name: str) -> None:
        """Note a request that each process comes to by itself, such as one for each 100 steps."""
        self._agreed.add(name)

    def sync_across_ranks(self, group: ProcessGroup) -> None:
        """Have all ranks know what any of them asked for, by a message of its own. All of them have to call it."""
        if group.size > 1:
            asked = group.all_gather_objects(self.to_floats())
            self.receive([sum(numbers) for numbers in zip(*asked, strict=True)])
            return
        if self.interruption is not None:
            self._asked.add("interrupt")
        if self._asked:
            self._agreed |= self._asked
            self._asked.clear()

    def to_floats(self) -> list[float]:
        """Return what was asked for as the ranks reduce it; from now on it is on its way."""
        if self.interruption is not None:  # noted by a handler, in which nothing else is safe
            self._asked.add("interrupt")
        numbers = [1.0 if name in self._asked else 0.0 for name in self._SENT]
        self._sent |= self._asked
        self._asked.clear()
        return numbers

    def send_again(self) -> None:
        """Ask again for what did not get to the other ranks."""
        self._asked |= self._sent
        self._sent.clear()

    def receive(self, numbers: Sequence[float]) -> None:
        """Agree to what any rank asked for."""
        for name, number in zip(self._SENT, numbers, strict=False):
            if number:
                self._agreed.add(name)
                self._sent.discard(name)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self._agreed

    def take(self, name: str) -> bool:
        """Whether `name` is to be done; after this it is not."""
        if name in self._agreed:
            self._agreed.remove(name)
            return True
        return False

    def forget(self, name: str) -> None:
        """Drop a request, whoever made it: what it asks for has happened."""
        for requests in (self._asked, self._sent, self._agreed):
            requests.discard(name)

    def is_due(self, name: str) -> bool:
        """Whether `name` is to be done."""
        return name in self._agreed

    def _has(self, name: str) -> bool:
        return name in self._asked or name in self._sent or name in self._agreed

    def _ask(self, name: str, wanted: bool) -> None:
        if wanted:
            self._asked.add(name)
