"""Show progress: a bar in a terminal or a notebook, or a line now and then in a log file.

Only one rank of a machine shows its progress, so that ranks do not print over one another.
"""

import contextlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.state.partial_state import PartialState

if TYPE_CHECKING:
    from tqdm.auto import tqdm as Bar


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> "Bar[Any]":
    """Return a tqdm bar that is visible on the first rank of each machine only.

    Args:
        *args: Positional arguments of `tqdm.auto.tqdm`.
        main_process_only: Whether to hide the bars of the other ranks.
        **kwargs: Keyword arguments of `tqdm.auto.tqdm`.

    Example:
        >>> sum(tqdm([1, 2, 3], disable=True))
        6
    """
    from tqdm.auto import tqdm as make_bar

    if args and isinstance(args[0], bool):
        raise ConfigurationError(
            f"The first argument of tqdm must be an iterable (got {args[0]}). Give main_process_only by name: "
            f"main_process_only={args[0]}."
        )
    if main_process_only and not PartialState().is_local_main_process:
        kwargs["disable"] = True
    return make_bar(*args, **kwargs)


class Progress(Protocol):
    """A progress display.

    Attributes:
        interval: The shortest time between two calls of `show`, in seconds.
    """

    interval: float

    def show(self, done: float) -> None:
        """Display the amount that is done."""
        ...

    def tell(self, text: str) -> None:
        """Set the text beside the bar; the next `show` displays it."""
        ...

    def write(self, line: str) -> None:
        """Write a line above the bar."""
        ...

    def leave_out(self, seconds: float) -> None:
        """Exclude a pause from the speed."""
        ...

    def close(self, done: float) -> None:
        """Display the final state, or remove the bar."""
        ...


def is_live(file: TextIO | None) -> bool:
    """Whether the file can show a moving bar: a terminal or a notebook. A closed one is `None`."""
    return (file is not None and file.isatty()) or any(
        base.__module__ == "tqdm.notebook" for base in _bar_class().__mro__
    )


def show_progress(
    title: str,
    file: TextIO,
    *,
    total: float | None = None,
    done: float = 0,
    in_seconds: bool = False,
    stays: bool = True,
    seconds_per_line: float = 30.0,
) -> Progress:
    """Start a progress display: a bar in a terminal or notebook, else lines.

    Args:
        title: The title of the work.
        file: The file to write to.
        total: The total amount, if known.
        done: The amount that is already done.
        in_seconds: Whether the amount is a time in seconds, not a number of iterations.
        stays: Whether the display stays after the end.
        seconds_per_line: The time between lines.
    """
    if is_live(file):
        return _Bar(title, file, total, done, in_seconds, stays)
    return _Lines(title, file, total, done, in_seconds, stays, seconds_per_line)


@contextlib.contextmanager
def lines_above_bars() -> Generator[None]:
    """Write log lines and warnings above the bars, not into them."""
    from tqdm.contrib.logging import logging_redirect_tqdm

    show_warning_before = warnings.showwarning

    def show_warning(*args: Any, **kwargs: Any) -> None:
        with _bar_class().external_write_mode(file=sys.stderr):
            show_warning_before(*args, **kwargs)

    with logging_redirect_tqdm(tqdm_class=_bar_class()) if _logs_to_console() else contextlib.nullcontext():
        warnings.showwarning = show_warning
        try:
            yield
        finally:
            warnings.showwarning = show_warning_before


# The text comes before the times, since a narrow terminal cuts off the end.
_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt}{postfix} [{elapsed}<{remaining}, {rate_fmt}]"


class _Bar:
    """A tqdm bar that is redrawn on each `show`."""

    interval = 0.2

    def __init__(
        self, title: str, file: TextIO, total: float | None, done: float, in_seconds: bool, stays: bool
    ) -> None:
        self._bar = _bar_class()(
            desc=title,
            total=total,
            initial=done,
            file=file,
            leave=stays,
            **_width(file),
            bar_format=None if total is None else _FORMAT,
            # Callers of `show` keep to `interval` themselves.
            mininterval=0,
            miniters=0,
            smoothing=0.1,
        )
        self._in_seconds = in_seconds

    def show(self, done: float) -> None:
        self._set_clock(done)
        self._bar.update(done - self._bar.n)

    def tell(self, text: str) -> None:
        self._bar.set_postfix_str(text, refresh=False)

    def write(self, line: str) -> None:
        self._bar.write(line, file=self._bar.fp)

    def leave_out(self, seconds: float) -> None:
        self._bar.start_t += seconds
        self._bar.last_print_t += seconds

    def close(self, done: float) -> None:
        self._set_clock(done)
        self._bar.n = done
        self._bar.close()

    def _set_clock(self, done: float) -> None:
        # For an amount of time, replace tqdm's iterations per second by the clock.
        if self._in_seconds:
            of = "" if self._bar.total is None else f"/{_clock(self._bar.total)}"
            self._bar.bar_format = f"{{l_bar}}{{bar}}| {_clock(done)}{of}{{postfix}}"


class _Lines:
    """A line at intervals, for a file."""

    def __init__(
        self,
        title: str,
        file: TextIO,
        total: float | None,
        done: float,
        in_seconds: bool,
        stays: bool,
        interval: float,
    ) -> None:
        self.interval = interval
        self._title, self._file, self._total, self._in_seconds = title, file, total, in_seconds
        self._first, self._text = done, ""
        self._ends_with_line = stays  # else only after an earlier line: short work gets none
        self._began = time.monotonic()

    def show(self, done: float) -> None:
        self._ends_with_line = True
        self.write(self._line(done, time.monotonic() - self._began))

    def tell(self, text: str) -> None:
        self._text = text

    def write(self, line: str) -> None:
        self._file.write(f"{line}\n")
        self._file.flush()

    def leave_out(self, seconds: float) -> None:
        self._began += seconds

    def close(self, done: float) -> None:
        if self._ends_with_line:
            self.show(done)

    def _line(self, done: float, seconds: float) -> str:
        speed = 1.0 if self._in_seconds else (done - self._first) / seconds if seconds > 0 else 0.0
        line = f"{self._title}: {self._amount(done)}"
        if self._total is not None:
            line += f"/{self._amount(self._total)} ({done / self._total:.0%})"
        if not self._in_seconds:
            line += f", {speed:.4g} it/s, {_clock(seconds)} so far"
        if self._total is not None and speed > 0:
            line += f", {_clock((self._total - done) / speed)} left"
        return f"{line}, {self._text}" if self._text else line

    def _amount(self, amount: float) -> str:
        return _clock(amount) if self._in_seconds else str(round(amount))


def _clock(seconds: float) -> str:
    from tqdm.std import tqdm as plain_bar

    return plain_bar.format_interval(seconds)


def _width(file: TextIO) -> dict[str, Any]:
    if not file.isatty():
        return {"dynamic_ncols": True}
    try:
        columns, lines = os.get_terminal_size(file.fileno())
    except OSError:
        columns = lines = 0
    # A terminal without a size, as in many containers, reports 0, and tqdm would show nothing.
    return {"dynamic_ncols": True} if columns and lines else {"ncols": columns or 80, "nrows": lines or 24}


def _bar_class() -> Any:
    from tqdm.auto import tqdm as bar

    return bar


def _logs_to_console() -> bool:
    # Without a handler, `logging` writes warnings to standard error itself.
    handlers = logging.root.handlers
    streams = [handler.stream for handler in handlers if isinstance(handler, logging.StreamHandler)]
    return not handlers or any(stream in (sys.stdout, sys.stderr) for stream in streams)
