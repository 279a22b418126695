"""This file is a log of a run as a file of JSON, a line for each log and each evaluation."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer_lib.events import Callback, Run
from trainer_lib.foundation.files import replace_file


class JsonlLog(Callback):
    """Writes a line of JSON for each log and each evaluation; the main process does.

    Each line is written at once. A resumed run takes out what was logged after the step it goes on from. A new run puts
    an older file of this name aside, as `<name>.old`. What JSON has no number for is written as "NaN", "Infinity" or
    "-Infinity", which `float()` reads.

    Args:
        path: The file.

    Example:
        >>> from trainer_lib.events import RunState
        >>> log = JsonlLog("history.jsonl")
        >>> log.on_log(Run(state=RunState(step=10, epoch=1, seconds=2.5)), {"loss": float("nan")})
        >>> print(Path("history.jsonl").read_text(), end="")
        {"event": "log", "step": 10, "epoch": 1.0, "seconds": 2.5, "loss": "NaN"}
    """

    order = 100  # after those who add to what is logged

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()

    def on_fit_begin(self, run: Run) -> None:
        if not run.is_main_process:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            return
        if run.state.step == 0:
            self.path.replace(self.path.with_name(f"{self.path.name}.old"))
            return
        kept = [line for line in self.path.read_text("utf-8").splitlines() if _is_until(line, run.state.step)]
        replace_file(self.path, lambda path: _write_lines(path, kept))

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        self._write(run, "log", values)

    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        self._write(run, "evaluation", metrics)

    def _write(self, run: Run, event: str, values: Mapping[str, Any]) -> None:
        if not run.is_main_process:
            return
        state = run.state
        place = {"event": event, "step": state.step, "epoch": state.epochs, "seconds": round(state.seconds, 3)}
        line = json.dumps(_plain({**place, **values, **place}), ensure_ascii=False, allow_nan=False)
        # Opened anew for each line: logs are rare, and no file is left open by whatever ends the run.
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _is_until(line: str, step: int) -> bool:
    """Whether a line is whole, and was logged at this step or before."""
    try:
        return json.loads(line)["step"] <= step
    except (ValueError, TypeError, KeyError):
        return False


def _write_lines(path: Path, lines: list[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    # What holds one number, of torch or numpy, is that number; what else there may be is written as it prints.
    holds_one = callable(getattr(value, "item", None)) and math.prod(getattr(value, "shape", (0,))) == 1
    return _plain(value.item()) if holds_one else str(value)
