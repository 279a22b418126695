"""The memory of a rank's weights, gradients and optimizer, and the messages that they need."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer_lib.commands.plan.counted_messages import Messages
from trainer_lib.commands.plan.optimizer_states import optimizer_bytes
from trainer_lib.commands.plan.training_job import TrainingJob
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.modules.training_memory import local_part
from trainer_lib.options.parallel.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.parallelism_config import ParallelismConfig
from trainer_lib.strategies.fsdp.wrap_policy import ignored_modules, modules_to_wrap

_MESSAGE = 25 * 1024 * 1024  # the bytes of gradients that one message averages
_REDUCED_IN = 4  # bytes of a value in which FSDP2 sums gradients of 16 bits


@frozen_dataclass(kw_only=True)
class RankMemory:
    """The bytes that a rank holds on its device.

    Args:
        weights: Of the weights; under FSDP, the shards, and what is gathered: two blocks, and what is in none.
        gradients: Of the gradients.
        optimizer: Of the optimizer's state.
        activations: What forwards keep for their backwards, of all micro-batches in flight; `None`: not known.
        buffers: Of temporary tensors of a forward and a backward, and of messages.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int | None = None
    buffers: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.optimizer + (self.activations or 0) + self.buffers


class Weights:
    """The weights of a rank, whole or sharded over others.

    Args:
        job: The training.
        model: The part of the model that this rank computes with, in the type that its weights are held in.
        config: The sizes of the mesh.
        plugin: The options of FSDP2; `None`: each rank holds whole weights.
        gathered_as: The type in which FSDP2 gathers weights; `None`: the one in which they are held.
    """

    def __init__(
        self,
        job: TrainingJob,
        model: nn.Module,
        config: ParallelismConfig,
        plugin: FullyShardedDataParallelPlugin | None,
        gathered_as: torch.dtype | None = None,
    ) -> None:
        self._job, self._model, self._config, self._plugin = job, model, config, plugin
        held_in = max((parameter.element_size() for parameter in model.parameters()), default=_REDUCED_IN)
        self._gathered_in = held_in if gathered_as is None else gathered_as.itemsize
        self._reduced_in = held_in if gathered_as is None else _REDUCED_IN
        self._shards = 1 if plugin is None else config.shard_size
        self._groups = [] if plugin is None else _groups(model, plugin)

    def memory(self, activations: int | None = None, buffers: int = 0) -> RankMemory:
        """Return the memory of the rank, with what it computes."""
        is_offloaded = self._plugin is not None and self._plugin.offload.to_cpu
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        held = 0 if is_offloaded else sum(map(self._held, self._model.parameters()))
        gradients = 0 if is_offloaded else sum(map(self._held, trained))
        states = 0 if is_offloaded else optimizer_bytes(self._job, self._model, self._shape)
        if self._in_backward:
            gradients = 0 if is_offloaded else max(map(self._held, trained), default=0)
        return RankMemory(
            weights=held + self._gathered(),
            gradients=gradients + self._unreduced(trained),
            optimizer=states,
            activations=activations,
            buffers=buffers + self._message_buffers(gradients),
        )

    def messages(self) -> dict[str, Messages]:
        """Return the messages of an optimizer step, by dimensions of the mesh."""
        sizes, counted = self._config.sizes, dict[str, Messages]()
        trained = [local_part(parameter) for parameter in self._model.parameters() if parameter.requires_grad]
        if self._plugin is None:
            size = sum(part.numel() * part.element_size() for part in trained)
            names = [name for name in ("dp_replicate", "cp", "sp") if sizes[name] > 1]
            if names and size:
                counted[" × ".join(names)] = Messages(max(1, -(-size // _MESSAGE)), size)
            return counted
        values = [sum(part.numel() for part in group) for group in self._groups]
        whole, of_root, backwards = sum(values), values[-1], self._job.micro_batches
        # Blocks are gathered in the forward and again in the backward; what is in no block stays.
        passes = Messages(2 * len(values) - 1, (2 * whole - of_root) * self._gathered_in)
        if self._plugin.reshard_after_forward is False:
            passes = Messages(len(values), whole * self._gathered_in)
        reduced = Messages(len(values), whole * self._reduced_in)
        reductions = backwards if self._config.pp_enabled else 1
        names = [name for name in ("dp_shard", "cp", "sp") if sizes[name] > 1]
        counted[" × ".join(names)] = passes * backwards + reduced * reductions
        if self._config.dp_replicate_enabled:
            counted["dp_replicate"] = Messages(len(values), -(-whole // self._shards) * self._reduced_in) * reductions
        return counted

    @property
    def _in_backward(self) -> bool:
        return bool(getattr(self._job.args, "optimizer_in_backward", False))

    def _shape(self, parameter: Tensor) -> tuple[int, ...]:
        """Return the shape of the first rank's shard: FSDP2 splits rows, and the first rank has the most."""
        shape = tuple(local_part(parameter).shape)
        return (-(-shape[0] // self._shards), *shape[1:]) if shape else shape

    def _held(self, parameter: Tensor) -> int:
        size = parameter.element_size()
        for length in self._shape(parameter):
            size *= length
        return size

    def _gathered(self) -> int:
        """Return the bytes of gathered weights: a block that computes, the next one, and what is in no block."""
        if self._plugin is None:
            return 0
        *blocks, root = (sum(part.numel() for part in group) for group in self._groups)
        at_once = blocks if self._plugin.reshard_after_forward is False else sorted(blocks, reverse=True)[:2]
        return (sum(at_once) + root) * self._gathered_in

    def _unreduced(self, trained: Sequence[Tensor]) -> int:
        """Return the bytes of whole gradients that FSDP2 adds up before the last micro-batch of a window."""
        if self._plugin is None or self._job.micro_batches == 1 or self._config.pp_enabled:
            return 0
        return sum(local_part(parameter).numel() for parameter in trained) * self._reduced_in

    def _message_buffers(self, gradients: int) -> int:
        if self._plugin is not None:
            # The whole gradients of a block, and the copy of them that is reduced.
            largest = max(sum(part.numel() for part in group) for group in self._groups)
            return largest * (self._gathered_in + self._reduced_in)
        sizes = self._config.sizes
        is_ddp = sizes["tp"] == sizes["pp"] == 1 and self._config.total_size > 1
        has_buckets = is_ddp and not getattr(self._job.args.ddp, "gradient_as_bucket_view", False)
        return gradients if has_buckets else 0


def _groups(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> list[list[Tensor]]:
    """Return the weights that FSDP2 gathers together: those of each wrapped module, and the others at the end."""
    ignored = ignored_modules(model, plugin.ignored_modules)
    taken: set[Tensor] = {parameter for module in ignored for parameter in module.parameters(recurse=False)}
    groups: list[list[Tensor]] = []
    for module in (*reversed(modules_to_wrap(model, plugin, ignored).values()), model):  # inner modules first
        mine = [parameter for parameter in module.parameters() if parameter not in taken]
        taken.update(mine)
        groups.append([local_part(parameter) for parameter in mine])
    return groups
