"""The options of `trainer-lib plan`."""

import argparse

from trainer_lib.commands.subcommands import add_option, count, make_parser, option_type
from trainer_lib.foundation.byte_sizes import convert_file_size_to_int
from trainer_lib.options.parallel.pipeline_options import LOOPED, SINGLE

SIZES = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "sp")
_SIZES_HELP = {
    "dp_shard": "ranks that share the weights (FSDP2)",
    "tp": "ranks that split each matrix",
    "pp": "stages of layers",
    "cp": "ranks that share sequences, and exchange keys and values",
    "sp": "ranks that share sequences, and exchange attention heads",
}
_LEVERS = {
    "gradient_checkpointing": "recompute activations in the backward",
    "chunked_cross_entropy": "compute the loss for 512 tokens at a time",
    "activation_offload": "keep activations in CPU memory until the backward",
    "optimizer_in_backward": "update each weight in the backward, and drop its gradient",
}


def plan_command_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    text = (
        "Show the memory and the messages of each rank of a mesh, and suggest a mesh or a memory lever. A script runs "
        "up to its first Trainer.fit(), with the weights of its models as shapes; its TrainingArguments count where "
        "no option is given."
    )
    usage = "trainer-lib plan [options] MODEL | SCRIPT [-- options of the script]"
    parser = make_parser("plan", text, usage=usage)
    parser.add_argument(
        "model", help="a script, a folder with a config.json, such a file, or a name on the Hugging Face Hub"
    )
    parser.add_argument("--world", type=count, help="the number of ranks (default: that of a script's mesh)")
    for name, help_text in _SIZES_HELP.items():
        add_option(parser, name, type=count, help=f"{help_text} (default: 1)")
    add_option(parser, "dp_replicate", type=count, help="copies of the model (default: world / the other sizes)")
    add_option(
        parser,
        "memory",
        type=option_type(convert_file_size_to_int),
        help="suggest a mesh for devices with this memory, such as 80GB",
    )
    precisions = ["no", "bf16", "bf16-true", "fp16"]
    names = ("--mixed_precision", "--mixed-precision", "--precision")
    parser.add_argument(*names, choices=precisions, help="default: bf16, or the script's")
    add_option(parser, "batch_size", type=count, help="samples in a micro-batch of one replica (default: 1)")
    add_option(parser, "sequence_length", type=count, help="tokens in a sample (default: 512, or the script's)")
    names = ("--gradient_accumulation_steps", "--gradient-accumulation-steps", "--micro_batches", "--micro-batches")
    parser.add_argument(*names, type=count, help="micro-batches per optimizer step (default: 1)")
    add_option(parser, "schedule", choices=[*SINGLE, *LOOPED], help="the pipeline schedule (default: 1F1B)")
    add_option(parser, "stages_per_rank", type=count, help="pipeline stages on each rank")
    add_option(
        parser, "cp_comm_strategy", choices=["allgather", "ring"], help="how cp exchanges keys (default: allgather)"
    )
    add_option(parser, "optimizer", help="as in TrainingArguments: adamw, sgd, adamw_8bit, muon … (default: adamw)")
    add_option(parser, "cpu_offload", action="store_true", help="FSDP2 keeps shards in CPU memory")
    for name, help_text in _LEVERS.items():
        add_option(parser, name, action="store_true", help=help_text)
    add_option(
        parser, "gradient_checkpointing_every", type=count, help="recompute activations of every n-th block only"
    )
    add_option(parser, "gradient_checkpointing_policy", help="as in TrainingArguments")
    add_option(parser, "with_weights", action="store_true", help="give a script's models real weights")
    add_option(parser, "library_name", choices=["timm", "transformers"], help="default: transformers")
    add_option(parser, "trust_remote_code", action="store_true", help="run the model's own code from the Hub")
    return parser


def changed_arguments(args: argparse.Namespace) -> dict[str, object]:
    """Return the training arguments that options give."""
    flags = (*_LEVERS, "gradient_checkpointing_every", "optimizer")
    values = ("gradient_checkpointing_policy", "mixed_precision", "gradient_accumulation_steps")
    given = {name: value for name in flags if (value := getattr(args, name, None))}
    given |= {name: value for name in values if (value := getattr(args, name, None)) is not None}
    if args.optimizer is not None:
        given["optimizer_kwargs"] = {}  # those of another one
    if args.optimizer_in_backward:  # which excludes them
        given |= {"max_grad_norm": None, "on_nonfinite": "raise"}
    if args.batch_size is not None:
        given["per_device_train_batch_size"] = args.batch_size
    if args.gradient_accumulation_steps is not None:
        given["global_batch_size"] = None
    return given
