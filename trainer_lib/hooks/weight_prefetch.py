"""Fetches the weights of the next offloaded module in a thread, while the current one computes."""

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from trainer_lib.modules.device_placement import with_index

Weights = dict[str, Tensor]


class WeightPrefetcher:
    """Reads weights of modules by name, one module ahead.

    The order of modules is that of the pass before; the first pass reads each module when it runs. At most two modules
    are in memory: the one that runs, and the next.

    Args:
        device: The device on which the modules run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device: torch.device = with_index(device)  # the thread that fetches has another current device
        self._readers: dict[str, Callable[[], Weights]] = {}
        self._next: dict[str, str] = {}
        self._last: str | None = None
        self._fetched: tuple[str, Future[Weights]] | None = None

    def add(self, name: str, weights: Mapping[str, Tensor], tensors: list[str]) -> None:
        """Add a module.

        Args:
            name: The name of the module.
            weights: All weights, which are read when they are looked up.
            tensors: The names in `weights` of the module's own ones.
        """
        self._readers[name] = _Reader(weights, tensors, self.device)

    def take(self, name: str) -> Weights:
        """Return the weights of a module on the device, and begin to fetch those of the next one."""
        if self._last is not None:
            self._next[self._last] = name
        self._last = name
        fetched, self._fetched = self._fetched, None
        weights = fetched[1].result() if fetched is not None and fetched[0] == name else self._readers[name]()
        following = self._next.get(name)
        if following is not None and following != name:
            self._fetched = following, _pool().submit(self._readers[following])
        return weights

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_fetched": None}


class _Reader:
    def __init__(self, weights: Mapping[str, Tensor], names: list[str], device: torch.device) -> None:
        self._weights, self._names, self._device = weights, names, device

    def __call__(self) -> Weights:
        return {name: self._weights[name].to(self._device, non_blocking=True) for name in self._names}


_pools: dict[int, ThreadPoolExecutor] = {}
_lock = threading.Lock()


def _pool() -> ThreadPoolExecutor:
    """Return the reading thread of this process: a fork has none of the threads of its parent."""
    with _lock:
        if os.getpid() not in _pools:
            _pools.clear()
            _pools[os.getpid()] = ThreadPoolExecutor(1, thread_name_prefix="weight-prefetch")
        return _pools[os.getpid()]


os.register_at_fork(after_in_child=lambda: globals().__setitem__("_lock", threading.Lock()))
