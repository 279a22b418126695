"""JSON Lines tracker: one line per call, without further packages."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from trainer_lib.filesystem.atomic_files import append_text, replace_file
from trainer_lib.tracking.base import BuiltInTracker, Point, on_main_process
from trainer_lib.tracking.delivery.plain_values import json_safe


class JsonlTracker(BuiltInTracker):
    """Writes `<project>.jsonl` into the logging folder; NaN and Inf are written as text that `float` reads.

    Args:
        run_name: The file's name.
        logging_dir: Its folder.
        resume_step: The step that training resumes from: lines of later steps are removed. `None` for a new run, which
            renames an existing file to `<name>.old`.

    Example:
        >>> tracker = JsonlTracker("digits", "logs")
        >>> tracker.start()
        >>> tracker.log({"loss": 0.5}, step=1)
        >>> json.loads(tracker.path.read_text())["loss"]
        0.5
    """

    name: ClassVar[str] = "jsonl"
    requires_logging_directory: ClassVar[bool] = True

    def __init__(self, run_name: str, logging_dir: str | Path, resume_step: int | None = None) -> None:
        super().__init__()
        self.path: Path = Path(logging_dir).expanduser() / f"{run_name}.jsonl"
        self._resume_step = resume_step

    @classmethod
    def continuing(cls, token: str, resume_step: int | None) -> dict[str, Any]:
        """Return the options with which it continues its file."""
        return {"resume_step": resume_step}

    @property
    def tracker(self) -> Path:
        """The file."""
        return self.path

    @on_main_process
    def start(self) -> None:
        """Prepare the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            return
        if self._resume_step is None:
            self.path.replace(self.path.with_name(f"{self.path.name}.old"))
            return
        kept = [line for line in self.path.read_text("utf-8", errors="replace").split("\n") if self._is_kept(line)]
        replace_file(self.path, lambda path: path.write_text("".join(f"{line}\n" for line in kept), "utf-8"))

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the settings."""
        self._write([{"settings": values}])

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write values."""
        self._write([_at(step, {**kwargs, **values})])

    @on_main_process
    def log_points(self, points: Any) -> None:
        """Write the values of several calls."""
        self._write([_line(point) for point in points])

    @on_main_process
    def log_table(
        self, table_name: str, columns: list[str], data: list[list[Any]], step: int | None = None, **kwargs: Any
    ) -> None:
        """Write a table."""
        self._write([{"step": step, **kwargs, "table": table_name, "columns": columns, "data": data}])

    def _write(self, lines: list[Mapping[str, Any]]) -> None:
        text = "".join(f"{json.dumps(json_safe(dict(line)), ensure_ascii=False, allow_nan=False)}\n" for line in lines)
        append_text(self.path, text)

    def _is_kept(self, line: str) -> bool:
        try:
            step = json.loads(line).get("step")
        except (ValueError, AttributeError):  # an incomplete line of a killed program
            return False
        return not isinstance(step, int) or self._resume_step is None or step <= self._resume_step


def _line(point: Point) -> dict[str, Any]:
    return _at(point.step, {"time": round(point.time, 3), **point.kwargs, **point.values})


def _at(step: int | None, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a step; a value of your own called `step` counts only where no step is given."""
    entry = {"step": step, **values}
    return entry if step is None else entry | {"step": step}
