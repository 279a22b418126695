"""This file is what callbacks ask of the loop; the loop decides when it is done, in one order."""

from collections.abc import Sequence


class Control:
    """Requests. Setting one asks for it; nobody takes back what another asked for.

    A request takes effect at the end of a step: of the same one with one process; with several, where all of them have
    to agree, of the update that carries it to the others, which may be the next.

    Attributes:
        log: Log what was gathered since the last time.
        evaluate: Evaluate.
        save: Save a checkpoint.
        stop: End training.

    Example:
        >>> control = Control()
        >>> control.save = True
        >>> control.save = False  # another callback, which does not want one
        >>> control.save
        True
    """

    NAMES = ("log", "evaluate", "save", "stop")

    __slots__ = ("_asked", "reason")

    def __init__(self) -> None:
        self._asked: set[str] = set()
        self.reason: str | None = None  # why training is to stop, for the result

    @property
    def is_empty(self) -> bool:
        """Whether nobody asked for anything."""
        return not self._asked

    def ask(self, name: str, wanted: bool = True) -> None:
        """Ask for what `name` says."""
        if wanted:
            self._asked.add(name)

    def has(self, name: str) -> bool:
        """Whether somebody asked for what `name` says."""
        return name in self._asked

    def take(self, name: str) -> bool:
        """Whether somebody asked for it; after this nobody does."""
        if name in self._asked:
            self._asked.remove(name)
            return True
        return False

    def as_numbers(self) -> list[float]:
        """Return the requests as the processes reduce them."""
        asked = self._asked
        return [1.0 if name in asked else 0.0 for name in self.NAMES] if asked else [0.0] * len(self.NAMES)

    def hear(self, numbers: Sequence[float]) -> None:
        """Take up what any process asked for."""
        for name, number in zip(self.NAMES, numbers, strict=True):
            if number:
                self._asked.add(name)

    @property
    def log(self) -> bool:
        """Whether to log."""
        return "log" in self._asked

    @log.setter
    def log(self, wanted: bool) -> None:
        self.ask("log", wanted)

    @property
    def evaluate(self) -> bool:
        """Whether to evaluate."""
        return "evaluate" in self._asked

    @evaluate.setter
    def evaluate(self, wanted: bool) -> None:
        self.ask("evaluate", wanted)

    @property
    def save(self) -> bool:
        """Whether to save."""
        return "save" in self._asked

    @save.setter
    def save(self, wanted: bool) -> None:
        self.ask("save", wanted)

    @property
    def stop(self) -> bool:
        """Whether to stop."""
        return "stop" in self._asked

    @stop.setter
    def stop(self, wanted: bool) -> None:
        self.ask("stop", wanted)
