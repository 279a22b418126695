"""The command `trainer-lib plan`: what each rank of a mesh holds and sends, before there are any."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from trainer_lib.commands.estimate import create_ascii_table, read_model
from trainer_lib.commands.subcommands import add_option, make_parser
from trainer_lib.foundation.byte_sizes import convert_bytes, convert_file_size_to_int
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.launchers.setting import COUNT

if TYPE_CHECKING:
    from trainer_lib.commands.plan.simulated_rank import SimulatedRank
    from trainer_lib.parallelism_config import ParallelismConfig

_MOST_TP = 8  # ranks of one machine
_PARTS = ("weights", "gradients", "optimizer", "activations", "total")


def plan_command_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = make_parser("plan", "Show the memory and the messages of each rank of a mesh, and suggest a mesh.")
    parser.add_argument("model", help="a folder with a config.json, such a file, or a name on the Hugging Face Hub")
    parser.add_argument("--world", type=_count, required=True, help="the number of ranks")
    for name, text in (
        ("tp", "ranks that split each matrix"),
        ("dp_shard", "ranks that share the weights (FSDP2)"),
        ("pp", "stages of layers: not simulated yet, must be 1"),
        ("cp", "ranks that share sequences: not simulated yet, must be 1"),
    ):
        add_option(parser, name, type=_count, default=1, help=f"{text} (default: 1)")
    add_option(parser, "dp_replicate", type=_count, help="copies of the model (default: what is left of the world)")
    add_option(parser, "memory", type=convert_file_size_to_int, help="memory of a device, such as 80GB: suggest a mesh")
    add_option(parser, "precision", choices=["no", "bf16", "bf16-true"], default="bf16", help="default: bf16")
    add_option(parser, "batch_size", type=_count, default=1, help="samples of a replica (default: 1)")
    add_option(parser, "sequence_length", type=_count, default=512, help="tokens of a sample (default: 512)")
    add_option(parser, "library_name", choices=["timm", "transformers"], help="default: transformers")
    add_option(parser, "trust_remote_code", action="store_true", help="let code of the model on the Hub run")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Print the tables."""
    args = plan_command_parser().parse_args(arguments)
    config = _config(args)
    rank = _simulated(args, config)
    print(config.describe() if config.active_mesh_dims else "a world of one rank")
    print(_memory_table(rank, f"Memory of a rank, Adam, precision {args.precision}"))
    if rank.messages:
        print(_messages_table(rank))
    if not rank.has_counted_messages:
        print("The backward of this model cannot be simulated: messages of tp are those of a part of the step.")
    if args.memory is not None:
        if rank.memory.activations is None:
            raise ConfigurationError(
                "No mesh can be suggested: a forward of this model cannot be computed on shapes alone, so its "
                "activations are unknown. Leave --memory out, and measure a batch with `trainer-lib check SCRIPT`."
            )
        print(_suggestion(args))
    return 0


def first_that_fits(
    configs: "Iterator[ParallelismConfig]", total: "Callable[[ParallelismConfig], int | None]", memory: int
) -> "ParallelismConfig | None":
    """Return the first mesh whose ranks need at most `memory` bytes.

    Args:
        configs: The meshes, those with the fewest messages first.
        total: Returns the bytes of a rank; `None` if the model does not fit the mesh.
        memory: The bytes of a device.
    """
    for config in configs:
        size = total(config)
        if size is not None and size <= memory:
            return config
    return None


def _config(args: argparse.Namespace) -> "ParallelismConfig":
    from trainer_lib.parallelism_config import ParallelismConfig

    others = args.tp * args.dp_shard * args.pp * args.cp
    replicas = args.dp_replicate or max(1, args.world // others)
    config = ParallelismConfig(
        dp_replicate_size=replicas, dp_shard_size=args.dp_shard, tp_size=args.tp, pp_size=args.pp, cp_size=args.cp
    )
    config.check_world(args.world)
    return config


def _simulated(args: argparse.Namespace, config: "ParallelismConfig") -> "SimulatedRank":
    from trainer_lib.commands.plan.simulated_rank import simulate
    from trainer_lib.modules.example_inputs import example_forward

    model = read_model(args.model, args.library_name, args.trust_remote_code)
    forward, _ = example_forward(model, args.batch_size, args.sequence_length)
    return simulate(model, forward, config, args.precision)


def _memory_table(rank: "SimulatedRank", title: str) -> str:
    sizes = [getattr(rank.memory, part) for part in _PARTS]
    return create_ascii_table(_PARTS, [["unknown" if size is None else convert_bytes(size) for size in sizes]], title)


def _messages_table(rank: "SimulatedRank") -> str:
    rows = [[name, each.count, convert_bytes(each.size)] for name, each in rank.messages.items()]
    return create_ascii_table(["dimension", "messages", "bytes"], rows, "Messages of a step of one micro-batch")


def _suggestion(args: argparse.Namespace) -> str:
    totals: dict[str, int] = {}

    def total(config: "ParallelismConfig") -> int | None:
        try:
            memory = _simulated(args, config).memory
        except ConfigurationError:  # the model does not divide by tp_size, or has no plan
            return None
        totals[config.describe()] = memory.total
        return memory.total

    config = first_that_fits(_candidates(args.world), total, args.memory)
    given = convert_bytes(args.memory)
    if config is None:
        return f"No mesh of dp_replicate, dp_shard and tp fits into {given}. Use more ranks, or smaller batches."
    sizes = ", ".join(f"{name}_size={size}" for name, size in config.sizes.items() if size > 1) or "one rank"
    return f"Suggested for {given}: {sizes} ({convert_bytes(totals[config.describe()])} on each rank)."


def _candidates(world: int) -> "Iterator[ParallelismConfig]":
    """Yield the meshes of a world, those with the fewest messages first: copies, shards, then split matrices."""
    from trainer_lib.parallelism_config import ParallelismConfig

    for tp in (tp for tp in (1, 2, 4, _MOST_TP) if world % tp == 0):
        rest = world // tp
        for shards in (shards for shards in range(1, rest + 1) if rest % shards == 0):
            yield ParallelismConfig(dp_replicate_size=rest // shards, dp_shard_size=shards, tp_size=tp)


def _count(text: str) -> int:
    return COUNT.check("The value", text)
