"""This rank's shards of a model under ZeRO: fp32 weights, their gradients, and the optimizer's states."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer_lib.process_group import ProcessGroup


class Piece(NamedTuple):
    """The part of a parameter that this rank holds.

    Args:
        shard: The index of the shard.
        offset: Where the part begins in the shard.
        start: Where it begins in the flattened parameter.
        length: Its number of values; 0 if this rank holds none.
    """

    shard: int
    offset: int
    start: int
    length: int


class ZeroShards:
    """The shards of one DeepSpeed engine, whose gradients are those of the current accumulation window.

    ZeRO keeps gradients outside of `grad`. `reduce_gradients` puts them there, once an update, so that they are
    divided, clipped and checked like those of any optimizer; ZeRO's own step reads the same memory.

    Args:
        engine: The engine.
        group: The ranks that share the model.
    """

    def __init__(self, engine: Any, group: ProcessGroup) -> None:
        self.engine = engine
        self.zero: Any = engine.optimizer
        self.stage: int = engine.zero_optimization_stage()
        self.group = group
        self.is_offloaded = bool(engine.zero_offload_optimizer()) and engine.zero_offload_optimizer().device != "none"
        self._is_reduced = False
        self._is_stepping = False
        _count_backwards_once(self.zero)
        if self.stage == 3:
            self.tensors: Sequence[Tensor] = list(self.zero.fp32_partitioned_groups_flat)
            self.parameters: list[list[nn.Parameter]] = list(self.zero.fp16_groups)
        else:
            self.tensors = list(self.zero.single_partition_of_fp32_groups)
            self.parameters = list(self.zero.bit16_groups)
        self._ids = {id(parameter) for group in self.parameters for parameter in group}

    def holds(self, parameter: Tensor) -> bool:
        """Whether these shards train a parameter of the model."""
        return id(parameter) in self._ids

    # -- an update -----------------------------------------------------------------------------------------------

    @property
    def has_gradients(self) -> bool:
        """Whether a backward has run since the gradients were dropped."""
        zero = self.zero
        if self._is_reduced:
            return True
        if self.stage == 3:  # which counts a backward when the next forward begins
            return zero.micro_step_id > 0 or zero._epilogue_ran_this_backward  # pyright: ignore[reportPrivateUsage]
        return zero.micro_step_id > -1

    def reduce_gradients(self) -> None:
        """Complete the gradients of the window and put them into the shards' `grad`, once an update.

        All ranks call it.
        """
        if self._is_reduced:
            return
        self._is_reduced = True
        zero = self.zero
        if self.stage == 1:  # which reduces only now
            zero.set_gradient_accumulation_boundary(True)
            zero.reduce_gradients()
            zero.set_gradient_accumulation_boundary(False)
        else:
            zero.finalize_gradient_accumulation_boundary()
            zero.set_gradient_accumulation_boundary(False)
        if not self.is_offloaded:  # else they are there
            for index, tensor in enumerate(self.tensors):
                tensor.grad = _joined(zero.averaged_gradients[index], tensor)
                zero.averaged_gradients[index] = [tensor.grad]

    def step(self) -> None:
        """Update the weights on all ranks."""
        self.reduce_gradients()
        self._is_stepping = True
        try:
            if self.stage == 3:
                for settings in self.zero.optimizer.param_groups:
                    settings["params"] = []  # ZeRO gives it one shard after the other
            self.zero.step()
        finally:
            self._is_stepping = False
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Drop the gradients of the window, as if no backward had run."""
        zero = self.zero
        zero.zero_grad()
        self._is_reduced = False
        if self.stage < 3:
            zero.micro_step_id = -1
            for name in ("averaged_gradients", "all_grad_tensors"):
                kept = getattr(zero, name)
                for index in list(kept):
                    kept[index] = None
        if not self.is_offloaded:
            for tensor in self.tensors:
                tensor.grad = None

    def show_in_groups(self) -> None:
        """Let the groups of the optimizer hold the shards, which ZeRO-3 puts there only during a step."""
        if self.stage < 3 or self._is_stepping:
            return
        groups: list[dict[str, Any]] = self.zero.optimizer.param_groups
        for number, settings in enumerate(groups):
            settings["params"] = [
                tensor for index, tensor in enumerate(self.tensors) if self.zero.sub_group_to_group_id[index] == number
            ]

    # -- whole tensors -------------------------------------------------------------------------------------------

    def shard_of(self, parameter: Tensor) -> int:
        """Return the index of the shards that hold a parameter."""
        return next(i for i, group in enumerate(self.parameters) if any(p is parameter for p in group))

    def shape_of(self, parameter: Any) -> torch.Size:
        """Return the shape of the whole parameter."""
        return getattr(parameter, "ds_shape", parameter.shape)

    @torch.no_grad()
    def whole(self, parameter: Tensor, shard: Tensor) -> Tensor:
        """Return the values of all ranks for a parameter: weights, or states of the optimizer. All ranks call it.

        Args:
            parameter: The parameter of the model.
            shard: The values in the layout of this rank's shard.
        """
        shape = self.shape_of(parameter)
        values = torch.zeros(shape.numel(), dtype=shard.dtype, device=self.engine.device)
        if (piece := self._piece(parameter)).length:
            own = shard.detach().narrow(0, piece.offset, piece.length)
            values.narrow(0, piece.start, piece.length).copy_(own)
        return self.group.all_reduce(values).view(shape)

    @torch.no_grad()
    def write(self, parameter: Tensor, shard: Tensor, values: Tensor) -> None:
        """Overwrite this rank's part of a parameter's values in the layout of its shard."""
        if (piece := self._piece(parameter)).length:
            part = values.detach().reshape(-1).narrow(0, piece.start, piece.length)
            shard.detach().narrow(0, piece.offset, piece.length).copy_(part)

    def _piece(self, parameter: Any) -> Piece:
        if self.stage == 3:
            zero, size = self.zero, parameter.ds_numel
            index, offset, length = zero.grad_position[zero.get_param_id(parameter)]
            start = min(length * self.group.rank, size)
            return Piece(index, offset, start, min(length, size - start))
        mapping = parameter._hp_mapping  # DeepSpeed's public functions read it under this name
        if mapping is None:
            return Piece(0, 0, 0, 0)
        shard, whole = mapping.hp_fragment_address, mapping.lp_fragment_address
        return Piece(mapping.param_group_index, shard.start, whole.start, shard.numel)


def _count_backwards_once(zero: Any) -> None:
    """Let ZeRO complete a backward through several forwards, and one that follows a backward that raised.

    It counts a backward for each forward, as nested ones, and completes none while it counts two.
    """
    enter_backward = zero.enter_backward

    def enter() -> None:
        zero._backward_active_depth = 0  # pyright: ignore[reportPrivateUsage]
        enter_backward()

    zero.enter_backward = enter


def _joined(gradients: Sequence[Tensor], tensor: Tensor) -> Tensor:
    """Return the gradients of a shard as one tensor, with zeros for its padding."""
    joined = torch.cat([gradient.reshape(-1) for gradient in gradients]).to(tensor.dtype)
    return nn.functional.pad(joined, (0, tensor.numel() - joined.numel()))
