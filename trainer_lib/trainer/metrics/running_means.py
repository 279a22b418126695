"""Weighted means of logged values, over micro-batches, steps and ranks, until the next log."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trainer_lib.foundation.device_types import sum_dtype
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.trainer.data.batch_rows import count_rows

if TYPE_CHECKING:
    from trainer_lib.process_group import ProcessGroup


Weight = float | Tensor

_OTHERS = (
    " Images, tables and texts go to a tracker by its name, in a callback: "
    'run.accelerator.get_tracker("wandb").log_images(…).'
)


class RunningMeans:
    """Weighted means by name. Nothing is read from an accelerator before `collect`.

    Args:
        group: The ranks whose values are reduced.
        device: The device of this rank, which decides the type of the sums.

    Example:
        >>> from trainer_lib.process_group import LoneProcess
        >>> means = RunningMeans(LoneProcess(), torch.device("cpu"))
        >>> means.add("accuracy", 0.5, weight=3)
        >>> means.add("accuracy", torch.tensor(1.0))
        >>> means.collect()
        {'accuracy': 0.625}
    """

    def __init__(self, group: "ProcessGroup", device: torch.device) -> None:
        self._group = group
        self._dtype = sum_dtype(device)
        self._sums: dict[str, float | Tensor] = {}
        self._weights: dict[str, Weight] = {}
        self._batch: Any = None  # the batch of an evaluation whose values are collected apart
        self.weightless: set[str] = set()  # the names of weight 0 at the last `collect`
        self.items = 0.0  # the items of the loss at the last sum over ranks
        self.finishes: dict[str, Callable[[float], float]] = {}  # what `collect` applies to a mean, such as its root

    def add(self, name: str, value: float | Tensor, weight: Weight | None = None) -> None:
        """Add a value, which counts `weight` times: by default once, or in an evaluation once for each row.

        Raises:
            ConfigurationError: If it is not one number.
        """
        if weight is None:
            weight = 1.0 if self._batch is None else count_rows(self._batch) or 1.0
        if not isinstance(name, str) or not isinstance(weight, (int, float, Tensor)):  # pyright: ignore[reportUnnecessaryIsInstance]
            from trainer_lib.trainer.checks.foreign_calls import FORMS

            hint = f" {FORMS['log']}" if isinstance(name, dict) else ""
            raise ConfigurationError(
                f"log(name, value, weight) takes a text and numbers, got {name!r} and {weight!r}.{hint}"
            )
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ConfigurationError(
                    f"log({name!r}, …) takes one number, got a tensor of {tuple(value.shape)}.{_OTHERS}"
                )
            value = value.detach().reshape(())
        elif isinstance(value, np.number):  # float32 is no Python float
            value = value.item()
        elif not isinstance(value, (int, float)):
            raise ConfigurationError(
                f"log({name!r}, …) takes a number or a tensor of one, got {shown(value)}.{_OTHERS}"
            )
        if isinstance(weight, Tensor) and not weight.is_cpu:  # without waiting for it
            self.add_sum(name, torch.where(weight == 0, 0.0, value * weight), weight)
        elif weight:  # a mean of nothing is NaN
            self.add_sum(name, value * weight, weight)

    def add_all(self, values: Mapping[str, float | Tensor] | None, weight: Weight) -> None:
        """Add the `logs` of a `LossResult`."""
        for name, value in (values or {}).items():
            self.add(name, value, weight)

    def add_sum(self, name: str, total: float | Tensor, weight: Weight) -> None:
        """Add a sum over `weight` items, detached."""
        if isinstance(total, Tensor) and total.is_cpu:  # there is nothing to wait for, and numbers are added faster
            total = total.item()
        so_far = self._sums.get(name, 0.0)
        if isinstance(total, Tensor) and not isinstance(so_far, Tensor):
            so_far = torch.full((), so_far, dtype=self._dtype, device=total.device)  # a split model's may be another
        self._sums[name] = so_far + total  # not in place: a mark may have the sum so far
        self._weights[name] = self._weights.get(name, 0.0) + weight

    def clear(self) -> None:
        """Forget what was added."""
        self._sums, self._weights = {}, {}

    def mark(self) -> tuple[dict[str, float | Tensor], dict[str, Weight]]:
        """Return what `go_back` can go back to."""
        return dict(self._sums), dict(self._weights)

    def go_back(self, mark: tuple[dict[str, float | Tensor], dict[str, Weight]]) -> None:
        """Forget what was added since a mark was made."""
        self._sums, self._weights = mark

    @contextmanager
    def apart(self, batch: Any) -> Generator[dict[str, tuple[float | Tensor, Weight]]]:
        """Collect apart what an evaluation adds for a batch: sums and weights by name, after the outermost block."""
        added: dict[str, tuple[float | Tensor, Weight]] = {}
        if self._batch is not None:
            yield added
            return
        mark = self.mark()
        self.clear()
        self._batch = batch
        try:
            yield added
            added |= {name: (total, self._weights[name]) for name, total in self._sums.items()}
        finally:
            self._batch = None
            self.go_back(mark)

    def collect(self) -> dict[str, float]:
        """Return the means over all ranks, and clear them. All ranks have to call it."""
        sums = self.state_dict()
        self.clear()
        self.weightless = {name for name, (_, weight) in sums.items() if not weight}
        means = {name: total / weight for name, (total, weight) in sums.items() if weight}
        return means | {name: finish(means[name]) for name, finish in self.finishes.items() if name in means}

    def state_dict(self) -> dict[str, list[float]]:
        """Return the sums and weights over all processes. All of them have to ask."""
        here = {name: (float(total), float(self._weights[name])) for name, total in self._sums.items()}
        sums: dict[str, list[float]] = {}
        for there in self._group.all_gather_objects(here):
            for name, (total, weight) in there.items():
                so_far = sums.setdefault(name, [0.0, 0.0])
                so_far[0] += total
                so_far[1] += weight
        self.items: float = sums["loss"][1] if "loss" in sums else 0.0
        return sums

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restore what `state_dict` returned; rank 0 keeps it for all."""
        self.clear()
        if self._group.rank == 0:
            for name, (total, weight) in state.items():
                self.add_sum(name, total, weight)
