"""This file is a run that listens: a file or a signal asks it to save, evaluate, log, stop or learn faster."""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from torch import Tensor

from trainer_lib.events import Modifier, Run
from trainer_lib.filesystem.atomic_files import replace_file
from trainer_lib.foundation.errors import ConfigurationError, unknown
from trainer_lib.logging import get_logger

_logger = get_logger(__name__)

_FILE = "control"
_BY_CALL = ".asked-"  # what a file made by `ask_run` has behind that name
_ASKED = ("save", "evaluate", "stop", "log")
_RATE = "learning_rate"
_MARK = "live_control"  # among what is averaged, it tells all processes that one of them is asked
_RATES_OF_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr")
_RATES_OF_SCHEDULES = ("base_lrs", "max_lrs")


class LiveControl(Modifier):
    """Has a file or a signal ask a run for something while it trains.

    The file is `control` in the run's folder, with a request a line: "save", "evaluate", "stop", "log", or
    "learning_rate 1e-4", which scales all groups and the schedule so that the first group has that rate now. `ask_run`
    makes such files. The main process looks for them, takes them away, and says what it did not understand. A signal
    may come to any process. All processes do what was asked for at the end of the same update, after a log. Requests
    are noted in the history, as "control", and in checkpoints; a changed rate is part of what checkpoints hold.

    Args:
        seconds: How often to look for the file, at most.
        signal_name: The signal; `None`: none.
        on_signal: What it asks for: requests as in the file.
        file: Where the file is; by default in the run's folder. Of a run behind a URL, where the main process finds it.

    Attributes:
        requests: What was asked for so far, each with the step.

    Example:
        >>> control = LiveControl(on_signal=["save", "evaluate"])
        >>> Path("runs/first").mkdir(parents=True)
        >>> ask_run("runs/first", "learning_rate 1e-4", "save")
    """

    order = -100  # its mark is gone before others look at what is logged
    exclusive_group: ClassVar[str | None] = "be asked from outside"
    runs_in_sandbox: ClassVar[bool] = False  # requests are meant for the run itself

    def __init__(
        self,
        seconds: float = 1.0,
        signal_name: str | None = "SIGUSR2",
        on_signal: Sequence[str] = ("save",),
        file: str | Path | None = None,
    ) -> None:
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"LiveControl(seconds={seconds!r}): give a number of seconds, 0 or more.")
        known = [one.name for one in signal.Signals if one.name not in ("SIGKILL", "SIGSTOP")]  # which nobody hears
        if signal_name is not None and signal_name not in known:
            raise ConfigurationError(unknown("signal", signal_name, known))
        if isinstance(on_signal, str) or not on_signal:
            raise ConfigurationError(
                f"LiveControl(on_signal={on_signal!r}): give a list, such as ['save'], or signal_name=None."
            )
        self._on_signal = [_checked(request) for request in on_signal]
        self._seconds, self._signal_name = seconds, signal_name
        self._given = None if file is None else Path(file).expanduser()
        self._file: Path | None = None
        self._look_at, self._last_text = 0.0, ""
        self._waiting: list[str] = []  # requests of this process that the others do not know yet
        self._signals = 0
        self._before: Any = None
        self.requests: list[list[Any]] = []

    # -- along the run -------------------------------------------------------------------------------------------

    def on_fit_begin(self, run: Run) -> None:
        self._file = self._given or (None if run.folder is None else run.folder / _FILE)
        self._waiting, self._signals, self._look_at, self._last_text = [], 0, 0.0, ""
        if not run.state.step:
            self.requests = []
        hears = self._signal_name is not None and threading.current_thread() is threading.main_thread()
        if self._file is None and not hears:
            raise ConfigurationError(
                "LiveControl has no file to look for, and no signal that it could hear. Give output_dir, or file=…."
            )
        if not run.is_main_process:
            self._file = None
        if hears:
            self._listen(run)

    def on_fit_end(self, run: Run) -> None:
        del run
        if self._before is not None and self._signal_name is not None:
            signal.signal(getattr(signal, self._signal_name), self._before)
            self._before = None

    def on_step_end(self, run: Run) -> None:
        if self._signals:
            self._signals = 0
            self._waiting += self._on_signal
        if self._file is not None and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + self._seconds
            self._waiting += self._taken(self._file)
        if self._waiting:
            run.log(_MARK, 1.0)
            run.control.log = True  # which all processes hear of, and do at the same step

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        if values.pop(_MARK, None) is None:  # on all processes or on none: values are those of all
            return
        told: list[list[str]] = run.accelerator.group.all_gather_objects(self._waiting)
        self._waiting = []
        for request in dict.fromkeys(one for requests in told for one in requests):
            self._do(run, request)

    def _do(self, run: Run, request: str) -> None:
        self.requests.append([run.state.step, request])
        facts: dict[str, Any] = {}
        refused = _refusal(run, request)
        if refused is not None:
            _logger.warning("What was asked for is refused (%s): %s.", request, refused)
            facts["refused"] = refused
        elif request.startswith(_RATE):
            facts = _change_rate(run, float(request.split()[1]))
        elif request != "log":  # which is being done
            if request == "stop":
                run.control.reason = run.control.reason or "it was asked for from outside"
            run.control.agree(request)  # all processes come to it here
        run.record_event("control", asked=request, **facts)

    # -- who asks ------------------------------------------------------------------------------------------------

    def _listen(self, run: Run) -> None:
        assert self._signal_name is not None
        if self._signal_name in getattr(run.args, "stop_signals", ()):
            raise ConfigurationError(
                f"LiveControl(signal_name={self._signal_name!r}): stop_signals has it too. Take it out of one."
            )
        number = getattr(signal, self._signal_name)
        if signal.getsignal(number) is None:  # whose handler could not be put back
            raise ConfigurationError(
                f"LiveControl(signal_name={self._signal_name!r}): a library catches it. Give another one, or None."
            )
        self._before = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if callable(self._before):
            self._before(number, frame)

    def _taken(self, file: Path) -> list[str]:
        """Return the requests that there are, and take their files away."""
        found = list[str]()
        try:
            there = [file] if self._given is not None else sorted(file.parent.iterdir())
            for one in there:
                if one.name == file.name or one.name.startswith(file.name + _BY_CALL):
                    with contextlib.suppress(FileNotFoundError):  # nobody asks, or thought better of it
                        found += self._read(one)
        except OSError as error:
            # What cannot be taken away would be asked for again and again.
            _logger.warning("%s is not looked for any more: %s.", file, error)
            self._file = None
        return found

    def _read(self, file: Path) -> list[str]:
        text = file.read_text("utf-8", errors="replace")
        is_whole = text.endswith("\n") or (text != "" and text == self._last_text)
        self._last_text = "" if is_whole else text
        if not is_whole:  # somebody is writing it just now
            return []
        file.unlink()
        found = list[str]()
        for line in filter(None, map(str.strip, text.splitlines())):
            try:
                found.append(_checked(line))
            except ConfigurationError as error:
                _logger.warning("%s has a request that is not understood: %s", file, error)
        return found

    # -- what survives a restart ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"requests": [list(one) for one in self.requests]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.requests = [list(one) for one in state["requests"]]


def ask_run(folder: str | Path, *requests: str) -> None:
    """Ask a run that has a `LiveControl` for something.

    Args:
        folder: The run's folder.
        *requests: "save", "evaluate", "stop", "log" or "learning_rate 1e-4".

    Raises:
        ConfigurationError: If a request is none of these, or there is no such folder.
    """
    place = Path(folder).expanduser()
    if not place.is_dir():
        raise ConfigurationError(f"ask_run({str(folder)!r}): there is no such folder. Give that of the run.")
    text = "".join(f"{_checked(request)}\n" for request in requests)
    # A file of its own, so that two who ask at once do not undo each other's.
    file = place / f"{_FILE}{_BY_CALL}{time.time_ns():020d}-{os.getpid()}"
    replace_file(file, lambda path: path.write_text(text, encoding="utf-8"))


def _checked(request: Any) -> str:
    """Return a request in the form in which it is done."""
    words = str(request).replace("=", " ").split()
    if len(words) == 1 and words[0] in _ASKED:
        return words[0]
    if len(words) == 2 and words[0] == _RATE:
        try:
            if 0 < float(words[1]) < math.inf:
                return " ".join(words)
        except ValueError:
            pass
        raise ConfigurationError(f"{request!r}: give a rate above 0, such as learning_rate 1e-4.")
    raise ConfigurationError(unknown("request", request, [*_ASKED, f"{_RATE} 1e-4"]))


def _refusal(run: Run, request: str) -> str | None:
    """Return why a run cannot do what it is asked for; it goes on all the same."""
    if request == "evaluate" and getattr(run.trainer, "eval_dataset", None) is None:
        return "there is nothing to evaluate on"
    if request == "save" and run.folder is None:
        return "there is no folder to save in"
    if request.startswith(_RATE):
        if len(run.optimizers) != 1:
            return f"there are {len(run.optimizers)} optimizers, and one rate"
        if not _rate_of(run.optimizer.param_groups[0]):
            return "the rate is 0, and so is what the schedule makes it from"
    return None


def _rate_of(group: Mapping[str, Any]) -> float:
    """Return the rate of a group; where its schedule is at 0 just now, what it goes up to."""
    return float(group["lr"]) or float(group.get("initial_lr", 0.0))


def _change_rate(run: Run, rate: float) -> dict[str, Any]:
    """Scale rates and schedule so that the first group has a rate now, and say what it was."""
    groups = run.optimizer.param_groups
    was, factor = float(groups[0]["lr"]), rate / _rate_of(groups[0])
    for group in groups:
        for name in _RATES_OF_GROUPS:
            if isinstance(group.get(name), Tensor):
                group[name].mul_(factor)  # a compiled or captured step reads this very one
            elif name in group:
                group[name] *= factor
    for prepared in run.schedulers.values():
        _scale(prepared.scheduler, factor)
        prepared.scheduler._last_lr = [float(group["lr"]) for group in groups]
    return {"was": was, "factor": factor}


def _scale(schedule: Any, factor: float) -> None:
    for name in _RATES_OF_SCHEDULES:
        if hasattr(schedule, name):
            setattr(schedule, name, [rate * factor for rate in getattr(schedule, name)])
    for part in getattr(schedule, "_schedulers", ()):  # of one that is made of several
        _scale(part, factor)
