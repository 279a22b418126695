"""A table of the model's layers, printed before training."""

import sys
from collections.abc import Iterable
from typing import Any, TextIO

from torch import nn

from trainer_lib.callbacks.text_tables import aligned, show_table
from trainer_lib.events import Callback, Run
from trainer_lib.foundation.errors import ConfigurationError

_COLUMNS = ("layer", "class", "shape", "parameters", "trained")


class ModelSummary(Callback):
    """Prints a table of the model's layers when training begins: weight shapes, parameters, and trainable parameters.

    The totals go into the run's history, and the table to trackers that support tables. Weights shared by several
    layers count in the first one. Rank 0 prints.

    Args:
        depth: The deepest level to list; deeper layers count in their parent. `None` lists all levels.
        file: Where to print; by default standard output.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> ModelSummary().on_fit_begin(Run(model=model))
        layer  class   shape     parameters  trained
        0      Linear  8×6 8             56       56
        1      Tanh                       0        0
        2      Linear  2×8 2             18       18
        Total: 74 parameters, 74 trained; 0.0 MB.
    """

    order = 101  # after the history and the trackers have begun

    def __init__(self, depth: int | None = None, file: TextIO | None = None) -> None:
        if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 1):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(
                f"ModelSummary(depth) must be a whole number of at least 1, or None for all levels (got {depth!r})."
            )
        self._depth, self._file = depth, file

    def on_fit_begin(self, run: Run) -> None:
        if not run.is_main_process:
            return
        rows = [row for name, model in run.modules.items() for row in _rows(name, model, self._depth)]
        parameters = {id(p): p for model in run.modules.values() for p in model.parameters()}.values()
        total, trained = _count(parameters)
        size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        file = self._file or sys.stdout
        print(aligned(_COLUMNS, rows), file=file)
        print(f"Total: {total:,} parameters, {trained:,} trained; {size / 1e6:,.1f} MB.", file=file)
        run.record_event("model", parameters=total, trained=trained, bytes=size, layers=len(rows))
        show_table(run, "model", _COLUMNS, rows)


def _rows(prefix: str, model: nn.Module, depth: int | None) -> list[list[Any]]:
    """Return a row for each layer that holds weights or has no children."""
    seen: set[int] = set()
    rows = list[list[Any]]()
    for name, module in model.named_modules():
        level = len(name.split(".")) if name else 0
        if depth is not None and level > depth:
            continue
        is_cut = level == depth
        children = list(module.children())
        parameters = list(module.parameters(recurse=is_cut))
        if children and not parameters and not is_cut:
            continue
        unseen = [p for p in {id(p): p for p in parameters}.values() if id(p) not in seen]
        seen.update(map(id, unseen))
        shapes = [] if is_cut and children else [_shape(parameter) for parameter in parameters]
        title = ".".join(part for part in (prefix, name) if part) or type(model).__name__
        rows.append([title, type(module).__name__, " ".join(shapes), *_count(unseen)])
    return rows


def _count(parameters: Iterable[nn.Parameter]) -> tuple[int, int]:
    """Return the number of elements in all parameters, and in the trainable ones."""
    listed = list(parameters)
    return sum(p.numel() for p in listed), sum(p.numel() for p in listed if p.requires_grad)


def _shape(parameter: nn.Parameter) -> str:
    return "×".join(map(str, parameter.shape)) or "1"
