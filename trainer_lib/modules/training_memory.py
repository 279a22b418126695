"""The memory of a training on one device, by precision and strategy, computed without weights or data."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.modules.blocks import repeated_blocks

STRATEGIES = ("ddp", "fsdp", "fsdp_offload")
_DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "bf16-true": torch.bfloat16}
PRECISIONS = tuple(_DTYPES)
_STATES_OF_ADAM = 2


@frozen_dataclass(kw_only=True)
class TrainingMemory:
    """The bytes that a training with Adam takes on one device.

    Args:
        strategy: "ddp" (also one device alone), "fsdp", or "fsdp_offload", which keeps shards in CPU memory.
        precision: The precision.
        weights: Of the weights; under FSDP, a shard, and what is gathered: two blocks, and what is in none.
        gradients: Of the gradients.
        optimizer: Of the two states of Adam.
        activations: What a forward keeps for the backward; `None` if the model's forward cannot be computed here.
    """

    strategy: str
    precision: str
    weights: int
    gradients: int
    optimizer: int
    activations: int | None

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.optimizer + (self.activations or 0)


def training_memory(
    model: nn.Module, forward: Callable[[nn.Module], Any], num_processes: int = 1
) -> Iterator[TrainingMemory]:
    """Yield the memory of a training for each precision and strategy; FSDP only with several processes.

    Args:
        model: The model, in fp32; it may be on the meta device, and its type changes.
        forward: Computes the loss, or an output, of one batch.
        num_processes: How many devices share the weights under FSDP.
    """
    activations = {dtype: activation_bytes(model.to(dtype), forward) for dtype in dict.fromkeys(_DTYPES.values())}
    for precision, computes_in in _DTYPES.items():
        for strategy in STRATEGIES if num_processes > 1 else STRATEGIES[:1]:
            yield memory_of(model, strategy, precision, num_processes, activations[computes_in])


def memory_of(
    model: nn.Module, strategy: str, precision: str, num_processes: int, activations: int | None
) -> TrainingMemory:
    """Return the memory of a training with one precision and one strategy.

    Args:
        model: The model; of weights that tensor parallelism splits, the part of this rank counts.
        strategy: "ddp", "fsdp" or "fsdp_offload".
        precision: The precision.
        num_processes: How many devices share the weights under FSDP.
        activations: What a forward keeps.
    """
    values = _values(model)
    blocks = sorted((_values(block) for block in repeated_blocks(model).values()), reverse=True)
    # One block that computes, the next one, and what is in no block, which FSDP2 gathers once for a step.
    gathered = sum(blocks[:2]) + values - sum(blocks)
    held_in = torch.bfloat16 if precision == "bf16-true" else torch.float32
    shard = {"ddp": values, "fsdp_offload": 0}.get(strategy)
    if shard is None:
        shard = sum(_shard_values(weight, num_processes) for weight in model.parameters())
    copies = 0 if strategy == "ddp" else gathered * _DTYPES[precision].itemsize
    held = shard * held_in.itemsize
    return TrainingMemory(
        strategy=strategy,
        precision=precision,
        weights=held + copies,
        gradients=held,
        optimizer=_STATES_OF_ADAM * held,
        activations=activations,
    )


def activation_bytes(model: nn.Module, forward: Callable[[nn.Module], Any]) -> int | None:
    """Return the bytes that a forward keeps for the backward, besides the weights; `None` if it cannot be computed."""
    # By storages, which views share; a distributed tensor is created around the same part many times.
    own = [local_part(tensor).untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
    weights = {id(storage) for storage in own}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = local_part(tensor).untyped_storage()
        if id(storage) not in weights:
            kept[id(storage)] = storage
        return tensor

    was_training = model.training
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            forward(model.train())
    except Exception:  # noqa: BLE001 - any model may be given, and not every operation has a form without values
        return None
    finally:
        model.train(was_training)
    return sum(storage.nbytes() for storage in kept.values())


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds: the tensor, unless tensor parallelism splits it."""
    return getattr(tensor, "_local_tensor", tensor)


def _values(module: nn.Module) -> int:
    return sum(local_part(weight).numel() for weight in module.parameters())


def _shard_values(weight: Tensor, num_processes: int) -> int:
    """Return the values of the first rank's shard: FSDP2 splits rows, and the first rank has the most."""
    part = local_part(weight)
    rows = part.shape[0] if part.dim() else 1
    return -(-rows // num_processes) * (part.numel() // max(rows, 1))
