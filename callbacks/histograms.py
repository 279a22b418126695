"""This file is how gradients, weights and activations are spread, seen in some updates."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.callbacks.trackers import TrackerCallback
from trainer_lib.events import Callback, Run
from trainer_lib.events.gates import EveryAmount
from trainer_lib.foundation.batch_fields import as_mapping
from trainer_lib.foundation.errors import ConfigurationError, unknown
from trainer_lib.logging import get_logger
from trainer_lib.modules.names import canonical_name
from trainer_lib.modules.patterns import matching

_logger = get_logger(__name__)

_KINDS = ("gradients", "weights", "activations")
_AT_ONCE = 1 << 22  # numbers that are counted at once, so that little memory is needed


class Histograms(Callback):
    """Tells now and then how gradients, weights and activations are spread: into the history, and to TensorBoard.

    In the updates between it does nothing. Gradients are those before clipping, weights those before the update, and
    activations what each layer without further ones below it gave when it was first called for the update, in its first
    batch. All is counted on the device, and read with the next log, as "histograms" in the history: of each the lowest
    and the highest number, mean, deviation, how many are not finite, and how many lie in each of as many equal parts
    of that range. The main process does it; with shards it sees its own. Of a compiled model there are no activations.

    Args:
        every: How often, such as "500 steps".
        of: What to look at: some of "gradients", "weights" and "activations".
        only: Patterns of names of weights and layers (`fnmatch`), such as "encoder.*"; by default all. Each takes some
            300 letters of the history, so that of a large model one takes some.
        bins: The parts of a range.

    Example:
        >>> histograms = Histograms("1000 steps", of=["gradients"], only=["*.attention.*"])
    """

    def __init__(
        self, every: Any = "500 steps", of: Sequence[str] = _KINDS, only: str | Sequence[str] = "*", bins: int = 30
    ) -> None:
        self._every = EveryAmount(every, "Histograms(every)")
        if isinstance(of, str) or not of:
            raise ConfigurationError(f"Histograms(of={of!r}): give a list of some of {', '.join(_KINDS)}.")
        for kind in of:
            if kind not in _KINDS:
                raise ConfigurationError(unknown("kind of histogram", kind, _KINDS))
        if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"Histograms(bins={bins!r}): give a whole number from 1 on.")
        self._of, self._bins = set(of), bins
        self._patterns = (only,) if isinstance(only, str) else tuple(only)
        self._is_open = False
        self._hooks: list[Any] = []
        self._found: dict[str, dict[str, Tensor]] = {}  # of this update
        self._waiting: list[
            tuple[int, dict[str, dict[str, Tensor]]]
        ] = []  # by the update, not read from the device yet

    # -- along the run -------------------------------------------------------------------------------------------

    def on_fit_begin(self, run: Run) -> None:
        self._every.begin(run.state)
        self._is_open, self._waiting = False, []
        matching([*run.parameters, *_layers(run)], self._patterns, "Histograms(only)")  # or raise

    def on_load_end(self, run: Run, folder: Path) -> None:
        del folder
        self._every.begin(run.state)
        self._waiting = []  # if it went back, these updates are made again

    def on_step_begin(self, run: Run) -> None:
        self._is_open = self._every.opens_at_begin(run.state) and run.is_main_process
        if self._is_open:
            self._found = {kind: {} for kind in _KINDS if kind in self._of}
            if "activations" in self._of:
                layers = _layers(run).items()
                self._hooks = [
                    one.register_forward_hook(self._watch(name)) for name, one in layers if self._means(name)
                ]

    def on_micro_batch_end(self, run: Run) -> None:
        del run
        if self._hooks:
            self._detach()

    def on_backward_end(self, run: Run) -> None:
        if not self._is_open:
            return
        for name, parameter in run.parameters.items():
            if parameter.requires_grad and self._means(name):
                for kind, values in (("weights", parameter), ("gradients", parameter.grad)):
                    if kind in self._of:
                        self._add(kind, name, values)
        self._waiting.append((run.state.step + 1, self._found))
        if "activations" in self._of and not self._found["activations"]:
            _logger.warning_once(
                "Histograms saw no activations: of a compiled model hooks are not called, and a pattern of only=… may "
                "be one of weights."
            )
        self._is_open = False

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        del values
        self._tell(run)

    def on_fit_end(self, run: Run) -> None:
        self._detach()
        self._tell(run)

    # -- private -------------------------------------------------------------------------------------------------

    def _means(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._patterns)

    def _watch(self, name: str) -> Callable[[Any, Any, Any], None]:
        def watch(module: Any, inputs: Any, outputs: Any) -> None:
            del module, inputs
            if name not in self._found["activations"]:  # in a backward it may be computed a second time
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
            self._found[kind][name] = counted(values, self._bins)

    def _tell(self, run: Run) -> None:
        for step, found in self._waiting:
            # One transfer for all, instead of one for each.
            read = {kind: _read(of_kind) for kind, of_kind in found.items() if of_kind}
            if read:
                run.record_event("histograms", of_step=step, **read)
                _show(run, step, read)
        self._waiting = []


@torch.no_grad()
def counted(values: Tensor, bins: int) -> Tensor:
    """Return how numbers are spread, on their device: low, high, sum, sum of squares, finite ones, others, counts.

    Example:
        >>> counted(torch.tensor([-1.0, -1.0, 1.0, 1.0]), 2).tolist()
        [-1.0, 1.0, 0.0, 4.0, 4.0, 0.0, 2.0, 2.0]
    """
    device, wide = values.device, torch.float32 if values.device.type == "mps" else torch.float64
    parts = values.detach().reshape(-1).split(_AT_ONCE)
    low = torch.stack([part.where(_is_finite(part), torch.inf).min() for part in parts]).min().float()
    high = torch.stack([part.where(_is_finite(part), -torch.inf).max() for part in parts]).max().float()
    # Halves, whose difference is finite whatever they are.
    width = high / 2 - low / 2
    width = width.where(width > 0, 1.0)
    counts = torch.zeros(bins + 1, dtype=torch.int64, device=device)  # the last is of what is not finite
    one = torch.ones(1, dtype=torch.int64, device=device)
    sums = torch.zeros(2, dtype=wide, device=device)
    for part in parts:
        is_finite = _is_finite(part)
        finite = part.where(is_finite, 0.0).float()
        place = (finite / 2).sub_(low / 2).div_(width).mul_(bins).clamp_(0, bins - 1).where(is_finite, bins).long()
        counts.scatter_add_(0, place, one.expand_as(place))
        sums += torch.stack([finite.sum(dtype=wide), torch.linalg.vector_norm(finite, dtype=wide).square()])
    inside, outside = counts[:-1].to(wide), counts[-1:].to(wide)
    ends = torch.stack([low, high]).to(wide)
    return torch.cat([ends, sums, inside.sum().reshape(1), outside, inside])


def _is_finite(values: Tensor) -> Tensor:
    return values.abs() < torch.inf  # several times as fast as isfinite()


def _read(found: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Return what was counted as plain numbers, by name."""
    return {
        name: _plain(numbers) for name, numbers in zip(found, torch.stack(list(found.values())).tolist(), strict=True)
    }


def _plain(numbers: list[float]) -> dict[str, Any]:
    low, high, total, squares, finite, others, *counts = numbers
    told: dict[str, Any] = {"low": low, "high": high}
    if finite:
        mean = total / finite
        told |= {"mean": mean, "deviation": max(squares / finite - mean**2, 0.0) ** 0.5}
    return {**told, "not_finite": int(others), "counts": [int(count) for count in counts]}


def _show(run: Run, step: int, read: Mapping[str, Mapping[str, Any]]) -> None:
    """Give histograms to TensorBoard, which takes them counted."""
    for callback in getattr(run.trainer, "events", ()):
        for tracker in callback.trackers if isinstance(callback, TrackerCallback) else ():
            if tracker.name == "tensorboard":
                for kind, of_kind in read.items():
                    for name, told in of_kind.items():
                        if "mean" in told:
                            tracker.call(("tracker", "add_histogram_raw"), (), _raw(f"{kind}/{name}", told, step))


def _raw(tag: str, told: Mapping[str, Any], step: int) -> dict[str, Any]:
    low, high, counts = told["low"], told["high"], told["counts"]
    finite, width = sum(counts), (high - low or 1.0) / len(counts)
    return {
        "tag": tag,
        "min": low,
        "max": high,
        "num": finite,
        "sum": told["mean"] * finite,
        "sum_squares": (told["deviation"] ** 2 + told["mean"] ** 2) * finite,
        "bucket_limits": [low + width * (place + 1) for place in range(len(counts))],
        "bucket_counts": counts,
        "global_step": step,
    }


def _layers(run: Run) -> dict[str, nn.Module]:
    """Return the layers without further ones below them, by name; a model that is one, by its class."""
    return {
        canonical_name(".".join(part for part in (model, name) if part)) or type(layer).__name__: layer
        for model, module in run.modules.items()
        for name, layer in module.named_modules()
        if not any(True for _ in layer.children())
    }


def _first_tensor(outputs: Any) -> Tensor | None:
    named = as_mapping(outputs)
    several = list(named.values()) if named is not None else outputs
    several = several if isinstance(several, (tuple, list)) else [several]
    return next((one for one in several if isinstance(one, Tensor)), None)
