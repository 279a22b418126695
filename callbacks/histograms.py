"""Histograms of gradients, weights and activations, at an interval."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainer_lib.callbacks.trackers import trackers_of
from trainer_lib.events import Callback, Run
from trainer_lib.events.trigger import callback_trigger
from trainer_lib.foundation.device_types import sum_dtype
from trainer_lib.foundation.errors import ConfigurationError, unknown
from trainer_lib.foundation.tensors.batch_fields import as_mapping
from trainer_lib.logging import get_logger
from trainer_lib.modules.weights.names import canonical_name
from trainer_lib.modules.weights.patterns import matching

_logger = get_logger(__name__)

_KINDS = ("gradients", "weights", "activations")
_AT_ONCE = 1 << 22  # elements per chunk, to bound memory


class Histograms(Callback):
    """Records histograms of gradients, weights and activations at an interval, in the history and in TensorBoard.

    Gradients are taken before clipping, weights before the update, and activations from the first call of each leaf
    module in the update's first batch. The histograms are computed on the device and read with the next log, as the
    "histograms" event: for each tensor the minimum, maximum, mean, standard deviation, number of NaN and Inf values,
    and the counts in equal bins. Rank 0 records them; of a sharded model it sees its own shards. Compiled models have
    no activations to record.

    Args:
        every: The interval, such as "500 steps".
        of: What to record: some of "gradients", "weights" and "activations".
        only: Patterns (`fnmatch`) of the names of weights and layers, such as "encoder.*"; by default all. Each tensor
            takes about 300 characters of the history, so select some in a large model.
        bins: The number of bins.

    Example:
        >>> histograms = Histograms("1000 steps", of=["gradients"], only=["*.attention.*"])
    """

    reads_outputs: ClassVar[bool] = False

    def __init__(
        self, every: Any = "500 steps", of: Sequence[str] = _KINDS, only: str | Sequence[str] = "*", bins: int = 30
    ) -> None:
        self._every = callback_trigger(every, "Histograms(every)")
        if isinstance(of, str) or not of:
            raise ConfigurationError(f"Histograms(of) must be a list of some of {', '.join(_KINDS)} (got {of!r}).")
        for kind in of:
            if kind not in _KINDS:
                raise ConfigurationError(unknown("kind of histogram", kind, _KINDS))
        if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"Histograms(bins) must be a whole number of at least 1 (got {bins!r}).")
        self._of, self._bins = set(of), bins
        self._patterns = (only,) if isinstance(only, str) else tuple(only)
        self._is_open = False
        self._hooks: list[Any] = []
        self._tensors: dict[str, dict[str, Tensor]] = {}  # of this update
        self._waiting: list[tuple[int, dict[str, dict[str, Tensor]]]] = []  # by step, not yet read from the device

    # -- events --------------------------------------------------------------------------------------------------

    def on_fit_begin(self, run: Run) -> None:
        self._every.begin(run.state)
        self._is_open, self._waiting = False, []
        matching(
            [*run.parameters, *_layers(run)], self._patterns, "Histograms(only)"
        )  # raises if a pattern matches nothing

    def on_load_end(self, run: Run, folder: Path) -> None:
        del folder
        self._every.begin(run.state)
        self._waiting = []  # after a rewind these updates run again

    def on_step_begin(self, run: Run) -> None:
        self._detach()  # of an update whose batches were all skipped
        self._is_open = self._every.is_due_next(run.state) and run.is_main_process
        if self._is_open:
            self._tensors = {kind: {} for kind in _KINDS if kind in self._of}
            if "activations" in self._of:
                layers = _layers(run).items()
                self._hooks = [
                    layer.register_forward_hook(self._watch(name)) for name, layer in layers if self._is_selected(name)
                ]

    def on_micro_batch_end(self, run: Run) -> None:
        del run
        if self._hooks:
            self._detach()

    def on_backward_end(self, run: Run) -> None:
        if not self._is_open:
            return
        for name, parameter in run.parameters.items():
            if parameter.requires_grad and self._is_selected(name):
                for kind, values in (("weights", parameter), ("gradients", parameter.grad)):
                    if kind in self._of:
                        self._add(kind, name, values)
        self._waiting.append((run.state.step + 1, self._tensors))
        if "activations" in self._of and not self._tensors["activations"]:
            _logger.warning_once(
                "Histograms recorded no activations: compiled models do not call hooks, or the patterns of only=… "
                "match "
                "weights only."
            )
        self._is_open = False

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        del values
        self._record(run)

    def on_fit_end(self, run: Run) -> None:
        self._detach()
        self._record(run)

    # -- private -------------------------------------------------------------------------------------------------

    def _is_selected(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._patterns)

    def _watch(self, name: str) -> Callable[[Any, Any, Any], None]:
        def watch(module: Any, inputs: Any, outputs: Any) -> None:
            del module, inputs
            if name not in self._tensors["activations"]:  # activation checkpointing calls it again in the backward
                self._add("activations", name, _first_tensor(outputs))

        return watch

    def _detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _add(self, kind: str, name: str, values: Any) -> None:
        if values is None:
            return
        values = getattr(values, "_local_tensor", values)
        if values.is_sparse:
            values = values.coalesce().values()
        if values.numel() and values.is_floating_point():
            self._tensors[kind][name] = counted(values, self._bins)

    def _record(self, run: Run) -> None:
        for step, tensors in self._waiting:
            # One transfer for all tensors.
            read = {kind: _read(of_kind) for kind, of_kind in tensors.items() if of_kind}
            if read:
                run.record_event("histograms", of_step=step, **read)
                _show(run, step, read)
        self._waiting = []


@torch.no_grad()
def counted(values: Tensor, bins: int) -> Tensor:
    """Return a histogram as one tensor: min, max, sum, sum of squares, finite count, nonfinite count, bin counts.

    Example:
        >>> counted(torch.tensor([-1.0, -1.0, 1.0, 1.0]), 2).tolist()
        [-1.0, 1.0, 0.0, 4.0, 4.0, 0.0, 2.0, 2.0]
    """
    device, wide = values.device, sum_dtype(values.device)
    parts = values.detach().reshape(-1).split(_AT_ONCE)
    low = torch.stack([part.where(_is_finite(part), torch.inf).min() for part in parts]).min().float()
    high = torch.stack([part.where(_is_finite(part), -torch.inf).max() for part in parts]).max().float()
    # Halved, so that the difference cannot overflow.
    width = high / 2 - low / 2
    width = width.where(width > 0, 1.0)
    counts = torch.zeros(bins + 1, dtype=torch.int64, device=device)  # the last bin counts NaN and Inf
    one = torch.ones(1, dtype=torch.int64, device=device)
    sums = torch.zeros(2, dtype=wide, device=device)
    for part in parts:
        is_finite = _is_finite(part)
        finite = part.where(is_finite, 0.0).float()
        bin_index = (finite / 2).sub_(low / 2).div_(width).mul_(bins).clamp_(0, bins - 1).where(is_finite, bins).long()
        counts.scatter_add_(0, bin_index, one.expand_as(bin_index))
        sums += torch.stack([finite.sum(dtype=wide), torch.linalg.vector_norm(finite, dtype=wide).square()])
    inside, outside = counts[:-1].to(wide), counts[-1:].to(wide)
    ends = torch.stack([low, high]).to(wide)
    return torch.cat([ends, sums, inside.sum().reshape(1), outside, inside])


def _is_finite(values: Tensor) -> Tensor:
    return values.abs() < torch.inf  # several times as fast as isfinite()


def _read(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Return histograms as plain numbers, by name."""
    return {
        name: _plain(numbers)
        for name, numbers in zip(tensors, torch.stack(list(tensors.values())).tolist(), strict=True)
    }


def _plain(numbers: list[float]) -> dict[str, Any]:
    low, high, total, squares, finite, nonfinite, *counts = numbers
    summary: dict[str, Any] = {"low": low, "high": high}
    if finite:
        mean = total / finite
        summary |= {"mean": mean, "deviation": max(squares / finite - mean**2, 0.0) ** 0.5}
    return {**summary, "not_finite": int(nonfinite), "counts": [int(count) for count in counts]}


def _show(run: Run, step: int, read: Mapping[str, Mapping[str, Any]]) -> None:
    """Send histograms to TensorBoard."""
    for tracker in trackers_of(run):
        if tracker.name == "tensorboard":
            for kind, of_kind in read.items():
                for name, summary in of_kind.items():
                    if "mean" in summary:
                        tracker.call(("tracker", "add_histogram_raw"), (), _raw(f"{kind}/{name}", summary, step))


def _raw(tag: str, summary: Mapping[str, Any], step: int) -> dict[str, Any]:
    low, high, counts = summary["low"], summary["high"], summary["counts"]
    finite, width = sum(counts), (high - low or 1.0) / len(counts)
    return {
        "tag": tag,
        "min": low,
        "max": high,
        "num": finite,
        "sum": summary["mean"] * finite,
        "sum_squares": (summary["deviation"] ** 2 + summary["mean"] ** 2) * finite,
        "bucket_limits": [low + width * (index + 1) for index in range(len(counts))],
        "bucket_counts": counts,
        "global_step": step,
    }


def _layers(run: Run) -> dict[str, nn.Module]:
    """Return the leaf modules by name; a model that is a leaf itself by its class."""
    return {
        canonical_name(".".join(part for part in (model, name) if part)) or type(layer).__name__: layer
        for model, module in run.modules.items()
        for name, layer in module.named_modules()
        if not any(True for _ in layer.children())
    }


def _first_tensor(outputs: Any) -> Tensor | None:
    named = as_mapping(outputs)
    values = list(named.values()) if named is not None else outputs
    values = values if isinstance(values, (tuple, list)) else [values]
    return next((value for value in values if isinstance(value, Tensor)), None)
