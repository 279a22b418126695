"""This file is averages of weights along a run: kept beside the model, and put in its place where it is used."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from trainer_lib.events import Modifier, Run
from trainer_lib.events.gates import EveryAmount, Gate
from trainer_lib.foundation.errors import ConfigurationError, StateError

_NARROW = (torch.float16, torch.bfloat16)


class WeightAverage(Modifier):
    """Keeps an average of the weights, which evaluations, predictions and `save_model` use.

    Training goes on with the weights themselves, and those are what a checkpoint has, with the average beside them.
    When a run has come to its end the model has the average for good. Each process averages what it holds: a copy, or
    its shards.

    Args:
        every: When to average.
        buffers: Whether to average buffers (running statistics) too; else the model's are used as they are.
    """

    exclusive_group: ClassVar[str | None] = "average the weights"

    def __init__(self, every: Gate, buffers: bool = False) -> None:
        self._every, self._has_buffers = every, buffers
        self.updates = 0
        self._names: list[str] = []
        self._weights: list[Any] = []
        self._averages: list[Any] = []
        self._loaded: Mapping[str, Any] | None = None
        self._is_in_use = self._has_stepped = self._has_moved = False

    def mix(self, averages: list[Any], weights: list[Any]) -> None:
        """Take weights into the averages, in place."""
        raise NotImplementedError

    def may_use(self, run: Run) -> bool:
        """Whether evaluations while training use the average already."""
        del run
        return True

    def is_due(self, run: Run) -> bool:
        """Whether to average at the end of this step; asked once a step."""
        return self._every.opens_at_end(run.state)

    # -- along the run -------------------------------------------------------------------------------------------

    def on_fit_begin(self, run: Run) -> None:
        there = {**_trained(run), **(_buffers(run) if self._has_buffers else {})}
        # The parameters themselves: FSDP2 replaces the local tensors inside them at the first forward.
        self._names, self._weights = list(there), list(there.values())
        values = [one.detach() for one in self._weights]
        # In 16 bits an average would stand still: what it moves by is lost in rounding.
        self._averages = [one.float() if one.dtype in _NARROW else one.clone() for one in values]
        self.updates = 0
        self._has_stepped = self._has_moved = False
        self._every.begin(run.state)
        if self._loaded is not None:
            self.load_state_dict(self._loaded)
            self._loaded = None

    def on_load_end(self, run: Run, folder: Path) -> None:
        del folder
        self._every.begin(run.state)

    def on_optimizer_step_end(self, run: Run) -> None:
        del run
        self._has_stepped = True

    def on_step_skipped(self, run: Run) -> None:
        del run
        self._has_stepped = False  # fp16: the optimizer's step was one in name only

    def on_step_end(self, run: Run) -> None:
        self._has_moved |= self._has_stepped
        self._has_stepped = False
        if self.is_due(run) and self._has_moved:
            self.average()
            self._has_moved = False

    on_epoch_end = on_step_end  # for a pass whose length nobody knew

    @torch.no_grad()
    def average(self) -> None:
        """Take the weights of now into the average."""
        averages = [_local(one) for one in self._averages]
        weights = [_local(one).to(mine.dtype) for one, mine in zip(self._weights, averages, strict=True)]
        self.mix(averages, weights)
        self.updates += 1

    @contextmanager
    def eval_weights(self, run: Run) -> Generator[None]:
        if self._is_in_use or not self.updates or not self.may_use(run):
            yield
            return
        kept = [weight.detach().clone() for weight in self._weights]
        self._put(self._averages)
        self._is_in_use = True
        try:
            yield
        finally:
            self._is_in_use = False
            self._put(kept)

    def on_fit_end(self, run: Run) -> None:
        if run.state.has_ended and self.updates:
            self._put(self._averages)
        self._names, self._weights, self._averages = [], [], []

    @torch.no_grad()
    def _put(self, values: list[Any]) -> None:
        for weight, value in zip(self._weights, values, strict=True):
            _local(weight).copy_(_local(value))

    # -- what survives a restart ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        # Whole, so that it can be read in shards of other sizes.
        whole = {name: _whole(one) for name, one in zip(self._names, self._averages, strict=True)}
        return {"updates": self.updates, "averages": whole}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not self._names:  # not before the model is there
            self._loaded = state
            return
        self.updates = state["updates"]
        there: Mapping[str, Tensor] = state["averages"]
        if there.keys() != set(self._names):
            odd = sorted(there.keys() ^ set(self._names))
            raise StateError(
                f"The average of {len(there)} tensors in the checkpoint does not fit the {len(self._names)} that this "
                f"run averages: {', '.join(odd[:5])}."
            )
        for average, name in zip(self._averages, self._names, strict=True):
            _fill(average, there[name])


def _trained(run: Run) -> dict[str, Any]:
    """Return what the optimizers have, tied weights once."""
    trained = {id(p) for one in run.optimizers.values() for group in one.param_groups for p in group["params"]}
    found: dict[int, tuple[str, Any]] = {}
    for name, parameter in run.parameters.items():
        if id(parameter) in trained:
            found.setdefault(id(parameter), (name, parameter))
    return dict(found.values())


def _buffers(run: Run) -> dict[str, Any]:
    return {
        f"buffer {model}.{name}": buffer
        for model, module in run.modules.items()
        for name, buffer in module.named_buffers()
        if buffer.is_floating_point()
    }


def _local(tensor: Any) -> Tensor:
    """Return what of a tensor is on this process."""
    return getattr(tensor, "_local_tensor", tensor)


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "_local_tensor") else tensor


def _fill(target: Any, value: Tensor) -> None:
    if hasattr(target, "_local_tensor"):
        from torch.distributed.tensor import distribute_tensor

        there = value.to(_local(target).device)
        value = _local(distribute_tensor(there, target.device_mesh, target.placements, src_data_rank=None))
    _local(target).copy_(value)


def interval(amount: Any, told_as: str, kind: type[Gate] = EveryAmount) -> Gate:
    """Return the gate of an amount that all processes count alike.

    Raises:
        ConfigurationError: If it is one of time.
    """
    gate = kind(amount, told_as)
    if gate.is_timed:
        raise ConfigurationError(
            f"{told_as}: {amount!r} goes by a clock, and those of the processes differ. Give steps, epochs or samples."
        )
    return gate
