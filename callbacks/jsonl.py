"""The history of a run as JSON lines: one for each log, evaluation and event."""

import json
import math
import platform
import time
import traceback
from collections import deque
from collections.abc import Iterable, KeysView, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from trainer_lib.checkpointing.format.manifest import library_versions
from trainer_lib.events import Callback, Run
from trainer_lib.filesystem.atomic_files import ESCAPED, LogWrites, append_text, log_file, replace_file
from trainer_lib.logging import get_logger
from trainer_lib.runs.run_environment import memory_in_use

_logger = get_logger(__name__)

# A resumed run keeps these lines even after the step it resumes from.
_KEPT_EVENTS = ("started", "resumed", "ended", "died", "went_back")
_REPEATED_EVENTS = ("evaluation", "best")  # that a checkpoint may owe to a resumed run
_PROGRESS = ("step", "epoch", "samples", "seconds")

_LONGEST_TRACEBACK = 20_000  # characters
_WAITING = 10_000  # lines


class JsonlLog(Callback):
    """Writes a line of JSON for each log, evaluation and event of a run, on rank 0.

    The events are "started", "resumed", "save", "best", "skipped", "ended", and those of `run.record_event`. Each line
    is written immediately; lines that cannot be written to disk are written later, with the next line that can. A
    resumed run removes the lines after the step it resumes from, except those about starts and ends, and adds a "died"
    line if the run was killed. A new run renames an existing file to `<name>.old`. NaN and infinite values, which JSON
    lacks, are written as "NaN", "Infinity" and "-Infinity", which `float()` reads.

    Args:
        path: The file.
        skipped_steps: Whether to write a line for each update that overflowed (fp16). The loop then checks each update.

    Example:
        >>> from trainer_lib.events import RunState
        >>> log = JsonlLog("history.jsonl")
        >>> log.on_log(Run(state=RunState(step=10, epoch=1, samples=80, seconds=2.5)), {"loss": float("nan")})
        >>> print(Path("history.jsonl").read_text(), end="")
        {"event": "log", "step": 10, "epoch": 1.0, "samples": 80, "seconds": 2.5, "time": ..., "loss": "NaN"}
    """

    order = 100  # after the callbacks that add values to the log
    writes_history: ClassVar[bool] = True

    def __init__(self, path: str | Path, skipped_steps: bool = False) -> None:
        self.path: Path = log_file(path, "JsonlLog")
        self._error: str | None = None
        self._traceback: str | None = None
        self._is_training, self._resumed_at = False, -1
        self._waiting: deque[str] = deque(maxlen=_WAITING)
        self._instead: list[str] | None = None  # the lines that are to replace those of the file
        self._writes = LogWrites("lines")
        if skipped_steps:
            self.on_step_skipped: Any = self._write_skipped

    def on_fit_begin(self, run: Run) -> None:
        self._error, self._traceback, self._is_training = None, None, True
        self._resumed_at = -1
        if not run.is_main_process:
            return
        if run.state.step:
            self._resume(run)
            return
        self._waiting.clear()
        self._instead = None
        if self.path.exists():
            self.path.replace(self.path.with_name(f"{self.path.name}.old"))
        self._write(run, "started", _settings(run))

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        if run.is_main_process:
            self._write(run, "log", {**memory_in_use(_device_type(run)), **values})

    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        self._write(run, "evaluation", metrics)

    def on_best(self, run: Run, metric: str, value: float) -> None:
        self._write(run, "best", {"metric": metric, "value": value})

    def on_save_end(self, run: Run, folder: Path) -> None:
        entry: Mapping[str, Any] = next((c for c in run.state.checkpoints if c["path"] == str(folder)), {})
        # During a background save the run continues: the line holds the progress at the time of the save.
        progress = {name: entry[name] for name in _PROGRESS if name in entry}
        took = None if run.state.save_seconds is None else round(run.state.save_seconds, 3)
        self._write(run, "save", {"path": str(folder), "why": entry.get("reasons", []), "took": took}, progress)

    def on_load_end(self, run: Run, folder: Path) -> None:
        if self._is_training and run.is_main_process:  # after a rewind these updates run and are logged again
            self._cut(run.state.step, [])
            self._flush()

    def on_event(self, run: Run, name: str, facts: Mapping[str, Any]) -> None:
        self._write(run, name, facts, {"step": facts["step"]} if type(facts.get("step")) is int else None)

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._error = f"{type(error).__name__}: {error}"
        self._traceback = "".join(traceback.format_exception(error))[-_LONGEST_TRACEBACK:]

    def on_fit_end(self, run: Run) -> None:
        self._is_training = False
        facts = {"status": run.state.status, "reason": self._error or run.state.reason}
        self._write(run, "ended", facts if self._traceback is None else {**facts, "traceback": self._traceback})

    def _write_skipped(self, run: Run) -> None:
        # The update is not counted yet. A run that resumes from the step before writes this line again.
        self._write(run, "skipped", {"why": "the gradients overflowed"}, {"step": run.state.step + 1})

    def _resume(self, run: Run) -> None:
        """Remove the lines after the step the run resumes from, and record the resume."""
        self._resumed_at = run.state.step
        last_entries, added = _entries_since_last_start([entry for _, entry in self._lines()]), list[str]()
        if last_entries and not any(entry.get("event") == "ended" for entry in last_entries):
            last = max(last_entries, key=lambda entry: entry["step"])
            died = {"event": "died", **{name: last[name] for name in (*_PROGRESS, "time") if name in last}}
            added.append(json.dumps(died))
        self._cut(run.state.step, added)
        furthest = max((entry["step"] for entry in last_entries), default=0)
        self._write(run, "resumed", {**_settings(run), "steps_lost": max(furthest - run.state.step, 0)})

    def _cut(self, step: int, added: Sequence[str]) -> None:
        """Remove the lines after a step, and add lines."""
        lines = [*self._lines(), *_parsed(self._waiting)]
        kept = [line for line, entry in lines if entry["step"] <= step or entry.get("event") in _KEPT_EVENTS]
        self._instead: list[str] | None = [*kept, *added]
        self._waiting.clear()

    def _remove_earlier(self, event: str, step: int, names: KeysView[str]) -> None:
        """Remove the line of an evaluation that the checkpoint owed, if a program that was killed has made it too."""

        def is_earlier(entry: dict[str, Any]) -> bool:
            return (entry.get("event"), entry["step"]) == (event, step) and entry.keys() >= names

        lines = self._lines()
        kept = [line for line, entry in lines if not is_earlier(entry)]
        if len(kept) < len(lines):
            self._instead = kept

    def _lines(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the complete lines, each with its parsed entry."""
        if self._instead is not None:
            return _parsed(self._instead)
        if not self.path.exists():
            return []
        # JSON escapes no line separators of Unicode, at which `splitlines` would cut a line too.
        return _parsed(self.path.read_text("utf-8", errors="replace").split("\n"))

    def _write(
        self, run: Run, event: str, values: Mapping[str, Any], progress: Mapping[str, Any] | None = None
    ) -> None:
        if not run.is_main_process:
            return
        state = run.state
        if self._is_training and state.step == self._resumed_at and event in _REPEATED_EVENTS:
            self._remove_earlier(event, state.step, values.keys())
        current = {"step": state.step, "epoch": state.epochs, "samples": state.samples, "seconds": state.seconds}
        header: dict[str, Any] = {"event": event, **current, **(progress or {})}
        header |= {"seconds": round(header["seconds"], 3), "time": round(time.time(), 3)}
        for name in header.keys() & values.keys() if event in ("log", "evaluation") else ():
            _logger.warning_once(
                "The value %r that you log is not in %s, whose lines have a %s of their own. Give it another name.",
                name,
                self.path.name,
                name,
            )
        self._waiting.append(json.dumps(_plain({**header, **values, **header}), ensure_ascii=False, allow_nan=False))
        self._flush()

    def _flush(self) -> None:
        """Write the lines that wait; those that the disk does not take wait for the next call."""
        if self._writes.attempt(self.path, self._write_waiting):
            self._waiting.clear()
            self._instead = None

    def _write_waiting(self) -> None:
        # The file is opened for each line: logs are rare, and a run that is killed leaves no open file.
        if (lines := self._instead) is not None:
            replace_file(self.path, lambda path: _write_lines(path, [*lines, *self._waiting]))
        else:
            append_text(self.path, "".join(f"{line}\n" for line in self._waiting))


def _settings(run: Run) -> dict[str, Any]:
    """Return facts about the world and the machine, which may change when a run is resumed."""
    accelerator = run.accelerator
    return {
        "processes": 1 if accelerator is None else accelerator.num_processes,
        "precision": "no" if accelerator is None else accelerator.mixed_precision,
        "device": _device_type(run),
        "host": platform.node(),
        **library_versions(),
        "max_steps": run.state.max_steps,
        "max_epochs": run.state.max_epochs,
    }


def _device_type(run: Run) -> str:
    return "cpu" if run.accelerator is None else run.accelerator.device.type


def _entries_since_last_start(entries: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    begins = [index for index, entry in enumerate(entries) if entry.get("event") in ("started", "resumed")]
    return entries[begins[-1] :] if begins else entries


def _parsed(lines: Iterable[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return the complete lines, each with its entry."""
    read = [(line, _entry(line)) for line in lines]
    return [(line, entry) for line, entry in read if entry is not None]


def _entry(line: str) -> dict[str, Any] | None:
    """Return the entry of a line; `None` if the line is incomplete."""
    try:
        entry = json.loads(line)
        return entry if isinstance(entry["step"], int) else None
    except (ValueError, TypeError, KeyError):
        return None


def _write_lines(path: Path, lines: Sequence[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", errors=ESCAPED)


def _plain(value: Any) -> Any:
    """Return a value as JSON types."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    # A torch or numpy value with one element becomes that number; anything else becomes its text.
    is_scalar = callable(getattr(value, "item", None)) and math.prod(getattr(value, "shape", (0,))) == 1
    return _plain(value.item()) if is_scalar else str(value)
