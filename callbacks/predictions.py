"""Sample predictions at each evaluation, next to inputs and labels."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer_lib.callbacks.text_tables import show_table
from trainer_lib.events import Callback, Run
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.foundation.tensors.batch_fields import as_mapping, split, targets_of
from trainer_lib.runs.png_images import is_image, png_uri

_FEW = 8  # the longest row of numbers shown in full
_LONGEST = 500  # characters in a cell
_NOT_SHOWN = ("attention_mask", "token_type_ids", "position_ids")
_TOKENS = ("input", "input_ids", "decoder_input_ids", "prompt_input_ids", "prediction", "label")

Decode = Callable[[list[int]], str]


@frozen_dataclass
class _Row:
    """A sample in a table: its cells, and the images of some of them, by column."""

    cells: dict[str, Any]
    images: dict[str, str]


class Predictions(Callback):
    """Shows some samples at each evaluation: inputs, predictions and labels.

    They are the first samples of each dataset that rank 0 evaluates, the same each time. Trackers that support tables
    get the table "predictions" (for a named dataset "predictions/<name>"), and the run's history gets an event. For
    class labels and score predictions, the class with the highest score is shown; numbers and short rows of numbers are
    shown in full, larger tensors by shape and range. The run's report shows the tables, with a small picture of each
    tensor that is an image (of 1 or 3 channels).

    Args:
        samples: The number of samples per dataset.
        decode: A function from token ids to text; padding and ignored tokens are left out. By default the `decode` of
            the trainer's `processing_class`, if it has one. For causal language models the predictions are aligned with
            the labels.

    Example:
        >>> show = Predictions(4, decode=lambda tokens: " ".join(map(str, tokens)))
    """

    def __init__(self, samples: int = 8, decode: Decode | None = None) -> None:
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"Predictions(samples) must be a whole number of at least 1 (got {samples!r}).")
        if decode is not None and not callable(decode):
            raise ConfigurationError(f"Predictions(decode) must be a function of a list of token ids (got {decode!r}).")
        self._samples, self._decode = samples, decode
        self._rows: list[_Row] = []
        self._pictured: set[str] = set()  # datasets whose images are in the history: they are the same each time

    def on_evaluate_set_begin(self, run: Run, name: str, batches: int | None) -> None:
        del run, name, batches
        self._rows = []

    @torch.no_grad()
    def on_evaluate_batch_end(self, run: Run) -> None:
        missing = self._samples - len(self._rows)
        # A batch that was split because of its size has no outputs.
        if missing > 0 and run.is_main_process and run.outputs is not None:
            self._rows += self._rows_of(run, missing)

    def on_evaluate_set_end(self, run: Run, name: str, metrics: dict[str, float]) -> None:
        del metrics
        rows, self._rows = self._rows, []
        if rows:
            columns = list(dict.fromkeys(column for row in rows for column in row.cells))
            cells = [[row.cells.get(column, "") for column in columns] for row in rows]
            facts: dict[str, Any] = {"set": name} if name else {}
            if name not in self._pictured and any(row.images for row in rows):
                facts["images"] = [[row.images.get(column) for column in columns] for row in rows]
                self._pictured.add(name)
            run.record_event("predictions", **facts, columns=columns, rows=cells)
            show_table(run, f"predictions/{name}" if name else "predictions", columns, cells)

    def _rows_of(self, run: Run, count: int) -> list["_Row"]:
        names = getattr(run.args, "label_names", None)
        labels = targets_of(run.batch, names)
        inputs = run.batch if labels is None else split(run.batch, names)[0]
        if labels is None and isinstance(inputs, list) and len(inputs) == 1:  # as torch collates a dataset of 1-tuples
            inputs = inputs[0]
        columns = {
            **_named("input", inputs, count),
            **_named("prediction", run.outputs, count),
            **({} if labels is None else _named("label", labels, count)),
        }
        columns = {column: values for column, values in columns.items() if column not in _NOT_SHOWN}
        decode = self._decode or _decoder(run)
        is_shifted = run.is_shifted
        ids = _sample_ids(run)
        rows = list[_Row]()
        for index in range(min(map(len, columns.values()), default=0)):
            row = {column: values[index] for column, values in columns.items()}
            if "prediction" in row and "label" in row:
                row["prediction"], row["label"] = _aligned(row["prediction"], row["label"], is_shifted)
            shown = {name: _shown(value, decode if name in _TOKENS else None) for name, value in row.items()}
            images = {name: png_uri(value) for name, value in row.items() if is_image(value)}
            rows.append(_Row({"sample": ids[index], **shown} if index < len(ids) else shown, images))
        return rows


def _named(name: str, values: Any, count: int) -> dict[str, Any]:
    """Return the first rows of values, by column name."""
    named = as_mapping(values)
    if named is not None:
        columns = {str(key): part for key, part in named.items() if part is not None}
        if name != "input":  # the same names may be among the inputs
            columns = {f"{name} {key}": part for key, part in columns.items()}
    elif isinstance(values, tuple):
        columns = {f"{name} {number}": part for number, part in enumerate(values, 1)}
    else:
        columns = {name: values}
    return {column: _first(part, count) for column, part in columns.items() if _has_rows(part)}


def _has_rows(values: Any) -> bool:
    return isinstance(values, (list, tuple)) or (isinstance(values, Tensor) and values.ndim > 0)


def _first(values: Any, count: int) -> Any:
    return values[:count].detach().cpu() if isinstance(values, Tensor) else values[:count]


def _sample_ids(run: Run) -> list[Any]:
    """Return the sample ids of a batch, if known."""
    loader = None if run.accelerator is None else run.accelerator.gradient_state.active_dataloader
    ids = getattr(loader, "sample_ids", None)
    return (ids() if ids is not None else None) or []


def _decoder(run: Run) -> Decode | None:
    processing = getattr(run.trainer, "processing_class", None)
    tokenizer: Any = getattr(processing, "tokenizer", processing)
    if not callable(getattr(tokenizer, "decode", None)):
        return None
    return functools.partial(tokenizer.decode, skip_special_tokens=True)


def _aligned(prediction: Any, label: Any, is_shifted: bool) -> tuple[Any, Any]:
    """Return prediction and label in comparable form: scores as the best class, and only tokens with a label."""
    if not isinstance(prediction, Tensor) or not isinstance(label, Tensor) or label.is_floating_point():
        return prediction, label
    if prediction.is_floating_point():
        if prediction.ndim == label.ndim + 1:
            # The class dimension is last for texts, and first for images.
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
        return decode([token for token in value.tolist() if token >= 0])  # negative ids are padding or ignored
    if value.ndim == 1 and len(value) <= _FEW:
        return ", ".join(str(_rounded(number)) for number in value.tolist())
    shape = "×".join(map(str, value.shape))
    if not value.numel() or value.is_complex():
        return shape
    low, high = (_rounded(bound.item()) for bound in value.aminmax())
    return f"{shape}, {low} to {high}"


def _rounded(number: Any) -> Any:
    return float(f"{number:.4g}") if isinstance(number, float) else number
