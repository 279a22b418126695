"""This file is how many operations training makes, and what share of a device's peak that is."""

from typing import Any

import torch

from trainer_lib.events import Callback, Run
from trainer_lib.foundation.batch_fields import as_mapping
from trainer_lib.foundation.errors import ConfigurationError

# Dense operations a second with 16 bits and with 32, as the makers give them; the first name that fits counts.
_PEAKS: dict[str, tuple[float, float]] = {
    "B200": (2250e12, 75e12),
    "H200": (989e12, 67e12),
    "H100 PCIe": (756e12, 51e12),
    "H100 NVL": (835e12, 60e12),
    "H100": (989e12, 67e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "L4": (121e12, 30.3e12),
    "A10": (125e12, 31.2e12),
    "V100": (125e12, 15.7e12),
    "T4": (65e12, 8.1e12),
}


class Flops(Callback):
    """Adds `teraflops_per_second` of each device to what is logged, and `mfu`, their share of what it can do.

    The operations of one batch, forward and backward, are counted as torch runs them (`FlopCounterMode`: matrix
    products, convolutions, attention), in the first batch of the run; from then on each sample counts as much as one of
    that batch did. For texts of very different lengths that is an estimate. Time is that of training, without
    evaluations and checkpoints. A model whose activations are computed twice (checkpointing) makes more operations, and
    these count.

    Args:
        peak: Operations a second that a device can do; by default known for some of them, for the precision of the run,
            without reduced precision for float32. Where it is not known there is no `mfu`.

    Attributes:
        per_sample: The operations of a sample; `None` before they are counted.

    Example:
        >>> flops = Flops(peak=312e12)
    """

    order = -100  # before those who show what is logged

    def __init__(self, peak: float | None = None) -> None:
        if peak is not None and (isinstance(peak, bool) or not isinstance(peak, (int, float)) or not peak > 0):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"Flops(peak={peak!r}): give operations a second, such as 312e12.")
        self.per_sample: float | None = None
        self._given = self.peak = peak
        self._counter: Any = None
        self._counted = 0.0
        self._last = (0, 0.0)  # the samples and the seconds at the last log
        self._has_logged = False

    def on_fit_begin(self, run: Run) -> None:
        self.per_sample = None
        self.peak = self._given or _known_peak(run)
        self._last, self._has_logged = (run.state.samples, run.state.seconds), False

    def on_micro_batch_begin(self, run: Run) -> None:
        del run
        if self.per_sample is None and self._counter is None:
            from torch.utils.flop_counter import FlopCounterMode

            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()

    def on_micro_batch_end(self, run: Run) -> None:
        if self._counter is not None:
            self._leave()
            self.per_sample = self._counted / _samples(run.batch)
            run.record_event("flops", per_sample=self.per_sample)

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        samples, seconds = run.state.samples, run.state.seconds
        passed = samples - self._last[0], seconds - self._last[1]
        # Counting takes time, so that the first log is not like the others.
        if self.per_sample is not None and self._has_logged and passed[1] > 0:
            devices = 1 if run.accelerator is None else run.accelerator.num_processes
            speed = self.per_sample * passed[0] / passed[1] / devices
            values["teraflops_per_second"] = speed / 1e12
            if self.peak is not None:
                values["mfu"] = speed / self.peak
        self._last, self._has_logged = (samples, seconds), True

    def on_fit_end(self, run: Run) -> None:
        del run
        if self._counter is not None:
            self._leave()

    def _leave(self) -> None:
        self._counter.__exit__(None, None, None)
        self._counted, self._counter = float(self._counter.get_total_flops()), None


def _known_peak(run: Run) -> float | None:
    if run.accelerator is None or run.accelerator.device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(run.accelerator.device)
    return peak_of(name, run.accelerator.mixed_precision)


def peak_of(name: str, precision: str) -> float | None:
    """Return what a device can do a second, by its name; `None` if that is not known.

    Example:
        >>> peak_of("NVIDIA A100-SXM4-80GB", "bf16")
        312000000000000.0
    """
    words = name.replace("-", " ").split()
    for known, (narrow, wide) in _PEAKS.items():
        if all(part in words for part in known.split()):
            return narrow if precision in ("bf16", "bf16-true", "fp16") else wide
    return None


def _samples(batch: Any) -> int:
    """Return the rows of a batch: those of its first tensor."""
    named = as_mapping(batch)
    values = list(named.values()) if named is not None else batch if isinstance(batch, (tuple, list)) else [batch]
    for value in values:
        if isinstance(value, torch.Tensor) and value.ndim:
            return len(value)
    return max(len(values), 1)
