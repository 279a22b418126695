"""The command `trainer-lib merge-weights`: write the whole weights of a checkpoint that holds them in shards."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from trainer_lib.commands.subcommands import add_option, make_parser


def run(arguments: Sequence[str]) -> int:
    """Merge, and say where the weights are."""
    merge_command(merge_command_parser().parse_args(arguments))
    return 0


def merge_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the command, which is added to `subparsers` if you give them."""
    description = (
        "Write the whole weights of a checkpoint of FSDP that holds them in shards (SHARDED_STATE_DICT). "
        "`trainer-lib checkpoint consolidate` does so for checkpoints of this library."
    )
    parser = make_parser("merge-weights", description, subparsers)
    parser.add_argument("checkpoint_directory", help="the folder with the shards, such as pytorch_model_fsdp_0")
    parser.add_argument("output_path", help="the folder to write to")
    add_option(parser, "unsafe_serialization", action="store_true", help="write a .bin instead of safetensors")
    add_option(parser, "remove_checkpoint_dir", action="store_true", help="delete the shards afterwards")
    parser.set_defaults(func=merge_command)
    return parser


def merge_command(args: argparse.Namespace) -> None:
    """Merge what the parsed options name."""
    from trainer_lib.checkpointing.third_party.torch_shards import merge_fsdp_weights

    safe = not args.unsafe_serialization
    merge_fsdp_weights(args.checkpoint_directory, args.output_path, safe, args.remove_checkpoint_dir)
    print(f"The whole weights of {args.checkpoint_directory} are in {args.output_path}.")


def main() -> None:
    """Merge what the command line of this program names."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
