"""Averages of the weights, kept next to the model and used for evaluation and saving."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from trainer_lib.events import Modifier, Run
from trainer_lib.events.trigger import Trigger
from trainer_lib.foundation.errors import StateError, UnsupportedError
from trainer_lib.foundation.tensors.local_shards import local_shard, with_part
from trainer_lib.modules.weights.tensor_slots import buffer_slots
from trainer_lib.process_group import LoneProcess
from trainer_lib.strategies import Strategy
from trainer_lib.strategies.single_device import SingleDevice

_NARROW = (torch.float16, torch.bfloat16)


class WeightAverage(Modifier):
    """Keeps an average of the weights, which evaluations, predictions and `save_model` use.

    Training continues with the original weights. A checkpoint contains both. At the end of the run the model holds the
    average. Each rank averages its copy of the weights, or its shards.

    Args:
        every: When to average.
        buffers: Whether to average buffers (running statistics) too; otherwise the model's own are used.
    """

    changes_weights: ClassVar[bool] = False
    exclusive_group: ClassVar[str | None] = "average the weights"

    def __init__(self, every: Trigger, buffers: bool = False) -> None:
        self._every, self._has_buffers = every, buffers
        self.updates = 0
        self._names: list[str] = []
        self._all_names: set[str] = set()  # and those of other parts of the model
        self._strategy: Strategy = SingleDevice(LoneProcess(), torch.device("cpu"))  # until a fit begins
        self._weights: list[Any] = []
        self._averages: list[Any] = []
        self._places: list[tuple[dict[str, Any], str]] = []  # of the buffers, which are the last of the weights
        self._loaded: Mapping[str, Any] | None = None
        self._is_in_use = self._has_stepped = self._has_moved = False

    def mix(self, averages: list[Any], weights: list[Any]) -> None:
        """Update the averages with the weights, in place."""
        raise NotImplementedError

    def may_use(self, run: Run) -> bool:
        """Whether evaluations during training use the average."""
        del run
        return True

    def is_due(self, run: Run) -> bool:
        """Whether to average at the end of this step; called once per step."""
        return self._every.is_due(run.state)

    # -- events --------------------------------------------------------------------------------------------------

    def on_fit_begin(self, run: Run) -> None:
        trained = _trained(run)
        if run.trained_parameters and not trained:
            raise UnsupportedError(
                f"{type(self).__name__} averages weights of the model, and the optimizers train none of them: the ZeRO "
                "stages 1 to 3 of DeepSpeed train shards of their own. Leave it out, or shard with FSDP (fsdp=True)."
            )
        places = _buffers(run) if self._has_buffers else {}
        tensors = {**trained, **{name: slots[last] for name, (slots, last) in places.items()}}
        # The parameters themselves: FSDP2 replaces the local tensors inside them at the first forward.
        if run.accelerator is not None:
            self._strategy = run.accelerator.strategy
        self._names, self._weights = [self._strategy.whole_name(name) for name in tensors], list(tensors.values())
        self._all_names = self._strategy.names_of_all_parts(self._names)
        self._averages, self._places = [_copied(weight) for weight in self._weights], list(places.values())
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
        self._has_stepped = False  # fp16: the optimizer skipped its step

    def on_step_end(self, run: Run) -> None:
        self._has_moved |= self._has_stepped
        self._has_stepped = False
        if self.is_due(run) and self._has_moved:
            self.average()
            self._has_moved = False

    on_epoch_end = on_step_end  # for an epoch of unknown length

    @torch.no_grad()
    def average(self) -> None:
        """Update the average with the current weights."""
        self._find_buffers()
        averages = [local_shard(average) for average in self._averages]
        weights = [local_shard(weight).to(avg.dtype) for weight, avg in zip(self._weights, averages, strict=True)]
        self.mix(averages, weights)
        self.updates += 1

    @contextmanager
    def eval_weights(self, run: Run) -> Generator[None]:
        if self._is_in_use or not self.updates or not self.may_use(run):
            yield
            return
        self._find_buffers()
        kept = [weight.detach().clone() for weight in self._weights]
        self._copy_to_weights(self._averages)
        self._is_in_use = True
        try:
            yield
        finally:
            self._is_in_use = False
            self._copy_to_weights(kept)

    def on_fit_end(self, run: Run) -> None:
        if run.state.has_ended and self.updates:
            self._find_buffers()
            self._copy_to_weights(self._averages)
        self._names, self._weights, self._averages, self._places = [], [], [], []

    def _find_buffers(self) -> None:
        """Look up the buffers, which a forward may replace. The average of one with another shape begins there."""
        for at, (slots, last) in enumerate(self._places, len(self._weights) - len(self._places)):
            buffer = slots[last]
            if buffer is None:
                continue
            self._weights[at] = buffer
            if self._averages[at].shape != buffer.shape:
                self._averages[at] = _copied(buffer)

    @torch.no_grad()
    def _copy_to_weights(self, values: list[Any]) -> None:
        for weight, value in zip(self._weights, values, strict=True):
            local_shard(weight).copy_(local_shard(value))

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        # Whole tensors, so that another world size can load them.
        whole = {name: _whole(average) for name, average in zip(self._names, self._averages, strict=True)}
        averages = self._strategy.with_other_parts(whole)
        return {"updates": self.updates, "averages": averages, "has_moved": self._has_moved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not self._names:  # the model is not prepared yet
            self._loaded = state
            return
        self.updates: int = state["updates"]
        self._has_moved: bool = state.get("has_moved", False)
        saved: Mapping[str, Tensor] = state["averages"]
        if saved.keys() != self._all_names:
            mismatched = sorted(saved.keys() ^ self._all_names)
            raise StateError(
                f"The checkpoint holds averages of {len(saved)} tensors, and this run averages {len(self._all_names)}. "
                f"In only one of the two: {', '.join(mismatched[:5])}."
            )
        first_buffer = len(self._weights) - len(self._places)
        for at, (average, name) in enumerate(zip(self._averages, self._names, strict=True)):
            if at >= first_buffer and average.shape != saved[name].shape:  # it has changed its shape since
                self._averages[at] = saved[name].to(average.device)
            else:
                _fill(average, saved[name])


def _trained(run: Run) -> dict[str, Any]:
    """Return the optimizers' parameters by name, tied weights once."""
    trained = {id(parameter) for parameter in run.trained_parameters}
    named: dict[int, tuple[str, Any]] = {}
    for name, parameter in run.parameters.items():
        if id(parameter) in trained:
            named.setdefault(id(parameter), (name, parameter))
    return dict(named.values())


def _buffers(run: Run) -> dict[str, tuple[dict[str, Any], str]]:
    """Return where each buffer of real numbers is kept."""
    return {
        f"buffer {model}.{name}": (buffer_slots(module.get_submodule(name.rpartition(".")[0])), name.rpartition(".")[2])
        for model, module in run.modules.items()
        for name, buffer in module.named_buffers()
        if buffer.is_floating_point()
    }


def _copied(weight: Any) -> Any:
    value = local_shard(weight).detach()
    # A 16-bit average would not move: its small changes are lost in rounding.
    return with_part(weight, value.float() if value.dtype in _NARROW else value.clone())


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "_local_tensor") else tensor


def _fill(target: Any, value: Tensor) -> None:
    if hasattr(target, "_local_tensor"):
        from torch.distributed.tensor import distribute_tensor

        on_device = value.to(local_shard(target).device)
        value = local_shard(distribute_tensor(on_device, target.device_mesh, target.placements, src_data_rank=None))
    local_shard(target).copy_(value)
