"""The loss of each training sample, and the samples with the largest losses."""

import copy
import functools
import heapq
import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.events import Callback, Run
from trainer_lib.filesystem.atomic_files import replace_file
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.foundation.tensors.batch_fields import IGNORE_INDEX, as_mapping, targets_of
from trainer_lib.logging import get_logger

_logger = get_logger(__name__)

_FOLDER = "sample_losses"
_FIX = "Give SampleLosses(losses=…), a function of a batch and the outputs that returns the loss of each sample."


class SampleLosses(Callback):
    """Records the latest loss of each training sample, and reports the largest.

    At the end of each epoch rank 0 writes its largest losses to the run's history ("top_losses"), and each rank writes
    its own to `sample_losses/process-<rank>.json` in the run's folder; `top_losses` merges these files. Nothing is read
    from the device before the log. A resumed run starts with no losses. Split batches are left out.

    Args:
        top: How many samples to report and to write.
        losses: A function of a batch and the model's outputs that returns the loss of each sample. By default it is
            `loss_fn` with `reduction="none"`. Without a `loss_fn` the outputs (or their `logits`) are compared with the
            targets by cross-entropy for integer targets, and by squared error for others. For a sample with several
            targets, such as a text, it is the mean over the targets that are not ignored.

    Example:
        >>> hard = SampleLosses(top=50)
        >>> hard.top(3)
        []
    """

    def __init__(self, top: int = 20, losses: Callable[[Any, Any], Tensor] | None = None) -> None:
        if isinstance(top, bool) or not isinstance(top, int) or top < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"SampleLosses(top) must be a whole number of at least 1 (got {top!r}).")
        if losses is not None and not callable(losses):
            raise ConfigurationError(
                f"SampleLosses(losses) must be a function of a batch and the outputs (got {losses!r})."
            )
        self._top, self._losses = top, losses
        self._compare: Callable[[Tensor, Tensor], Tensor] = by_kind
        self._ignored = IGNORE_INDEX
        self._seen: dict[Any, float] = {}
        self._waiting: list[tuple[list[Any], Tensor]] = []  # not yet read from the device
        self._has_outputs = False

    def top(self, count: int) -> list[tuple[Any, float]]:
        """Return the samples with the largest losses on this rank, largest first, each with its loss."""
        self._read()
        return _largest(count, self._seen.items())

    def on_fit_begin(self, run: Run) -> None:
        self._seen, self._waiting, self._has_outputs = {}, [], False
        if run.accelerator is not None and run.accelerator.sequence_split.ranks is not None:
            raise ConfigurationError(
                "SampleLosses needs the loss of whole samples, of which a rank has parts with cp_size or sp_size. "
                "Leave it out, or set both to 1."
            )
        loss_fn = getattr(run.trainer, "loss_fn", None)
        if self._losses is None and loss_fn is not None:
            self._compare = unreduced(loss_fn)
            options: Mapping[str, Any] = getattr(loss_fn, "keywords", None) or {}  # of a partial function
            self._ignored = options.get("ignore_index", getattr(loss_fn, "ignore_index", IGNORE_INDEX))

    @torch.no_grad()
    def on_micro_batch_end(self, run: Run) -> None:
        if run.outputs is None and (self._has_outputs or _may_be_split(run)):
            _logger.warning_once("SampleLosses leaves out batches that are split because they do not fit into memory.")
            return
        self._has_outputs = True
        samples: list[Any] | None = run.accelerator.gradient_state.active_dataloader.sample_ids()
        if samples is None:
            raise UnsupportedError("SampleLosses cannot tell which samples a batch of this DataLoader contains.")
        losses = self._of_samples(run) if self._losses is None else self._losses(run.batch, run.outputs)
        if losses.shape != (len(samples),):
            raise ConfigurationError(
                f"SampleLosses needs losses of shape ({len(samples)},), one per sample (got {tuple(losses.shape)}). "
                + _FIX
            )
        self._waiting.append((samples, losses.detach()))

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        del run, values
        self._read()

    def on_epoch_end(self, run: Run) -> None:
        self._report(run)

    def on_fit_end(self, run: Run) -> None:
        if run.state.steps_in_epoch:  # otherwise on_epoch_end has reported
            self._report(run)

    def _of_samples(self, run: Run) -> Tensor:
        targets = targets_of(run.batch, getattr(run.args, "label_names", None))
        named = as_mapping(run.outputs)
        outputs = run.outputs if named is None else named.get("logits")
        if not isinstance(targets, Tensor) or not isinstance(outputs, Tensor):
            raise ConfigurationError(f"SampleLosses needs outputs and targets in one tensor each. {_FIX}")
        if run.is_shifted:  # a causal language model: each token predicts the next
            outputs, targets = outputs[:, :-1], targets[:, 1:]
        return mean_of_each(self._compare(outputs, targets), targets, self._ignored)

    def _read(self) -> None:
        for samples, losses in self._waiting:
            self._seen.update(zip(samples, losses.tolist(), strict=True))
        self._waiting = []

    def _report(self, run: Run) -> None:
        largest = self.top(self._top)
        rank = 0 if run.accelerator is None else run.accelerator.data_group.rank
        report = {"indices": [sample for sample, _ in largest], "losses": [round(loss, 6) for _, loss in largest]}
        if largest:
            run.record_event("top_losses", **report)
        if run.folder is not None and (run.accelerator is None or run.accelerator.reads_first):
            folder = run.folder / _FOLDER
            folder.mkdir(exist_ok=True)
            text = json.dumps({"step": run.state.step, **report}, default=str)
            replace_file(folder / f"process-{rank}.json", lambda path: path.write_text(text, encoding="utf-8"))


def top_losses(run_folder: str | Path, count: int = 20) -> list[tuple[Any, float]]:
    """Return the samples with the largest losses of a run, over all ranks, each with its loss.

    Example:
        >>> top_losses("runs/none")
        []
    """
    pairs = list[tuple[Any, float]]()
    for file in sorted((Path(run_folder).expanduser() / _FOLDER).glob("process-*.json")):
        report = json.loads(file.read_text("utf-8"))
        pairs += zip(report["indices"], report["losses"], strict=True)
    return _largest(count, pairs)


def _largest(count: int, pairs: Iterable[tuple[Any, float]]) -> list[tuple[Any, float]]:
    """Return the pairs with the largest losses, NaN first: it is neither larger nor smaller than a number."""
    return heapq.nlargest(count, pairs, key=lambda pair: (math.isnan(pair[1]), pair[1]))


def unreduced(loss_fn: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a loss function without reduction.

    Raises:
        ConfigurationError: If the function always reduces.

    Example:
        >>> unreduced(nn.MSELoss())(torch.tensor([1.0, 3.0]), torch.zeros(2))
        tensor([1., 9.])
    """
    if isinstance(loss_fn, nn.Module) and hasattr(loss_fn, "reduction"):
        single: Any = copy.copy(loss_fn)
        single.reduction = "none"
        return single
    if not isinstance(loss_fn, nn.Module) and "reduction" in inspect.signature(loss_fn).parameters:
        return functools.partial(loss_fn, reduction="none")
    raise ConfigurationError(f"SampleLosses needs a loss_fn with a `reduction` option. {_FIX}")


def _may_be_split(run: Run) -> bool:
    return getattr(run.args, "per_device_train_batch_size", None) == "auto"


def by_kind(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return unreduced losses: squared error for float targets, cross-entropy for classes."""
    outputs = outputs.float()
    if targets.is_floating_point():
        return (outputs.reshape(targets.shape) - targets).square()
    # The class dimension is last for texts, and second for images.
    if outputs.ndim > 2 and outputs.shape[:-1] == targets.shape:
        outputs = outputs.movedim(-1, 1)
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def mean_of_each(losses: Tensor, targets: Tensor, ignored: int = IGNORE_INDEX) -> Tensor:
    """Return the mean of each row of losses, over the targets that are not ignored."""
    if losses.ndim == 1:
        return losses
    rows = losses.reshape(len(losses), -1)
    if targets.is_floating_point() or losses.shape != targets.shape:
        return rows.mean(dim=1)
    counts = (targets != ignored).reshape(len(targets), -1).sum(dim=1)
    return rows.sum(dim=1) / counts.clamp(min=1)
