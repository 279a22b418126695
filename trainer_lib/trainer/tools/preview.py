"""A preview of the first training batches, as the model gets them."""

import base64
import html
import io
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer_lib.collectives.ragged_gather import holds_rows
from trainer_lib.events import Control, Modifier
from trainer_lib.events.callback import EVENTS, overrides
from trainer_lib.foundation.imports import is_matplotlib_available
from trainer_lib.foundation.tensors.batch_fields import IGNORE_INDEX, as_mapping, targets_of
from trainer_lib.foundation.tensors.pytree import named_leaves
from trainer_lib.options.base import check_count
from trainer_lib.trainer.data.batch_rows import count_rows
from trainer_lib.trainer.fit.session import FitSession
from trainer_lib.trainer.fit.train_loop import TrainLoop, Update
from trainer_lib.trainer.safety.signals import Signals
from trainer_lib.trainer.tools.sandbox import short_sandbox
from trainer_lib.trainer.trainer_interface import TrainerInterface

_TOOL = "preview"
_CHANGING_BATCHES = [name for name, event in EVENTS.items() if event.per_update and "run.batch" in event.changes]
_TEXTS, _LETTERS = 2, 200  # rows that are shown as text, and the characters of each
_CLASSES = 10  # labels whose counts are shown
_IMAGES, _CHANNELS = 4, (1, 3)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A tensor of a batch, or another value in it.

    Attributes:
        name: Its name in the batch.
        kind: The dtype of a tensor, or the Python type.
        shape: Its shape; for a list its length.
        device: Its device; `None` for values that are not tensors.
        low: The smallest finite number; `None` if there are none.
        high: The largest finite number.
        not_finite: How many of its numbers are NaN or Inf.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    device: str | None = None
    low: float | None = None
    high: float | None = None
    not_finite: int = 0

    def __str__(self) -> str:
        """Return its description in one line, without its name."""
        words = [self.kind, str(list(self.shape))]
        words += [f"on {self.device}"] if self.device else []
        words += [f"{self.low:.4g} … {self.high:.4g}"] if self.low is not None else []
        words += [f"{self.not_finite} NOT FINITE"] if self.not_finite else []
        return "  ".join(words)


@dataclass(frozen=True, kw_only=True)
class BatchView:
    """A description of a batch.

    Attributes:
        rows: The number of samples; `None` if it is not known.
        parts: The values in the batch.
        texts: The first rows decoded as text, by the names of their tokens, if there is a tokenizer.
        labels: The count of each label, if labels are classes.
        images: The first images, scaled to 0 to 1 with channels last, if there are any.
    """

    rows: int | None
    parts: list[Part]
    texts: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    labels: dict[int, int] = field(default_factory=dict[int, int])
    images: list[Any] = field(default_factory=list[Any], repr=False)


@dataclass(frozen=True, kw_only=True)
class Preview:
    """The first batches of this rank, as the model gets them; shown as text, or as a table in a notebook.

    Attributes:
        batches: The description of each batch.
        changed_by: The callbacks that may have changed the batches.
    """

    batches: list[BatchView]
    changed_by: list[str] = field(default_factory=list[str])

    def __repr__(self) -> str:
        """Return the preview as text."""
        lines = [f"batches changed by {', '.join(self.changed_by)}"] if self.changed_by else []
        for number, batch in enumerate(self.batches, start=1):
            descriptions = _descriptions(batch)
            width = max(len(name) for name, _ in descriptions)
            rows = "" if batch.rows is None else f": {batch.rows} rows"
            lines += [f"batch {number}{rows}", *(f"  {name:<{width}}  {text}" for name, text in descriptions)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the preview as HTML, with embedded images."""
        changed = f"<p>batches changed by {html.escape(', '.join(self.changed_by))}</p>" if self.changed_by else ""
        parts = [changed]
        for number, batch in enumerate(self.batches, start=1):
            cells = "".join(
                f'<tr><th style="text-align: left">{html.escape(name)}</th>'
                f'<td style="text-align: left">{html.escape(text)}</td></tr>'
                for name, text in _descriptions(batch)
            )
            rows = "" if batch.rows is None else f": {batch.rows} rows"
            parts.append(f"<table><caption>batch {number}{rows}</caption>{cells}</table>{_pictures(batch)}")
        return "".join(parts)


def preview(trainer: TrainerInterface, batches: int) -> Preview:
    """Preview batches; see `Trainer.preview`."""
    check_count("batches", batches)
    with short_sandbox(trainer, _TOOL, max_steps=batches):
        changing = [
            type(callback).__name__
            for callback in trainer.events
            if isinstance(callback, Modifier) and any(overrides(callback, name) for name in _CHANGING_BATCHES)
        ]
        session = FitSession(trainer, None, Signals((), Control(), is_main=False))
        trainer.run = session.run
        try:
            session.begin(None)
            looking = session.loop(_Looking)
            looking.look_at(batches)
        finally:
            session.close("stopped")
    return Preview(batches=looking.seen, changed_by=changing)


class _Looking(TrainLoop):
    """The loop, which looks at batches instead of training on them."""

    seen: list[BatchView]

    def look_at(self, batches: int) -> None:
        """Go over so many batches, or as many as a pass has."""
        self.seen = []
        self.events.fire("on_epoch_begin", self.run)
        for number, batch in enumerate(self.loader, start=1):
            update = self.micro_batch(batch)
            if update is not None:
                self.finish_step(update)
            if number == batches:
                return

    def forward_backward(self) -> None:
        """Note what a batch holds, unless it is a filler batch or skipped."""
        run = self.run
        if not self.window.is_filler and not run.control.skip_batch:
            self.seen.append(_view_of(run.batch, run.trainer))
        run.control.skip_batch = False

    def update(self) -> Update:
        """Leave the weights alone: there are no gradients."""
        return Update.STEP


# -- the description of a batch ---------------------------------------------------------------------------------------


def _view_of(batch: Any, trainer: TrainerInterface) -> BatchView:
    leaves = [(_readable(name), leaf) for name, leaf in named_leaves(batch, is_leaf=holds_rows)]
    return BatchView(
        rows=count_rows(batch),
        parts=[_part(name, leaf) for name, leaf in leaves],
        texts=_texts(batch, trainer.processing_class),
        labels=_labels(targets_of(batch, trainer.args.label_names)),
        images=next((_images(leaf) for _, leaf in leaves if _are_images(leaf)), []),
    )


def _readable(name: str) -> str:
    """Return the readable name of a part of a batch: `labels` instead of `['labels']`."""
    return name.replace("']['", ".").replace("['", "").replace("']", "").lstrip(".") or "batch"


def _part(name: str, leaf: Any) -> Part:
    if not isinstance(leaf, (Tensor, np.ndarray)):
        is_list = isinstance(leaf, (list, tuple))
        kind = f"{type(leaf).__name__} of {type(leaf[0]).__name__}" if is_list and leaf else type(leaf).__name__
        return Part(name=name, kind=kind, shape=(len(leaf),) if is_list else ())
    device = str(leaf.device) if isinstance(leaf, Tensor) else None
    kind, shape = str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape)
    values = torch.as_tensor(leaf).detach()
    if values.is_complex() or not values.numel():
        return Part(name=name, kind=kind, shape=shape, device=device)
    finite = values[torch.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (None, None)
    bad = values.numel() - finite.numel()
    return Part(name=name, kind=kind, shape=shape, device=device, low=low, high=high, not_finite=bad)


def _texts(batch: Any, processor: Any) -> dict[str, list[str]]:
    named, decode = as_mapping(batch), getattr(processor, "decode", None)
    if named is None or not callable(decode):
        return {}
    tokens = {
        name: value
        for name, value in named.items()
        if (name.endswith("input_ids") or name == "labels") and isinstance(value, Tensor) and value.ndim == 2
    }
    whole = {name: value for name, value in tokens.items() if not value.is_floating_point()}
    return {name: [str(decode(row[row != IGNORE_INDEX])) for row in value[:_TEXTS]] for name, value in whole.items()}


def _labels(targets: Any) -> dict[int, int]:
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.is_complex() or targets.ndim != 1:
        return {}
    values, counts = torch.unique(targets, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _are_images(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim == 4 and leaf.shape[1] in _CHANNELS and leaf.numel() > 0


def _images(leaf: Tensor) -> list[Any]:
    images = leaf[:_IMAGES].detach().float().nan_to_num().cpu().movedim(1, -1)
    low, high = images.amin(), images.amax()
    return list(((images - low) / (high - low).clamp(min=1e-12)).numpy())


def _descriptions(batch: BatchView) -> list[tuple[str, str]]:
    """Return what is shown of a batch, by what it is called."""
    descriptions = [(part.name, str(part)) for part in batch.parts]
    if batch.labels:
        most = sorted(batch.labels.items(), key=lambda pair: -pair[1])[:_CLASSES]
        more = f" and {len(batch.labels) - _CLASSES} more labels" if len(batch.labels) > _CLASSES else ""
        descriptions.append(("label counts", ", ".join(f"{count} × {label}" for label, count in sorted(most)) + more))
    for name, texts in batch.texts.items():
        descriptions += [(f"{name} as text", repr(text[:_LETTERS] + "…" * (len(text) > _LETTERS))) for text in texts]
    return descriptions


def _pictures(batch: BatchView) -> str:
    if not batch.images or not is_matplotlib_available():
        return ""
    from matplotlib.image import imsave

    found: list[str] = []
    for image in batch.images:
        file = io.BytesIO()
        imsave(
            file, np.squeeze(image, -1) if image.shape[-1] == 1 else image, format="png", cmap="gray", vmin=0, vmax=1
        )
        data = base64.b64encode(file.getvalue()).decode()
        found.append(
            f'<img style="height: 96px; margin: 4px; image-rendering: pixelated" src="data:image/png;base64,{data}">'
        )
    return "".join(found)
