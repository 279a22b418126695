"""FLOP counting: teraflops per second and model FLOPs utilization (MFU)."""

from typing import Any, ClassVar

import torch

from trainer_lib.events import Callback, Run
from trainer_lib.foundation.device_types import device_name
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.tensors.batch_fields import as_mapping

# Dense FLOP/s in 16 and 32 bits, from the vendors' data sheets; the first matching name counts.
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
    """Adds `teraflops_per_second` per device and `mfu`, its share of the device's peak, to the log.

    It counts the operations of the run's first batch, forward and backward, as torch executes them (`FlopCounterMode`:
    matrix products, convolutions, attention), and takes every later sample to cost as much. For texts of very different
    lengths this is an estimate. Only training time counts, without evaluations and checkpoints. Recomputed activations
    (activation checkpointing) count as operations.

    Args:
        peak: The device's peak in FLOP/s; by default looked up by the device's name and the run's precision (float32
            without reduced precision). If the device is unknown, `mfu` is not logged.

    Attributes:
        per_sample: The operations per sample; `None` until they are counted.

    Example:
        >>> flops = Flops(peak=312e12)
    """

    order = -100  # before the callbacks that show the log
    reads_outputs: ClassVar[bool] = False

    def __init__(self, peak: float | None = None) -> None:
        if peak is not None and (isinstance(peak, bool) or not isinstance(peak, (int, float)) or not peak > 0):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"Flops(peak) must be a number of FLOP/s above 0, such as 312e12 (got {peak!r}).")
        self.per_sample: float | None = None
        self._peak_option = self.peak = peak
        self._counter: Any = None
        self._counted = 0.0
        self._last = (0, 0.0)  # the samples and the seconds at the last log
        self._has_logged = False

    def on_fit_begin(self, run: Run) -> None:
        self.per_sample = None
        self.peak = self._peak_option or _known_peak(run)
        self._last, self._has_logged = (run.state.samples, run.state.seconds), False

    def on_micro_batch_begin(self, run: Run) -> None:
        del run
        if self.per_sample is None and self._counter is None:
            from torch.utils.flop_counter import FlopCounterMode

            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()

    def on_micro_batch_end(self, run: Run) -> None:
        if self._counter is not None:
            self._stop_counting()
            self.per_sample = self._counted / _samples(run.batch)
            run.record_event("flops", per_sample=self.per_sample)

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        samples, seconds = run.state.samples, run.state.seconds
        new_samples, elapsed = samples - self._last[0], seconds - self._last[1]
        # The first log is skipped: counting slows its updates down.
        if self.per_sample is not None and self._has_logged and elapsed > 0:
            devices = 1 if run.accelerator is None else run.accelerator.num_processes
            speed = self.per_sample * new_samples / elapsed / devices
            values["teraflops_per_second"] = speed / 1e12
            if self.peak is not None:
                values["mfu"] = speed / self.peak
        self._last, self._has_logged = (samples, seconds), True

    def on_fit_end(self, run: Run) -> None:
        del run
        if self._counter is not None:
            self._stop_counting()

    def _stop_counting(self) -> None:
        self._counter.__exit__(None, None, None)
        self._counted, self._counter = float(self._counter.get_total_flops()), None


def _known_peak(run: Run) -> float | None:
    if run.accelerator is None:
        return None
    return peak_of(device_name(run.accelerator.device), run.accelerator.mixed_precision)


def peak_of(name: str, precision: str) -> float | None:
    """Return a device's peak in FLOP/s by its name; `None` if the device is unknown.

    Example:
        >>> peak_of("NVIDIA A100-SXM4-80GB", "bf16")
        312000000000000.0
    """
    words = name.replace("-", " ").split()
    for device, (narrow, wide) in _PEAKS.items():
        if all(part in words for part in device.split()):
            return narrow if precision in ("bf16", "bf16-true", "fp16") else wide
    return None


def _samples(batch: Any) -> int:
    """Return the number of rows in a batch: the length of its first tensor."""
    named = as_mapping(batch)
    values = list(named.values()) if named is not None else batch if isinstance(batch, (tuple, list)) else [batch]
    for value in values:
        if isinstance(value, torch.Tensor) and value.ndim:
            return len(value)
    return max(len(values), 1)
