"""The command `trainer-lib plan`: what each rank of a mesh holds and sends, before there are any."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_lib.commands.estimate import create_ascii_table, read_model
from trainer_lib.commands.plan.plan_parser import SIZES, changed_arguments, plan_command_parser
from trainer_lib.foundation.byte_sizes import convert_bytes
from trainer_lib.foundation.errors import ConfigurationError

if TYPE_CHECKING:
    from trainer_lib.commands.plan.script_job import ScriptJob
    from trainer_lib.commands.plan.simulated_rank import SimulatedRank
    from trainer_lib.commands.plan.suggestion import Mesh
    from trainer_lib.commands.plan.training_job import TrainingJob
    from trainer_lib.parallelism_config import ParallelismConfig

_PARTS = ("weights", "gradients", "optimizer", "activations", "buffers", "total")


def run(arguments: Sequence[str]) -> int:
    """Print the tables."""
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    args = plan_command_parser().parse_args(words[:end])
    rest = words[end + 1 :]
    from trainer_lib.commands.plan.simulated_rank import Simulation

    job, mesh, notes = _planned(args, rest)
    simulation = Simulation(job)
    simulation.check(*mesh)
    ranks = simulation.ranks(*mesh)
    heaviest = max(ranks, key=lambda rank: rank.memory.total)
    print(mesh.config.describe())
    print(_memory_table(ranks, job))
    if heaviest.messages:
        print(_messages_table(heaviest, job))
    for note in notes:
        print(note)
    if not heaviest.has_counted_messages:
        print(
            "The backward of this model cannot be simulated: messages of tp, cp and sp are those of a part of a step."
        )
    if args.memory is not None:
        _print_suggestions(simulation, mesh, ranks, args.memory)
    return 0


def _print_suggestions(simulation: Any, mesh: "Mesh", ranks: "Sequence[SimulatedRank]", memory: int) -> None:
    from trainer_lib.commands.plan.suggestion import suggested_lever, suggested_mesh

    if any(rank.memory.activations is None for rank in ranks):
        raise ConfigurationError(
            "No mesh can be suggested: a forward of this model cannot be computed on shapes alone "
            f"({ranks[0].reason or 'a stage before'}), so its activations are unknown. Leave --memory out, and measure "
            "a batch with `trainer-lib check SCRIPT`."
        )
    if max(rank.memory.total for rank in ranks) > memory:
        print(suggested_lever(simulation, mesh, memory))
    print(suggested_mesh(simulation, mesh.config.total_size, memory))


def _planned(args: argparse.Namespace, rest: list[str]) -> "tuple[TrainingJob, Mesh, list[str]]":
    """Return what is trained, on which mesh, and what is not simulated of it."""
    from trainer_lib.commands.plan.suggestion import Mesh
    from trainer_lib.state.parallelism_resolution import arrange

    sizes: dict[str, Any] = {f"{name}_size": getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    if args.model.endswith(".py"):
        planned = _of_script(args, rest, sizes)
    elif rest:
        raise ConfigurationError(f"{' '.join(rest)} after -- are options of a script, and {args.model} is a model.")
    else:
        planned = _of_model(args, sizes)
    config = _with_options(planned.config, args)
    world = args.world or config.total_size
    if "dp_replicate_size" not in sizes and (args.world is not None or config.total_size == 1):
        others = config.total_size // config.sizes["dp_replicate"]
        replicas = max(1, world // others)
        config = dataclasses.replace(config, dp_replicate_size=replicas)
    config.check_world(world)
    plugin = planned.plugin
    if args.cpu_offload:
        plugin = _offloading(plugin, config)
    arranged = arrange(plugin, config, world)
    config = config if arranged.parallelism_config is None else arranged.parallelism_config
    return _accumulating(planned.job, config), Mesh(config, arranged.fsdp_plugin), planned.notes


def _of_model(args: argparse.Namespace, sizes: dict[str, Any]) -> "ScriptJob":
    from trainer_lib.commands.plan.script_job import ScriptJob
    from trainer_lib.commands.plan.training_job import job_of_model
    from trainer_lib.parallelism_config import ParallelismConfig
    from trainer_lib.trainer.arguments.training_arguments import TrainingArguments

    options: dict[str, Any] = {"mixed_precision": "bf16", **changed_arguments(args)}
    model = read_model(args.model, args.library_name, args.trust_remote_code)
    arguments = TrainingArguments(use_cpu=True, **options)
    job = job_of_model(model, args.batch_size or 1, args.sequence_length or 512, arguments)
    return ScriptJob(job, ParallelismConfig(**sizes), None, [])


def _of_script(args: argparse.Namespace, rest: list[str], sizes: dict[str, Any]) -> "ScriptJob":
    from trainer_lib.commands.plan.script_job import job_of_script, trainer_of_script

    if not Path(args.model).is_file():
        raise ConfigurationError(f"There is no script {args.model}.")
    trainer = trainer_of_script(args.model, rest, args.with_weights)
    return job_of_script(trainer, sizes, changed_arguments(args), args.sequence_length)


def _with_options(config: "ParallelismConfig", args: argparse.Namespace) -> "ParallelismConfig":
    """Return the mesh with the schedule and the exchange of keys that options give."""
    from trainer_lib.options.parallel.pipeline_options import TorchPipelineParallelConfig
    from trainer_lib.options.parallel.sequence_options import TorchContextParallelConfig

    if args.schedule is not None or args.stages_per_rank is not None:
        options: dict[str, Any] = {"blocks": config.pp_handler.blocks if config.pp_handler else None}
        options |= {
            name: value for name in ("schedule", "stages_per_rank") if (value := getattr(args, name)) is not None
        }
        config = dataclasses.replace(config, pp_handler=TorchPipelineParallelConfig(**options))
    if args.cp_comm_strategy is not None:
        config = dataclasses.replace(config, cp_handler=TorchContextParallelConfig(args.cp_comm_strategy))
    return config


def _offloading(plugin: Any, config: "ParallelismConfig") -> Any:
    from trainer_lib.options.parallel.fsdp_options import FullyShardedDataParallelPlugin

    if plugin is None and not config.dp_shard_enabled:
        raise ConfigurationError(
            "--cpu_offload keeps the shards of FSDP2 in CPU memory, and dp_shard_size is 1. Give --dp_shard too."
        )
    return dataclasses.replace(plugin, cpu_offload=True) if plugin else FullyShardedDataParallelPlugin(cpu_offload=True)


def _accumulating(job: "TrainingJob", config: "ParallelismConfig") -> "TrainingJob":
    """Return the job with the micro-batches that its global batch size means."""
    if job.args.global_batch_size is None:
        return job
    from trainer_lib.trainer.fit.accelerator_setup.build_accelerator import accumulation_steps

    steps = accumulation_steps(job.args, config.data_parallel_size)
    args = dataclasses.replace(job.args, gradient_accumulation_steps=steps, global_batch_size=None)
    return dataclasses.replace(job, args=args)


def _memory_table(ranks: "Sequence[SimulatedRank]", job: "TrainingJob") -> str:
    from trainer_lib.commands.plan.training_job import describe_batch

    rows: list[list[str]] = []
    for rank in ranks:
        sizes = [getattr(rank.memory, part) for part in _PARTS]
        stage = [", ".join(map(str, rank.stages))] if len(ranks) > 1 else []
        rows.append([*stage, *("unknown" if size is None else convert_bytes(size) for size in sizes)])
    name = job.args.optimizer if job.make_optimizer is None else "the script's optimizer"
    precision = job.args.mixed_precision or "no"
    title = f"Memory of a rank: {name}, precision {precision}, micro-batches of {describe_batch(job.batch)}"
    return create_ascii_table([*(["stage"] if len(ranks) > 1 else []), *_PARTS], rows, title)


def _messages_table(rank: "SimulatedRank", job: "TrainingJob") -> str:
    rows = [[name, each.count, convert_bytes(each.size)] for name, each in rank.messages.items()]
    count = job.micro_batches
    title = f"Messages of a step of {count} micro-batches" if count > 1 else "Messages of a step of one micro-batch"
    return create_ascii_table(["dimension", "messages", "bytes"], rows, title)
