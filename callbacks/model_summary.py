"""This file is the layers of a model as a table, before training begins."""

import sys
from collections.abc import Iterable
from typing import Any, TextIO

from torch import nn

from trainer_lib.callbacks.text_tables import aligned, show_table
from trainer_lib.events import Callback, Run
from trainer_lib.foundation.errors import ConfigurationError

_COLUMNS = ("layer", "class", "shape", "parameters", "trained")


class ModelSummary(Callback):
    """Prints a table of the model's layers when training begins: shapes of weights, parameters, and those trained.

    The totals go into the run's history, and the table to trackers that take one. Weights that several layers share
    count in the first of them. The main process prints.

    Args:
        depth: How far down; what lies deeper counts in the layer above. `None`: all the way.
        file: Where to print; by default standard output.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> ModelSummary().on_fit_begin(Run(model=model))
        layer  class   shape     parameters  trained
        0      Linear  8×6 8             56       56
        1      Tanh                       0        0
        2      Linear  2×8 2             18       18
        In all 74 parameters, 74 of them trained; 0.0 MB.
    """

    order = 101  # after the history and the trackers have begun

    def __init__(self, depth: int | None = None, file: TextIO | None = None) -> None:
        if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 1):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"ModelSummary(depth={depth!r}): give a whole number from 1 on, or None for all.")
        self._depth, self._file = depth, file

    def on_fit_begin(self, run: Run) -> None:
        if not run.is_main_process:
            return
        rows = [row for name, model in run.modules.items() for row in _rows(name, model, self._depth)]
        parameters = {id(one): one for model in run.modules.values() for one in model.parameters()}.values()
        everything, trained = _count(parameters)
        size = sum(one.numel() * one.element_size() for one in parameters)
        file = self._file or sys.stdout
        print(aligned(_COLUMNS, rows), file=file)
        print(f"In all {everything:,} parameters, {trained:,} of them trained; {size / 1e6:,.1f} MB.", file=file)
        run.record_event("model", parameters=everything, trained=trained, bytes=size, layers=len(rows))
        show_table(run, "model", _COLUMNS, rows)


def _rows(prefix: str, model: nn.Module, depth: int | None) -> list[list[Any]]:
    """Return a row for each layer that holds weights or has nothing below it."""
    seen: set[int] = set()
    rows = list[list[Any]]()
    for name, module in model.named_modules():
        level = len(name.split(".")) if name else 0
        if depth is not None and level > depth:
            continue
        is_cut = level == depth
        below = list(module.children())
        own = list(module.parameters(recurse=is_cut))
        if below and not own and not is_cut:
            continue
        fresh = [one for one in {id(one): one for one in own}.values() if id(one) not in seen]
        seen.update(map(id, fresh))
        shapes = [] if is_cut and below else [_shape(one) for one in own]
        title = ".".join(part for part in (prefix, name) if part) or type(model).__name__
        rows.append([title, type(module).__name__, " ".join(shapes), *_count(fresh)])
    return rows


def _count(parameters: Iterable[nn.Parameter]) -> tuple[int, int]:
    """Return the numbers in parameters, and in those of them that are trained."""
    there = list(parameters)
    return sum(one.numel() for one in there), sum(one.numel() for one in there if one.requires_grad)


def _shape(parameter: nn.Parameter) -> str:
    return "×".join(map(str, parameter.shape)) or "1"
