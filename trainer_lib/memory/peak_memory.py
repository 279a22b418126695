"""`PeakMemory`: measure the peak memory of a block of code."""

from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch

from trainer_lib.foundation.byte_sizes import convert_bytes
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.state.partial_state import PartialState


@frozen_dataclass
class MemoryUse:
    """The peak memory of a block, in bytes.

    Attributes:
        host: The resident memory of the process.
        host_growth: Its growth since the start of the block.
        device: The memory of tensors on the device; 0 without a device.
        device_growth: Its growth since the start of the block.
    """

    host: int
    host_growth: int
    device: int
    device_growth: int

    def __str__(self) -> str:
        """Return the numbers in readable units."""
        host = f"host {convert_bytes(self.host)} (+{convert_bytes(self.host_growth)})"
        device = f", device {convert_bytes(self.device)} (+{convert_bytes(self.device_growth)})"
        return host + (device if self.device else "")


class PeakMemory:
    """Measure the peak memory of a block with the counters of system and device, without sampling.

    Blocks may be nested. The host's counter covers the whole process. Outside of Linux it cannot be reset at the start;
    a peak below an earlier one is then missed, and you get the memory at the end of the block. Freed memory that the
    allocator has kept and uses again is resident all the time: it is not growth.

    Example:
        >>> with PeakMemory() as peak:
        ...     _ = torch.ones(25_000_000).sum()
        >>> peak.use.host > 100_000_000
        True
    """

    _running: "list[PeakMemory]" = []  # noqa: RUF012  # all blocks of the process, whose counters are one

    def __init__(self) -> None:
        self._before = _Counters(0, 0)
        self._peak = _Counters(0, 0)
        self._had_peak = 0

    def __enter__(self) -> "PeakMemory":
        """Start measuring."""
        for outer in self._running:
            outer._look()
        self._before = self._peak = _Counters(_host_now(), _device("memory_allocated"))
        self._had_peak = 0 if _reset_host_peak() else _host_peak()
        _device("reset_peak_memory_stats")
        self._running.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop measuring."""
        self._look()
        self._running.remove(self)

    @property
    def use(self) -> MemoryUse:
        """The peak of this process: up to now, or of the whole block after its end."""
        if self in self._running:
            self._look()
        return MemoryUse(
            host=self._peak.host,
            host_growth=self._peak.host - self._before.host,
            device=self._peak.device,
            device_growth=self._peak.device - self._before.device,
        )

    def over_processes(self) -> MemoryUse:
        """Return the largest numbers over all ranks. All ranks call it."""
        state = PartialState()
        mine = torch.tensor(astuple(self.use), device=state.device)
        return MemoryUse(*map(int, state.group.all_reduce(mine, "max").tolist()))

    def _look(self) -> None:
        peak = _host_peak()
        host = max(self._peak.host, _host_now(), peak if peak > self._had_peak else 0)
        self._peak = _Counters(host, max(self._peak.device, _device("max_memory_allocated")))


@frozen_dataclass
class _Counters:
    host: int
    device: int


def _host_now() -> int:
    import psutil

    return psutil.Process().memory_info().rss


def _host_peak() -> int:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def _reset_host_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _device(question: str) -> int:
    # An unused device holds nothing, and a query would initialize it.
    if not torch.accelerator.is_available() or not torch.accelerator.memory_stats():
        return 0
    return getattr(torch.accelerator, question)() or 0
