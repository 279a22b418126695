"""TensorBoard tracker."""

import functools
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from trainer_lib.foundation.imports import require
from trainer_lib.tracking.base import BuiltInTracker, Point, on_main_process
from trainer_lib.tracking.delivery.plain_values import flat


def _writing(method: Callable[..., None]) -> Callable[..., None]:
    """Flush what a method writes; after an error open another file, as the writer of this one has lost its thread."""

    @functools.wraps(method)
    def write(self: "TensorBoardTracker", *args: Any, **kwargs: Any) -> None:
        if self.writer is None:
            self.start()
        try:
            method(self, *args, **kwargs)
            self.tracker.flush()
        except OSError:
            failed, self.writer = self.tracker, None
            with suppress(AttributeError, OSError):  # `log_points` may have called `log`
                failed.close()
            raise

    return write


class TensorBoardTracker(BuiltInTracker):
    """Writes event files into `<logging_dir>/<run_name>`.

    Args:
        run_name: The name of the run, and of its folder.
        logging_dir: The folder of all runs.
        **kwargs: Arguments of `torch.utils.tensorboard.SummaryWriter`.
    """

    name: ClassVar[str] = "tensorboard"
    requires_logging_directory: ClassVar[bool] = True
    module: ClassVar[str] = "tensorboard"
    extra: ClassVar[str] = "tensorboard"
    options_of: ClassVar[tuple[str, str] | None] = ("torch.utils.tensorboard.writer", "SummaryWriter.__init__")
    set_options: ClassVar[frozenset[str]] = frozenset({"log_dir"})
    image_options: ClassVar[frozenset[str]] = frozenset({"dataformats"})

    @on_main_process
    def __init__(self, run_name: str, logging_dir: str | Path, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir: str = str(Path(logging_dir).expanduser() / run_name)
        self._options = kwargs
        self.writer: Any = None

    @classmethod
    def continuing(cls, token: str, resume_step: int | None) -> dict[str, Any]:
        """Return the options that remove the steps after the resume from TensorBoard."""
        return {} if resume_step is None else {"purge_step": resume_step + 1}

    @property
    def tracker(self) -> Any:
        """The `SummaryWriter`."""
        return self.writer

    @on_main_process
    def start(self) -> None:
        """Open the file."""
        from torch.utils.tensorboard.writer import SummaryWriter

        self.writer = SummaryWriter(self.logging_dir, **self._options)
        self._options.pop("purge_step", None)  # the file after an error continues this one

    @on_main_process
    @_writing
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the settings as hyperparameters, as text, and as `hparams.yml`."""
        import yaml
        from torch.utils.tensorboard.summary import hparams

        known = {name: _hyperparameter(value) for name, value in flat(values).items()}
        for summary in hparams(known, {}):
            self.writer.file_writer.add_summary(summary)
        self.writer.add_text("settings", f"```json\n{json.dumps(values, indent=2, default=str)}\n```")
        Path(self.logging_dir, "hparams.yml").write_text(yaml.safe_dump(values), encoding="utf-8")

    @on_main_process
    @_writing
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write numbers as scalars, and texts as text."""
        for name, value in flat(values).items():
            if isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **kwargs)
            else:
                self.writer.add_scalar(name, value, global_step=step, **kwargs)

    @on_main_process
    @_writing
    def log_points(self, points: Sequence[Point]) -> None:
        """Write the values of several calls, one event each."""
        summaries = require("tensorboard.compat.proto.summary_pb2", self.extra)

        for point in points:
            if point.kwargs:
                self.log(point.values, step=point.step, walltime=point.time, **point.kwargs)
                continue
            numbers = {name: value for name, value in point.values.items() if not isinstance(value, str)}
            scalars = [summaries.Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
            if scalars:
                self.writer.file_writer.add_summary(summaries.Summary(value=scalars), point.step, point.time)
            for name, value in point.values.items():
                if isinstance(value, str):
                    self.writer.add_text(name, value, point.step, walltime=point.time)

    @on_main_process
    @_writing
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write an image or several per name. With `dataformats`, arrays are passed as they are."""
        for name, value in values.items():
            if isinstance(value, list) or (value.ndim == 4 and value.shape[1] == 4 and not kwargs):
                # Images of several sizes, or with transparency, of which `add_images` makes no grid.
                for number, image in enumerate(value):
                    self.writer.add_image(f"{name}/{number}", image, global_step=step, **kwargs)
            elif value.ndim == 4:
                self.writer.add_images(name, value, global_step=step, **kwargs)
            else:
                self.writer.add_image(name, value, global_step=step, **kwargs)

    @on_main_process
    @_writing
    def log_table(
        self, table_name: str, columns: list[str], data: list[list[Any]], step: int | None = None, **kwargs: Any
    ) -> None:
        """Write a table, as Markdown text."""
        rows = [columns, ["---"] * len(columns), *data]
        text = "\n".join("| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows)
        self.writer.add_text(table_name, text, global_step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Close the file."""
        if self.writer is not None:
            self.writer.close()


def _cell(value: Any) -> str:
    """Return a cell of a Markdown table, in which a line break or a bar would end it."""
    return "<br>".join(str(value).replace("\\", "\\\\").replace("|", "\\|").splitlines())


def _hyperparameter(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str)) else str(value)
