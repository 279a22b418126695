"""The memory of a training on one device, by precision and strategy, computed without weights or data."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.modules.blocks import repeated_blocks

STRATEGIES = ("ddp", "fsdp", "fsdp_offload")
_DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "bf16-true": torch.bfloat16}
PRECISIONS = tuple(_DTYPES)
_STATES_OF_ADAM = 2


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """The bytes that a training with Adam takes on one device.

    Args:
        strategy: "ddp" (also one device alone), "fsdp", or "fsdp_offload", which keeps shards in CPU memory.
        precision: The precision.
        weights: Of the weights; under FSDP, those of a shard and of the two largest blocks that are gathered.
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
    values = sum(weight.numel() for weight in model.parameters())
    blocks = sorted((_values(block) for block in repeated_blocks(model).values()), reverse=True)
    gathered = sum(blocks[:2]) if blocks else values  # one that computes, and the next
    activations = {dtype: activation_bytes(model.to(dtype), forward) for dtype in dict.fromkeys(_DTYPES.values())}
    for precision, computes_in in _DTYPES.items():
        held_in = torch.bfloat16 if precision == "bf16-true" else torch.float32
        whole = values * held_in.itemsize
        for strategy in STRATEGIES if num_processes > 1 else STRATEGIES[:1]:
            shard = whole if strategy == "ddp" else -(-whole // num_processes)
            shard = 0 if strategy == "fsdp_offload" else shard
            copies = 0 if strategy == "ddp" else gathered * computes_in.itemsize
            yield TrainingMemory(
                strategy=strategy,
                precision=precision,
                weights=shard + copies,
                gradients=shard,
                optimizer=_STATES_OF_ADAM * shard,
                activations=activations[computes_in],
            )


def activation_bytes(model: nn.Module, forward: Callable[[nn.Module], Any]) -> int | None:
    """Return the bytes that a forward keeps for the backward, besides the weights; `None` if it cannot be computed."""
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        # Views share the memory of their base, which torch gives no public name.
        base = tensor if tensor._base is None else tensor._base  # pyright: ignore[reportPrivateUsage]
        if id(base) not in own:
            kept[id(base)] = base
        return tensor

    was_training = model.training
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            forward(model.train())
    except Exception:  # noqa: BLE001 - any model may be given, and not every operation has a form without values
        return None
    finally:
        model.train(was_training)
    return sum(tensor.numel() * tensor.element_size() for tensor in kept.values())


def _values(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())
