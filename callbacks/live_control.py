"""Requests to a running run, by a file or a signal: save, evaluate, log, stop, or change the learning rate."""

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
_BY_CALL = ".asked-"  # in the names of files written by `ask_run`
_REQUESTS = ("save", "evaluate", "stop", "log")
_RATE = "learning_rate"
_MARK = "live_control"  # a logged value that tells all ranks about a request
_RATES_OF_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr")
_RATES_OF_SCHEDULES = ("base_lrs", "max_lrs")


class LiveControl(Modifier):
    """Accepts requests for a running run by a file or a signal.

    The file is `control` in the run's folder, with one request per line: "save", "evaluate", "stop", "log", or
    "learning_rate 1e-4", which scales all groups and the schedule so that the first group has that rate now. `ask_run`
    writes such files. Rank 0 looks for them, deletes them, and warns about requests it cannot parse. A signal may reach
    any rank. All ranks carry out a request at the end of the same update, after a log. Requests are recorded in the
    history, as "control", and in checkpoints; checkpoints also hold a changed rate.

    Args:
        seconds: The shortest time between two looks for the file.
        signal_name: The signal; `None` for no signal.
        on_signal: The requests that the signal makes, as in the file.
        file: The path of the file; by default in the run's folder. Required for runs behind a URL.

    Attributes:
        requests: The requests so far, each with its step.

    Example:
        >>> control = LiveControl(on_signal=["save", "evaluate"])
        >>> Path("runs/first").mkdir(parents=True)
        >>> ask_run("runs/first", "learning_rate 1e-4", "save")
    """

    order = -100  # removes its mark before other callbacks see the log
    exclusive_group: ClassVar[str | None] = "accept requests from outside"
    runs_in_sandbox: ClassVar[bool] = False  # requests are meant for the run itself

    def __init__(
        self,
        seconds: float = 1.0,
        signal_name: str | None = "SIGUSR2",
        on_signal: Sequence[str] = ("save",),
        file: str | Path | None = None,
    ) -> None:
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(
                f"LiveControl(seconds) must be a number of seconds of at least 0 (got {seconds!r})."
            )
        known = [item.name for item in signal.Signals if item.name not in ("SIGKILL", "SIGSTOP")]  # uncatchable
        if signal_name is not None and signal_name not in known:
            raise ConfigurationError(unknown("signal", signal_name, known))
        if isinstance(on_signal, str) or not on_signal:
            raise ConfigurationError(
                f"LiveControl(on_signal) must be a list of requests, such as ['save'] (got {on_signal!r}). For no "
                "signal, give signal_name=None."
            )
        self._on_signal = [_checked(request) for request in on_signal]
        self._seconds, self._signal_name = seconds, signal_name
        self._file_option = None if file is None else Path(file).expanduser()
        self._file: Path | None = None
        self._next_look, self._last_text = 0.0, ""
        self._waiting: list[str] = []  # requests of this rank that other ranks do not have yet
        self._signals = 0
        self._previous_handler: Any = None
        self.requests: list[list[Any]] = []

    # -- events --------------------------------------------------------------------------------------------------

    def on_fit_begin(self, run: Run) -> None:
        self._file = self._file_option or (None if run.folder is None else run.folder / _FILE)
        self._waiting, self._signals, self._next_look, self._last_text = [], 0, 0.0, ""
        if not run.state.step:
            self.requests = []
        has_signal = self._signal_name is not None and threading.current_thread() is threading.main_thread()
        if self._file is None and not has_signal:
            raise ConfigurationError(
                "LiveControl has no control file and no signal: there is no run folder, and no handler can be "
                "installed "
                "here. Give output_dir or file=…."
            )
        if not run.is_main_process:
            self._file = None
        if has_signal:
            self._install_handler(run)

    def on_fit_end(self, run: Run) -> None:
        del run
        if self._previous_handler is not None and self._signal_name is not None:
            signal.signal(getattr(signal, self._signal_name), self._previous_handler)
            self._previous_handler = None

    def on_step_end(self, run: Run) -> None:
        if self._signals:
            self._signals = 0
            self._waiting += self._on_signal
        if self._file is not None and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + self._seconds
            self._waiting += self._take_requests(self._file)
        if self._waiting:
            run.log(_MARK, 1.0)
            run.control.log = True  # all ranks log at the same step

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        if values.pop(_MARK, None) is None:  # values are reduced: the same on all ranks
            return
        gathered: list[list[str]] = run.accelerator.group.all_gather_objects(self._waiting)
        self._waiting = []
        for request in dict.fromkeys(request for requests in gathered for request in requests):
            self._do(run, request)

    def _do(self, run: Run, request: str) -> None:
        self.requests.append([run.state.step, request])
        facts: dict[str, Any] = {}
        refused = _refusal(run, request)
        if refused is not None:
            _logger.warning("LiveControl refuses the request %r: %s.", request, refused)
            facts["refused"] = refused
        elif request.startswith(_RATE):
            facts = _change_rate(run, float(request.split()[1]))
        elif request != "log":  # this is the log
            if request == "stop":
                run.control.reason = run.control.reason or "a LiveControl request"
            run.control.agree(request)  # all ranks get here
        run.record_event("control", asked=request, **facts)

    # -- the signal and the file ---------------------------------------------------------------------------------

    def _install_handler(self, run: Run) -> None:
        assert self._signal_name is not None
        if self._signal_name in getattr(run.args, "stop_signals", ()):
            raise ConfigurationError(
                f"LiveControl(signal_name={self._signal_name!r}) is also in stop_signals. Remove it from one of them."
            )
        number = getattr(signal, self._signal_name)
        if signal.getsignal(number) is None:  # a handler installed outside Python cannot be restored
            raise ConfigurationError(
                f"LiveControl(signal_name={self._signal_name!r}): a library handles this signal. Give another one, or "
                "None."
            )
        self._previous_handler = signal.signal(number, self._count_signal)

    def _count_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if callable(self._previous_handler):
            self._previous_handler(number, frame)

    def _take_requests(self, file: Path) -> list[str]:
        """Return the pending requests, and delete their files."""
        requests = list[str]()
        try:
            paths = [file] if self._file_option is not None else sorted(file.parent.iterdir())
            for path in paths:
                if path.name == file.name or path.name.startswith(file.name + _BY_CALL):
                    with contextlib.suppress(FileNotFoundError):  # no request, or withdrawn
                        requests += self._read(path)
        except OSError as error:
            # A file that cannot be deleted would repeat its requests.
            _logger.warning("LiveControl stops looking for %s: %s.", file, error)
            self._file = None
        return requests

    def _read(self, file: Path) -> list[str]:
        text = file.read_text("utf-8", errors="replace")
        is_whole = text.endswith("\n") or (text != "" and text == self._last_text)
        self._last_text = "" if is_whole else text
        if not is_whole:  # still being written
            return []
        file.unlink()
        requests = list[str]()
        for line in filter(None, map(str.strip, text.splitlines())):
            try:
                requests.append(_checked(line))
            except ConfigurationError as error:
                _logger.warning("%s contains an unknown request: %s", file, error)
        return requests

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"requests": [list(request) for request in self.requests]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.requests = [list(request) for request in state["requests"]]


def ask_run(folder: str | Path, *requests: str) -> None:
    """Send requests to a run that has a `LiveControl`.

    Args:
        folder: The run's folder.
        *requests: "save", "evaluate", "stop", "log" or "learning_rate 1e-4".

    Raises:
        ConfigurationError: If a request is unknown, or the folder does not exist.
    """
    run_folder = Path(folder).expanduser()
    if not run_folder.is_dir():
        raise ConfigurationError(f"ask_run: the folder {str(folder)!r} does not exist. Give the run's folder.")
    text = "".join(f"{_checked(request)}\n" for request in requests)
    # A separate file for each call, so that calls at the same time do not overwrite each other.
    file = run_folder / f"{_FILE}{_BY_CALL}{time.time_ns():020d}-{os.getpid()}"
    replace_file(file, lambda path: path.write_text(text, encoding="utf-8"))


def _checked(request: Any) -> str:
    """Return a request in its normal form, or raise."""
    words = str(request).replace("=", " ").split()
    if len(words) == 1 and words[0] in _REQUESTS:
        return words[0]
    if len(words) == 2 and words[0] == _RATE:
        try:
            if 0 < float(words[1]) < math.inf:
                return " ".join(words)
        except ValueError:
            pass
        raise ConfigurationError(f"The learning rate must be above 0, such as learning_rate 1e-4 (got {request!r}).")
    raise ConfigurationError(unknown("request", request, [*_REQUESTS, f"{_RATE} 1e-4"]))


def _refusal(run: Run, request: str) -> str | None:
    """Return why the run refuses a request; `None` if it can carry it out."""
    if request == "evaluate" and getattr(run.trainer, "eval_dataset", None) is None:
        return "there is no eval_dataset"
    if request == "save" and run.folder is None:
        return "there is no output_dir to save in"
    if request.startswith(_RATE):
        if len(run.optimizers) != 1:
            return f"one rate cannot apply to {len(run.optimizers)} optimizers"
        if not _rate_of(run.optimizer.param_groups[0]):
            return "the rate and the schedule's base rate are 0, so they cannot be scaled"
    return None


def _rate_of(group: Mapping[str, Any]) -> float:
    """Return the rate of a group, or its initial rate if the schedule is at 0 now."""
    return float(group["lr"]) or float(group.get("initial_lr", 0.0))


def _change_rate(run: Run, rate: float) -> dict[str, Any]:
    """Scale rates and schedule so that the first group has the given rate now, and return the old rate."""
    groups = run.optimizer.param_groups
    old_rate, factor = float(groups[0]["lr"]), rate / _rate_of(groups[0])
    for group in groups:
        for name in _RATES_OF_GROUPS:
            if isinstance(group.get(name), Tensor):
                group[name].mul_(factor)  # in place: a compiled step reads this tensor
            elif name in group:
                group[name] *= factor
    for prepared in run.schedulers.values():
        _scale(prepared.scheduler, factor)
        prepared.scheduler._last_lr = [float(group["lr"]) for group in groups]
    return {"was": old_rate, "factor": factor}


def _scale(schedule: Any, factor: float) -> None:
    for name in _RATES_OF_SCHEDULES:
        if hasattr(schedule, name):
            setattr(schedule, name, [rate * factor for rate in getattr(schedule, name)])
    for part in getattr(schedule, "_schedulers", ()):  # SequentialLR
        _scale(part, factor)
