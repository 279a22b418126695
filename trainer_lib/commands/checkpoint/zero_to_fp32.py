"""`trainer-lib checkpoint zero-to-fp32`: write the whole fp32 weights of a ZeRO checkpoint."""

import argparse
import json
from pathlib import Path

from trainer_lib.foundation.errors import ConfigurationError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options besides the folder of the checkpoint."""
    parser.add_argument("target", metavar="TARGET", type=Path, help="the folder to write to")
    parser.add_argument(
        "-t", "--tag", help='the checkpoint in DIR, such as "global_step100" (default: the one in the file `latest`)'
    )
    parser.add_argument(
        "--exclude-frozen-parameters",
        "--exclude_frozen_parameters",
        action="store_true",
        help="leave out weights that are not trained",
    )
    parser.add_argument(
        "--max-shard-size",
        "--max_shard_size",
        default="10GB",
        metavar="SIZE",
        help="the largest size of a file (default: 10GB)",
    )


def zero_to_fp32(options: argparse.Namespace) -> int:
    """Write the weights of a checkpoint of DeepSpeed's, or of this library's, as `from_pretrained` reads them."""
    from trainer_lib.checkpointing.model_weights import save_weights
    from trainer_lib.checkpointing.third_party.zero_weights import zero_weights

    if not isinstance(options.folder, Path):
        raise ConfigurationError(f"{options.folder} is on another machine. Copy it to this machine first.")
    weights = zero_weights(options.folder, options.tag, options.exclude_frozen_parameters)
    save_weights(weights, options.target, options.max_shard_size, safe=True)
    count = sum(tensor.numel() for tensor in {id(tensor): tensor for tensor in weights.values()}.values())
    facts = {"path": str(options.folder), "target": str(options.target), "tensors": len(weights), "values": count}
    if options.json:
        print(json.dumps(facts, indent=1))
    else:
        print(f"{len(weights)} tensors ({count:,} values) of {options.folder} are in {options.target}, in fp32.")
    return 0
