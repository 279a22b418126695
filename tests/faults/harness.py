"""Kill trials: a process that has imported torch forks the trials, and another process sends SIGKILL.

A trial is one life of a training: it loads the newest state, trains and saves until it is killed, and writes a diary,
which is what those that come after it compare with.
"""

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.faults.trainings import Training, digest, train
from trainer_lib.checkpointing.load.find import verify_state
from trainer_lib.checkpointing.save.retention import automatic_states
from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.launchers import ProcessFailedError, run_forked

_PATIENCE = 60.0  # seconds that a killer waits for its moment
_SOME_TIME = 0.06  # seconds of a training


class Diary:
    """What a process did, line by line: the lines stay when it is killed."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, kind: str, number: int, contents: Any = None) -> None:
        """Write a line."""
        line = {"what": kind, "number": number, "contents": contents, "when": time.monotonic(), "pid": os.getpid()}
        os.write(self._file, (json.dumps(line) + "\n").encode())


def lines(diary: Path, since: int = 0) -> list[dict[str, Any]]:
    """Return the lines of a diary from some byte on."""
    if not diary.exists():
        return []
    text = diary.read_bytes()[since:].decode()
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@dataclass(frozen=True)
class Moment:
    """When to kill.

    Args:
        inside: While a save is under way; else at any time after the first one.
        part: How far into it, from 0 to 1.
    """

    inside: bool
    part: float


def moments(count: int, seed: int) -> list[Moment]:
    """Return so many moments, every second one inside a save."""
    chance = random.Random(seed)
    return [Moment(number % 2 == 0, chance.random()) for number in range(count)]


@contextlib.contextmanager
def killer(diary: Path, saves: Callable[[], bool], moment: Moment) -> Generator[None]:
    """Kill the process that resumes with a diary, by a process of its own.

    Args:
        diary: The diary.
        saves: Whether a save is under way.
        moment: When.
    """
    since = diary.stat().st_size if diary.exists() else 0
    child = os.fork()
    if child == 0:
        try:
            _kill(diary, since, saves, moment)
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _kill(diary: Path, since: int, saves: Callable[[], bool], moment: Moment) -> None:
    _wait(lambda: any(entry["what"] == "saved" for entry in lines(diary, since)), every=0.005)  # reads all of it
    pid = lines(diary, since)[0]["pid"]
    if moment.inside:
        # How long one takes, and then into another one.
        _wait(lambda: not saves())
        _wait(saves)
        begun = time.monotonic()
        _wait(lambda: not saves())
        lasts = time.monotonic() - begun
        _wait(saves)
        time.sleep(moment.part * lasts)
    else:
        time.sleep(moment.part * _SOME_TIME)
    os.kill(pid, signal.SIGKILL)


def _wait(until: Callable[[], bool], every: float = 0.0002) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not until():
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(every)


@dataclass
class Found:
    """What was found after kills."""

    kills: int = 0
    inside: int = 0
    unloadable: int = 0
    resumed: int = 0
    equal: int = 0
    complaints: list[str] = field(default_factory=list[str])

    def counts(self) -> dict[str, int]:
        """Return the numbers."""
        return {name: getattr(self, name) for name in ("kills", "inside", "unloadable", "resumed", "equal")}


@dataclass(frozen=True)
class Lives:
    """A training by an engine that is killed again and again.

    Args:
        make: Makes it.
        processes: How many train.
        background: Whether states are written behind the training.
    """

    make: Callable[..., Training]
    processes: int
    background: bool

    def killed(self, project: Path, when: list[Moment]) -> Found:
        """Live until killed, as often as there are moments; and once more."""
        findings = Found()
        project.mkdir(parents=True, exist_ok=True)
        for number, moment in enumerate(when):
            victim = _diary(project, number % self.processes)
            with (
                killer(victim, lambda: _saves(project / "checkpoints"), moment),
                pytest.raises(ProcessFailedError, match="SIGKILL"),
            ):
                run_forked(self._live, (project,), self.processes, timeout=90)
            findings.kills += 1
            self._look(project, findings)
        run_forked(self._live, (project, True), self.processes, timeout=90)
        self._compare(project, findings)
        return findings

    def _live(self, project: Path, is_last: bool = False) -> None:
        accelerator, model, optimizer = self.make(project, total_limit=2)
        diary = Diary(_diary(project, accelerator.process_index))
        if automatic_states(project / "checkpoints"):
            accelerator.load_state()
            diary.note("loaded", accelerator.save_iteration - 1, digest(accelerator))
        if is_last:
            return
        saved = -1
        while True:
            train(accelerator, model, optimizer)
            number = accelerator.save_iteration
            diary.note("saving", number, digest(accelerator))
            accelerator.save_state(background=self.background)
            # One that is written behind the training is known to be there when the next one begins.
            saved, on_disk = number, (saved if self.background else number)
            if on_disk >= 0:
                diary.note("saved", on_disk)

    def _look(self, project: Path, actual: Found) -> None:
        """Look at what a kill has left."""
        states = automatic_states(project / "checkpoints")
        for path in states.values():
            try:
                verify_state(path)
            except CheckpointError as error:
                actual.unloadable += 1
                actual.complaints.append(str(error))
        written = lines(_diary(project, 0))
        newest = max((entry["number"] for entry in written if entry["what"] == "saved"), default=-1)
        actual.inside += [entry["number"] for entry in written if entry["what"] == "saving"][-1] > max(states)
        if max(states) < newest:
            actual.complaints.append(f"after kill {actual.kills} state {newest} is gone: there are {list(states)}")
        (project / f"left_{actual.kills}").write_text(str(max(states)))

    def _compare(self, project: Path, actual: Found) -> None:
        """Compare what was loaded after each kill with what had been saved."""
        for rank in range(self.processes):
            was_saved: dict[int, str] = {}
            kill = 0
            for entry in lines(_diary(project, rank)):
                if entry["what"] == "saving":
                    was_saved[entry["number"]] = entry["contents"]
                elif entry["what"] == "loaded":
                    kill += 1
                    left = int((project / f"left_{kill}").read_text())
                    actual.resumed += rank == 0 and entry["number"] == left
                    is_equal = entry["contents"] == was_saved.get(entry["number"])
                    actual.equal += rank == 0 and is_equal
                    if entry["number"] != left or not is_equal:
                        actual.complaints.append(
                            f"process {rank} loaded {entry['number']} after kill {kill}, not {left}"
                        )


def _saves(folder: Path) -> bool:
    return any(folder.glob("*.partial"))


def _diary(project: Path, rank: int) -> Path:
    return project / f"diary_{rank}"
