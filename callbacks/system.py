"""CPU, memory and GPU use of the machine, in the log."""

import psutil
import torch

from trainer_lib.events import Callback, Run
from trainer_lib.foundation.device_types import load_of, memory_of
from trainer_lib.foundation.imports import is_pynvml_available


class SystemMonitor(Callback):
    """Adds the use of CPU, memory and device to each log, under names that begin with `system/`.

    The values are `cpu_percent` and `memory_percent` of the machine, `process_cpu_percent` and `process_memory_gb` of
    this process, `workers_memory_gb` of its data workers, and on a CUDA device `device_memory_gb`,
    `device_memory_reserved_gb` and `device_memory_peak_gb`; with the package pynvml also `device_percent`,
    `device_power_watts` and `device_temperature`. Percentages cover the time since the last log.

    Example:
        >>> values = {"loss": 1.0}
        >>> SystemMonitor().on_log(Run(), values)
        >>> values["system/process_memory_gb"] > 0
        True
    """

    order = -100  # before the callbacks that show the log

    def __init__(self) -> None:
        self._process: psutil.Process | None = None  # while a run trains, so that search() can copy the callback

    def on_fit_begin(self, run: Run) -> None:
        del run
        self._process = psutil.Process()  # may be a fork of the process that created this object
        psutil.cpu_percent()  # starts the measurement
        self._process.cpu_percent()

    def on_fit_end(self, run: Run) -> None:
        del run
        self._process = None

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        process = self._process or psutil.Process()
        metrics = {
            "cpu_percent": psutil.cpu_percent(),
            "memory_percent": psutil.virtual_memory().percent,
            "process_cpu_percent": process.cpu_percent(),
            "process_memory_gb": process.memory_info().rss / 1e9,
            **_workers(process),
        }
        device = None if run.accelerator is None else run.accelerator.device
        if device is not None:
            metrics |= _of_device(device)
        values.update({f"system/{name}": value for name, value in metrics.items()})


def _workers(process: psutil.Process) -> dict[str, float]:
    sizes = list[float]()
    for child in process.children(recursive=True):
        try:
            sizes.append(child.memory_info().rss / 1e9)
        except psutil.Error:  # the worker has just exited
            continue
    return {"workers_memory_gb": sum(sizes)} if sizes else {}


def _of_device(device: torch.device) -> dict[str, float]:
    memory = memory_of(device)
    names = {"allocated": "device_memory_gb", "reserved": "device_memory_reserved_gb", "peak": "device_memory_peak_gb"}
    metrics = {names[kind]: size / 1e9 for kind, size in memory.items()}
    if is_pynvml_available():
        metrics |= {f"device_{name}": value for name, value in load_of(device).items()}
    return metrics
