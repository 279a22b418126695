"""A rank of a large world, simulated in one process: its memory, and its messages of one step."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from trainer_lib.commands.plan.counted_messages import CountedMessages, Messages
from trainer_lib.commands.plan.fused_attention import FusedAttention
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.modules.blocks import repeated_blocks
from trainer_lib.modules.training_memory import TrainingMemory, activation_bytes, computing_dtype, local_part, memory_of
from trainer_lib.options.tensor_parallel_options import TorchTensorParallelConfig
from trainer_lib.parallelism_config import ParallelismConfig
from trainer_lib.process_group import LoneProcess
from trainer_lib.strategies.tensor_parallel.tensor_parallel import MatrixSplitting

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_DDP_BUCKET = 25 * 1024 * 1024


@dataclass(frozen=True)
class SimulatedRank:
    """What the first rank of a mesh holds and sends; no other rank holds more.

    Args:
        memory: The bytes that it holds.
        messages: What it sends in a step of one micro-batch, by dimension of the mesh.
        has_counted_messages: Whether the messages of `tp` are known: a backward could be simulated.
    """

    memory: TrainingMemory
    messages: dict[str, Messages]
    has_counted_messages: bool = True


def simulate(
    model: nn.Module, forward: Callable[[nn.Module], Any], config: ParallelismConfig, precision: str = "no"
) -> SimulatedRank:
    """Return what the first rank of a mesh holds and sends.

    Args:
        model: The model, on the meta device. It is split in place.
        forward: Computes an output of one batch.
        config: The sizes of the mesh.
        precision: "no", "bf16" or "bf16-true".

    Raises:
        ConfigurationError: If the model does not fit the sizes.
        UnsupportedError: If the mesh has a dimension that is not simulated.
    """
    unknown = [name for name in ("pp", "cp", "sp") if config.sizes[name] > 1]
    if unknown:
        sizes = ", ".join(f"{name}_size={config.sizes[name]}" for name in unknown)
        raise UnsupportedError(
            f"{sizes}: `trainer-lib plan` simulates dp_replicate, dp_shard and tp only. Leave the others at 1."
        )
    messages: dict[str, Messages] = {}
    counted = True
    model.to(computing_dtype(precision))  # before it is split: weights that are split keep their type
    with _fake_world(config) as mesh, FusedAttention():
        if mesh is not None and config.tp_enabled:
            tp = mesh if mesh.ndim == 1 else mesh["tp"]
            splitting = MatrixSplitting(model, config.tp_handler or TorchTensorParallelConfig(), tp, LoneProcess())
            splitting.apply(model)
        shards = config.sizes["dp_shard"]
        kept = activation_bytes(model, forward)
        memory = memory_of(model, "fsdp" if shards > 1 else "ddp", precision, shards, kept)
        if config.tp_enabled:
            messages["tp"], counted = _count(model, forward, config.sizes["tp"])
    messages |= _of_weights(model, config, precision)
    return SimulatedRank(memory, messages, counted)


@contextmanager
def _fake_world(config: ParallelismConfig) -> "Generator[DeviceMesh | None]":
    """Yield the mesh of a world whose other ranks do not exist, and whose messages go nowhere."""
    if dist.is_initialized():
        raise ConfigurationError("`trainer-lib plan` simulates a world, and this process is in one. Start it alone.")
    dist.init_process_group("fake", rank=0, world_size=config.total_size)
    try:
        yield config.build_device_mesh("cpu")
    finally:
        dist.destroy_process_group()


def _count(model: nn.Module, forward: Callable[[nn.Module], Any], ranks: int) -> tuple[Messages, bool]:
    """Return the messages of a forward and a backward, and whether both could be simulated."""
    with CountedMessages(ranks) as counter:
        try:
            output = forward(model.train())
            value = getattr(output, "loss", None)
            value = value if value is not None else getattr(output, "logits", output)
            value.sum().backward()
        except Exception:  # noqa: BLE001 - any model may be given, and not every operation has a form without values
            return counter.messages, False
        finally:
            model.zero_grad(set_to_none=True)
    return counter.messages, True


def _of_weights(model: nn.Module, config: ParallelismConfig, precision: str) -> dict[str, Messages]:
    """Return the messages of FSDP2 and of the averages of gradients."""
    computed_in = 4 if precision == "no" else 2
    held_in = 2 if precision == "bf16-true" else 4
    parts = {parameter: local_part(parameter).numel() for parameter in model.parameters()}
    whole = sum(parts.values())
    shards, replicas = config.sizes["dp_shard"], config.sizes["dp_replicate"]
    messages: dict[str, Messages] = {}
    blocks = list(repeated_blocks(model).values())
    groups = len(blocks) + 1  # and what is in no block, which is gathered once and stays
    if shards > 1:
        in_blocks = sum(parts[parameter] for block in blocks for parameter in block.parameters())
        gathered = Messages(groups + len(blocks), (whole + in_blocks) * computed_in)
        messages["dp_shard"] = gathered + Messages(groups, whole * computed_in)
    if replicas > 1:
        if shards > 1:
            messages["dp_replicate"] = Messages(groups, -(-whole // shards) * computed_in)
        else:
            size = whole * held_in
            messages["dp_replicate"] = Messages(max(1, -(-size // _DDP_BUCKET)), size)
    return messages
