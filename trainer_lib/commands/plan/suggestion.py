"""Suggestions: the mesh with the fewest messages that fits into the memory of a device, or the lever that does."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from trainer_lib.commands.plan.rank_memory import Weights
from trainer_lib.commands.plan.simulated_rank import Simulation
from trainer_lib.commands.plan.training_job import TrainingJob
from trainer_lib.foundation.byte_sizes import convert_bytes
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.options.parallel.fsdp_options import FullyShardedDataParallelPlugin
from trainer_lib.parallelism_config import ParallelismConfig
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments

_MOST_TP = 8  # ranks of one machine
_MOST_STAGES = 8
# What lowers memory on any mesh, those that cost the least time first.
_LEVERS: tuple[Mapping[str, Any], ...] = (
    {"chunked_cross_entropy": True},
    {"gradient_checkpointing": True},
    {"gradient_checkpointing": True, "chunked_cross_entropy": True},
    {"optimizer_in_backward": True, "max_grad_norm": None, "on_nonfinite": "raise"},  # which excludes the others
    {"optimizer": "adamw_torch_8bit"},
    {"activation_offload": True},
    {"gradient_checkpointing": True, "chunked_cross_entropy": True, "optimizer": "adamw_torch_8bit"},
)


class Mesh(NamedTuple):
    """A mesh, and the options of FSDP2 if it shards."""

    config: ParallelismConfig
    plugin: FullyShardedDataParallelPlugin | None


def first_that_fits(
    meshes: Iterable[Mesh], total: Callable[[Mesh], int | None], memory: int
) -> tuple[Mesh | None, list[str]]:
    """Return the first mesh whose ranks need at most `memory` bytes, and what was tried before, in words.

    Args:
        meshes: The meshes, those with the fewest messages first.
        total: Returns the bytes of a rank; `None` if the model does not fit the mesh.
        memory: The bytes of a device.
    """
    tried: dict[str, int] = {}
    for mesh in meshes:
        size = total(mesh)
        if size is not None and size <= memory:
            return mesh, [f"{kind} {convert_bytes(least)}" for kind, least in tried.items()]
        if size is not None:
            kind = " × ".join(name for name in mesh.config.active_mesh_dims) or "one rank"
            tried[kind] = min(size, tried.get(kind, size))
    return None, [f"{kind} {convert_bytes(least)}" for kind, least in tried.items()]


def suggested_mesh(simulation: Simulation, world: int, memory: int) -> str:
    """Return the mesh that is suggested for devices of `memory` bytes, in words."""
    bound = _LowerBound(simulation.job)
    totals: dict[str, int] = {}

    def total(mesh: Mesh) -> int | None:
        least = bound.of(mesh)
        if least > memory:  # its forward need not be computed
            return least
        try:
            rank = simulation.heaviest(*mesh).memory
        except (ConfigurationError, UnsupportedError):  # the model does not fit the sizes, or has no plan
            return None
        if rank.activations is None:
            return None
        bound.note(mesh.config, rank.activations)
        totals[mesh.config.describe()] = rank.total
        return rank.total

    mesh, tried = first_that_fits(_meshes(world), total, memory)
    given = convert_bytes(memory)
    others = f" Tried before, fewest messages first, and what each takes at least: {', '.join(tried)}." if tried else ""
    if mesh is None:
        return (
            f"No mesh of copies, shards, tp, pp and cp fits into {given}. Use more ranks, or smaller batches.{others}"
        )
    sizes = ", ".join(f"{name}_size={size}" for name, size in mesh.config.sizes.items() if size > 1) or "one rank"
    return f"Suggested for {given}: {sizes} ({convert_bytes(totals[mesh.config.describe()])} on each rank).{others}"


def suggested_lever(simulation: Simulation, mesh: Mesh, memory: int) -> str:
    """Return the lever with which a mesh fits into `memory` bytes, in words."""
    tried: list[str] = []
    for changes in _levers(simulation.job.args, mesh):
        offload = {"plugin": _offloaded(mesh.plugin)} if "cpu_offload" in changes else {}
        args = {name: value for name, value in changes.items() if name != "cpu_offload"}
        try:
            job = simulation.job.with_arguments(**args) if args else simulation.job
            rank = Simulation(job) if args else simulation
            size = rank.heaviest(mesh.config, offload.get("plugin", mesh.plugin)).memory.total
        except (ConfigurationError, UnsupportedError):  # the model does not take it
            continue
        words = _words(changes)
        if size <= memory:
            others = f" Not enough: {', '.join(tried)}." if tried else ""
            return f"This mesh fits with {words} ({convert_bytes(size)}).{others}"
        tried.append(f"{words} {convert_bytes(size)}")
    return f"No lever makes this mesh fit into {convert_bytes(memory)}. Tried: {', '.join(tried)}."


def _words(changes: Mapping[str, Any]) -> str:
    """Return the options that make these changes."""
    if "optimizer_in_backward" in changes:
        without_clipping = " (without gradient clipping: max_grad_norm=None)" if "max_grad_norm" in changes else ""
        return f"--optimizer_in_backward{without_clipping}"
    return " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in changes.items())


def _levers(args: TrainingArguments, mesh: Mesh) -> Iterator[Mapping[str, Any]]:
    """Yield the levers that are not in use."""
    known: list[Mapping[str, Any]] = list(_LEVERS)
    if args.optimizer_in_backward:
        known = [changes for changes in known if "optimizer_in_backward" not in changes]
    if mesh.plugin is not None and not mesh.plugin.offload.to_cpu:
        known += [{"cpu_offload": True}, {"gradient_checkpointing": True, "cpu_offload": True}]
    if args.optimizer not in ("adamw", "adam"):
        known = [changes for changes in known if "optimizer" not in changes]
    for changes in known:
        new = {name: value for name, value in changes.items() if getattr(args, name, None) != value}
        if new == changes or (new and len(changes) > 1):
            yield new


def _offloaded(plugin: FullyShardedDataParallelPlugin | None) -> FullyShardedDataParallelPlugin:
    assert plugin is not None  # else the lever is not tried
    return FullyShardedDataParallelPlugin(cpu_offload=True, reshard_after_forward=plugin.reshard_after_forward)


def _meshes(world: int) -> Iterator[Mesh]:
    """Yield the meshes of a world, those with the fewest messages first."""
    tps = [tp for tp in (1, 2, 4, _MOST_TP) if world % tp == 0]
    parts: list[dict[str, Any]] = [{"tp_size": tp} for tp in tps]
    more = [size for size in (2, 4, _MOST_STAGES) if world % size == 0]
    for name, size, tp in itertools.product(("pp_size", "cp_size"), more, (1, _MOST_TP)):
        if tp in tps and world % (size * tp) == 0:
            parts.append({name: size, "tp_size": tp})
    for sizes in parts:
        rest = world
        for size in sizes.values():
            rest //= size
        for shards in (shards for shards in range(1, rest + 1) if rest % shards == 0):
            plugin = FullyShardedDataParallelPlugin() if shards > 1 else None
            yield Mesh(ParallelismConfig(dp_replicate_size=rest // shards, dp_shard_size=shards, **sizes), plugin)


class _LowerBound:
    """What a rank of a mesh holds at least, without a forward: whole weights divided by the ranks that share them.

    Args:
        job: The training.
    """

    def __init__(self, job: TrainingJob) -> None:
        self._whole = Weights(job, job.model, ParallelismConfig(), None).memory().total
        self._activations: dict[int, int] = {}

    def note(self, config: ParallelismConfig, activations: int) -> None:
        """Note the activations of a mesh that splits neither layers nor sequences."""
        if config.sizes["pp"] == config.sizes["cp"] == 1:
            tp = config.sizes["tp"]
            self._activations[tp] = min(activations, self._activations.get(tp, activations))

    def of(self, mesh: Mesh) -> int:
        """Return the bytes."""
        sizes, shards = mesh.config.sizes, 1 if mesh.plugin is None else mesh.config.shard_size
        activations = self._activations.get(sizes["tp"], 0) // (sizes["pp"] * sizes["cp"])
        return self._whole // (sizes["tp"] * sizes["pp"] * shards) + activations
