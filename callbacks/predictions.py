"""This file is a few samples as the model sees them and what it makes of them, shown at each evaluation."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer_lib.callbacks.text_tables import show_table
from trainer_lib.events import Callback, Run
from trainer_lib.foundation.batch_fields import as_mapping, split, targets_of
from trainer_lib.foundation.errors import ConfigurationError

_FEW = 8  # numbers that are shown one by one
_LONGEST = 500  # letters of a cell
_NOT_SHOWN = ("attention_mask", "token_type_ids", "position_ids")
_TOKENS = ("input", "input_ids", "decoder_input_ids", "prompt_input_ids", "prediction", "label")

Decode = Callable[[list[int]], str]


class Predictions(Callback):
    """Shows some samples at each evaluation: what goes in, what the model makes of it, and what it should be.

    They are the first samples of each set that the main process evaluates, the same each time. Trackers that take
    tables get them as one, "predictions" (of a set that has a name "predictions/<set>"), and the run's history as a
    note. Where labels are classes and predictions scores, the class of the highest score is shown; numbers and short
    rows of them as they are; of what is larger its shape and its range.

    Args:
        samples: How many of each set.
        decode: Makes a text of tokens, a list of numbers without what does not count; by default the `decode` of the
            trainer's `processing_class`, if it has one. A model that compares each token with the next is shown with
            what it predicts of each label.

    Example:
        >>> show = Predictions(4, decode=lambda tokens: " ".join(map(str, tokens)))
    """

    def __init__(self, samples: int = 8, decode: Decode | None = None) -> None:
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"Predictions(samples={samples!r}): give a whole number from 1 on.")
        if decode is not None and not callable(decode):
            raise ConfigurationError(f"Predictions(decode={decode!r}): give a function of a list of tokens.")
        self._samples, self._decode = samples, decode
        self._rows: list[dict[str, Any]] = []

    def on_evaluate_set_begin(self, run: Run, name: str, batches: int | None) -> None:
        del run, name, batches
        self._rows = []

    @torch.no_grad()
    def on_evaluate_batch_end(self, run: Run) -> None:
        missing = self._samples - len(self._rows)
        # Of a batch that was computed in parts there are no outputs.
        if missing > 0 and run.is_main_process and run.outputs is not None:
            self._rows += self._rows_of(run, missing)

    def on_evaluate_set_end(self, run: Run, name: str, metrics: dict[str, float]) -> None:
        del metrics
        rows, self._rows = self._rows, []
        if rows:
            columns = list(dict.fromkeys(column for row in rows for column in row))
            cells = [[row.get(column, "") for column in columns] for row in rows]
            run.record_event("predictions", **({"set": name} if name else {}), columns=columns, rows=cells)
            show_table(run, f"predictions/{name}" if name else "predictions", columns, cells)

    def _rows_of(self, run: Run, count: int) -> list[dict[str, Any]]:
        names = getattr(run.args, "label_names", None)
        labels = targets_of(run.batch, names)
        inputs = run.batch if labels is None else split(run.batch, names)[0]
        if labels is None and isinstance(inputs, list) and len(inputs) == 1:  # as torch collates what has one part
            inputs = inputs[0]
        columns = {
            **_named("input", inputs, count),
            **_named("prediction", run.outputs, count),
            **({} if labels is None else _named("label", labels, count)),
        }
        columns = {column: values for column, values in columns.items() if column not in _NOT_SHOWN}
        decode = self._decode or _decoder(run)
        is_shifted = bool(getattr(run.trainer, "is_shifted", False))
        numbers = _numbers(run)
        rows = list[dict[str, Any]]()
        for at in range(min(map(len, columns.values()), default=0)):
            row = {column: values[at] for column, values in columns.items()}
            if "prediction" in row and "label" in row:
                row["prediction"], row["label"] = _compared(row["prediction"], row["label"], is_shifted)
            shown = {name: _shown(value, decode if name in _TOKENS else None) for name, value in row.items()}
            rows.append({"sample": numbers[at], **shown} if at < len(numbers) else shown)
        return rows


def _named(name: str, values: Any, count: int) -> dict[str, Any]:
    """Return the first rows of values by the names of columns."""
    named = as_mapping(values)
    if named is not None:
        found = {str(one): part for one, part in named.items() if part is not None}
        if name != "input":  # the same names may be among the inputs
            found = {f"{name} {one}": part for one, part in found.items()}
    elif isinstance(values, tuple):
        found = {f"{name} {place}": part for place, part in enumerate(values, 1)}
    else:
        found = {name: values}
    return {one: _first(part, count) for one, part in found.items() if _has_rows(part)}


def _has_rows(values: Any) -> bool:
    return isinstance(values, (list, tuple)) or (isinstance(values, Tensor) and values.ndim > 0)


def _first(values: Any, count: int) -> Any:
    return values[:count].detach().cpu() if isinstance(values, Tensor) else values[:count]


def _numbers(run: Run) -> list[Any]:
    """Return which samples a batch holds, as far as that can be known."""
    loader = None if run.accelerator is None else run.accelerator.gradient_state.active_dataloader
    ids = getattr(loader, "sample_ids", None)
    return (ids() if ids is not None else None) or []


def _decoder(run: Run) -> Decode | None:
    processing = getattr(run.trainer, "processing_class", None)
    tokenizer: Any = getattr(processing, "tokenizer", processing)
    if not callable(getattr(tokenizer, "decode", None)):
        return None
    return functools.partial(tokenizer.decode, skip_special_tokens=True)


def _compared(prediction: Any, label: Any, is_shifted: bool) -> tuple[Any, Any]:
    """Return a prediction in the form of its label: scores as the class of the highest, texts where labels count."""
    if not isinstance(prediction, Tensor) or not isinstance(label, Tensor) or label.is_floating_point():
        return prediction, label
    if prediction.is_floating_point():
        if prediction.ndim == label.ndim + 1:
            # Classes are last in texts, and first in images: wherever the label's shape leaves them.
            prediction = prediction.argmax(-1 if prediction.shape[:-1] == label.shape else 0)
        if is_shifted and label.ndim == 1 and prediction.shape == label.shape:
            prediction, label = prediction[:-1], label[1:]
    if label.ndim == 1 and prediction.shape == label.shape and not prediction.is_floating_point():
        counts = label != -100
        prediction, label = prediction[counts], label[counts]
    return prediction, label


def _shown(value: Any, decode: Decode | None) -> Any:
    """Return a value as a cell: a number, or a text."""
    if isinstance(value, Tensor):
        value = _of_tensor(value, decode)
    elif not isinstance(value, (bool, int, float, str)):
        value = str(value)
    return value if not isinstance(value, str) or len(value) <= _LONGEST else value[: _LONGEST - 1] + "…"


def _of_tensor(value: Tensor, decode: Decode | None) -> Any:
    if value.ndim == 0:
        return _rounded(value.item())
    if value.ndim == 1 and decode is not None and not value.is_floating_point() and value.dtype != torch.bool:
        return decode([token for token in value.tolist() if token >= 0])  # negative ones fill up, or do not count
    if value.ndim == 1 and len(value) <= _FEW:
        return ", ".join(str(_rounded(one)) for one in value.tolist())
    shape = "×".join(map(str, value.shape))
    if not value.numel() or value.is_complex():
        return shape
    low, high = (_rounded(one.item()) for one in value.aminmax())
    return f"{shape}, {low} to {high}"


def _rounded(number: Any) -> Any:
    return float(f"{number:.4g}") if isinstance(number, float) else number
