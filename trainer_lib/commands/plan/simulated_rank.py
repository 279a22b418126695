"""A rank of a large world, simulated in one process: its memory, and its messages of one optimizer step."""

import dataclasses
from collections.abc import Mapping, Sequence

from trainer_lib.commands.plan.computed_parts import GATHERED_AS, ComputedPart, computed_parts
from trainer_lib.commands.plan.counted_messages import Messages
from trainer_lib.commands.plan.pipeline_schedule import activations_in_flight
from trainer_lib.commands.plan.rank_memory import RankMemory, Weights
from trainer_lib.commands.plan.simulated_world import DEVICE, simulated_world
from trainer_lib.commands.plan.training_job import TrainingJob
from trainer_lib.foundation.errors import UnsupportedError
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.modules.training_memory import local_part
from trainer_lib.options.enums import DistributedType
from trainer_lib.options.parallel.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.options.parallel.pipeline_options import scheduled
from trainer_lib.parallelism_config import ParallelismConfig
from trainer_lib.process_group import LoneProcess
from trainer_lib.strategies.registry import choose_strategy


@frozen_dataclass
class SimulatedRank:
    """What a rank of a mesh holds and sends.

    Args:
        memory: The bytes that it holds.
        messages: What it sends in an optimizer step, by dimension of the mesh.
        stages: The stages of a pipeline that it holds.
        has_counted_messages: Whether the messages of the activations are known: a backward could be simulated.
        reason: Why not.
    """

    memory: RankMemory
    messages: dict[str, Messages]
    stages: Sequence[int] = (0,)
    has_counted_messages: bool = True
    reason: str = ""


class Simulation:
    """Simulates the ranks of meshes for one training.

    Args:
        job: The training.
    """

    def __init__(self, job: TrainingJob) -> None:
        self.job = job
        self._parts: dict[tuple[object, ...], list[ComputedPart]] = {}

    def ranks(self, config: ParallelismConfig, plugin: FullyShardedDataParallelPlugin | None) -> list[SimulatedRank]:
        """Return the first rank of each stage of a mesh; no rank that holds the same stage holds or sends more.

        Args:
            config: The sizes of the mesh.
            plugin: The options of FSDP2; `None`: each rank holds whole weights.

        Raises:
            ConfigurationError: If the model or the batch does not fit the mesh.
            UnsupportedError: If a run would refuse the mesh, or what it refuses cannot be simulated.
        """
        parts = self._computed(config, plugin is not None)
        shared = _shared_weights(parts)
        return [self._rank(index, part, config, plugin, shared) for index, part in enumerate(parts)]

    def heaviest(self, config: ParallelismConfig, plugin: FullyShardedDataParallelPlugin | None) -> SimulatedRank:
        """Return the rank that holds the most."""
        return max(self.ranks(config, plugin), key=lambda rank: rank.memory.total)

    def check(self, config: ParallelismConfig, plugin: FullyShardedDataParallelPlugin | None) -> None:
        """Raise what a run raises for a mesh and a precision that do not work together."""
        name = self.job.args.mixed_precision or "no"
        if name == "fp8":
            raise UnsupportedError("mixed_precision='fp8' is not simulated. Plan with 'bf16', which takes more memory.")
        is_averaged = plugin is None and config.sizes["tp"] < config.total_size  # after the backward
        if self.job.args.optimizer_in_backward and (is_averaged or config.pp_enabled):
            raise UnsupportedError(
                "optimizer_in_backward=True works on one device, with FSDP2 (--dp_shard), and with --tp alone or with "
                "FSDP2, not with --pp. Shard the weights, or leave it out."
            )
        kind = DistributedType.NO if config.total_size == 1 else DistributedType.MULTI_CPU
        with simulated_world(config) as world:
            lone = LoneProcess()
            choose_strategy(kind, lone, DEVICE, None, plugin, world.config, name, None, lone)

    def _computed(self, config: ParallelismConfig, is_sharded: bool) -> list[ComputedPart]:
        """Return what ranks compute, which does not depend on the number of replicas and of shards."""
        alone = dataclasses.replace(config, dp_replicate_size=1, dp_shard_size=1)
        name = self.job.args.mixed_precision or "no"
        key = (*alone.sizes.items(), str(config.pp_handler), is_sharded and name in GATHERED_AS)
        if key not in self._parts:
            with simulated_world(alone) as world:
                self._parts[key] = computed_parts(self.job, world, is_sharded)
        return self._parts[key]

    def _rank(
        self,
        index: int,
        part: ComputedPart,
        config: ParallelismConfig,
        plugin: FullyShardedDataParallelPlugin | None,
        shared: Mapping[str, Sequence[int]],
    ) -> SimulatedRank:
        stages, micro_batches = part.stages, self.job.micro_batches
        gathered_as = GATHERED_AS.get(self.job.args.mixed_precision or "no")
        weights = Weights(self.job, part.model, config, plugin, gathered_as)
        activations = self._activations(index, part, config)
        buffers = max(stage.temporary for stage in stages.values())
        if config.pp_enabled:  # schedules receive the gradients of each micro-batch into a tensor of its own
            buffers += self._scheduled(config) * sum(stage.passed_on for stage in stages.values())
        of_stages = [{name: each * micro_batches for name, each in stage.messages.items()} for stage in stages.values()]
        messages = _summed([*of_stages, weights.messages()])
        if config.pp_enabled:
            messages["pp"] = _between_stages(index, part, config, micro_batches, shared)
        order = [*config.sizes]
        messages = dict(sorted(messages.items(), key=lambda pair: -order.index(pair[0].partition(" ")[0])))
        has_counted = all(stage.has_backward for stage in stages.values())
        reason = next((stage.reason for stage in stages.values() if stage.reason), "")
        return SimulatedRank(weights.memory(activations, buffers), messages, list(stages), has_counted, reason)

    def _activations(self, index: int, part: ComputedPart, config: ParallelismConfig) -> int | None:
        """Return what forwards keep at a time, and the tensors that a schedule receives activations into."""
        kept = {number: stage.kept for number, stage in part.stages.items() if stage.kept is not None}
        if len(kept) < len(part.stages):
            return None
        if not config.pp_enabled:
            return sum(kept.values())
        options, ranks = config.pp_options, config.sizes["pp"]
        received = self._scheduled(config) * sum(stage.received for stage in part.stages.values())
        return activations_in_flight(options, index, ranks, self.job.micro_batches, kept) + received

    def _scheduled(self, config: ParallelismConfig) -> int:
        """Return how many micro-batches of a window a schedule takes."""
        options = config.pp_options
        if options.schedule is None:
            return 0
        return scheduled(options.schedule, self.job.micro_batches, config.sizes["pp"])[1]


def _summed(counts: Sequence[Mapping[str, Messages]]) -> dict[str, Messages]:
    total: dict[str, Messages] = {}
    for messages in counts:
        for name, count in messages.items():
            total[name] = total.get(name, Messages()) + count
    return total


def _between_stages(
    index: int, part: ComputedPart, config: ParallelismConfig, micro_batches: int, shared: Mapping[str, Sequence[int]]
) -> Messages:
    """Return what a rank sends to other ranks of its pipeline: activations, gradients, and those of shared weights."""
    messages = Messages()
    for number, stage in part.stages.items():
        is_last = number == config.sizes["pp"] * len(part.stages) - 1
        messages += Messages(0 if is_last else micro_batches, micro_batches * stage.passed_on)
        messages += Messages(micro_batches if number else 0, micro_batches * stage.received)
    for name, holders in shared.items():
        if index in holders:
            weight = local_part(part.weights[name])
            times = len(holders) - 1 if index == holders[0] else 1
            messages += Messages(1, weight.numel() * weight.element_size()) * times
    return messages


def _shared_weights(parts: Sequence[ComputedPart]) -> dict[str, list[int]]:
    """Return the weights that several ranks of a pipeline hold, such as a tied embedding and head."""
    holders: dict[str, list[int]] = {}
    for index, part in enumerate(parts):
        for name, weight in part.weights.items():
            if weight.requires_grad:
                holders.setdefault(name, []).append(index)
    return {name: ranks for name, ranks in holders.items() if len(ranks) > 1}
