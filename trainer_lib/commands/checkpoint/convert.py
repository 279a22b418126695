"""`trainer-lib checkpoint convert`: convert another library's checkpoint into one of this library."""

import argparse
import json
from pathlib import Path
from typing import Any

from trainer_lib.commands.subcommands import count
from trainer_lib.foundation.errors import ConfigurationError, unknown

_PARTS = ("optimizer", "scheduler", "scaler", "random_states")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options besides the folder to convert."""
    parser.add_argument("target", metavar="TARGET", help="the folder to make")
    parser.add_argument(
        "--epochs",
        type=_passes,
        metavar="N",
        help="passes over the data so far, such as 1.4, if the checkpoint does not say",
    )
    parser.add_argument(
        "--without", action="append", default=[], choices=_PARTS, metavar="PART", help=f"leave out {', '.join(_PARTS)}"
    )
    parser.add_argument(
        "--to",
        metavar="LIBRARY",
        help="write for another library: accelerate, transformers, or megatron (default: for this one)",
    )
    parser.add_argument("--overwrite", action="store_true", help="with --to, replace TARGET if it exists")
    parser.add_argument("--allow-pickle", action="store_true", help="with --to, read pickles in the checkpoint")
    for name, kind in (("--tensor-parallel", "tensor"), ("--pipeline-parallel", "pipeline")):
        parser.add_argument(name, type=count, metavar="N", help=f"with --to megatron, for N {kind} parallel ranks")
    parser.add_argument(
        "--transformer-impl",
        choices=("transformer_engine", "local"),
        help="with --to megatron, the layers that read it (default: transformer_engine)",
    )
    parser.add_argument(
        "--vocab-size",
        type=count,
        metavar="N",
        help="for a checkpoint of Megatron-LM, the vocabulary without padding",
    )
    parser.add_argument("--max-shard-size", metavar="SIZE", help="the largest size of a file (default: 10GB)")


def convert(options: argparse.Namespace) -> int:
    """Convert, and print what was left out."""
    from trainer_lib.checkpointing.third_party.conversion import convert as make

    if not isinstance(options.folder, Path):
        raise ConfigurationError(f"{options.folder} is on another machine. Copy it to this machine first.")
    _check_direction(options)
    if options.to == "megatron":
        return _to_megatron(options)
    if options.to is None and _is_megatron(options.folder):
        return _from_megatron(options)
    if options.to is not None:
        return _export(options)
    found = make(options.folder, options.target, options.epochs, options.without, _shard_size(options))
    facts = {"library": found.library, "step": found.step, "epochs": found.epochs, "left_out": found.left_out}
    if options.json:
        print(json.dumps({"path": str(options.folder), "target": str(options.target), **facts}, indent=1))
        return 0
    epochs = "" if found.epochs is None else f", {found.epochs:.10g} epoch{'' if found.epochs == 1 else 's'}"
    print(f"The checkpoint of {found.library} in {options.folder} (step {found.step}{epochs}) is in {options.target}.")
    for name, reason in found.left_out.items():
        print(f"  without {name}: {reason}")
    return 0


def _check_direction(options: argparse.Namespace) -> None:
    """Raise for an unknown library, and for an option that this conversion does not have."""
    from trainer_lib.checkpointing.third_party.export_checkpoint import LAYOUTS

    if options.to not in (None, "megatron", *LAYOUTS):
        raise ConfigurationError(unknown("library", options.to, ["megatron", *LAYOUTS]))
    exports, is_to_megatron = options.to is not None, options.to == "megatron"
    is_from_megatron = not exports and _is_megatron(options.folder)
    if options.vocab_size is not None and not is_from_megatron:
        raise ConfigurationError(f"--vocab-size needs a checkpoint of Megatron-LM (got {options.folder}).")
    only_weights = "has no effect with a checkpoint of Megatron-LM, of which weights alone are converted"
    for is_refused, reason, names in (
        (not is_to_megatron, "needs --to megatron", ("tensor_parallel", "pipeline_parallel", "transformer_impl")),
        (not exports, "needs --to", ("overwrite", "allow_pickle")),
        (exports, "has no effect with --to", ("epochs", "without", "max_shard_size")),
        (is_to_megatron, "has no effect with --to megatron", ("overwrite", "allow_pickle")),
        (is_from_megatron, only_weights, ("epochs", "without")),
    ):
        for name in names:
            if is_refused and _is_set(getattr(options, name)):
                raise ConfigurationError(
                    f"--{name.replace('_', '-')} {reason}. `trainer-lib checkpoint convert -h` lists the options."
                )


def _is_set(value: Any) -> bool:
    return value is not False and value not in (None, [])


def _is_megatron(folder: Path) -> bool:
    from trainer_lib.checkpointing.third_party.megatron_lm.weight_conversion import is_megatron

    return is_megatron(folder)


def _to_megatron(options: argparse.Namespace) -> int:
    """Convert a folder of transformers for Megatron-LM, and print what was written."""
    from trainer_lib.checkpointing.third_party.megatron_lm.weight_conversion import Layout, from_transformers

    layout = Layout(options.tensor_parallel or 1, options.pipeline_parallel or 1, options.transformer_impl != "local")
    written = from_transformers(options.folder, options.target, layout)
    return _print_result(options, {"to": "megatron", "written": written}, "is in {} for Megatron-LM", written, {})


def _from_megatron(options: argparse.Namespace) -> int:
    """Convert a checkpoint of Megatron-LM into a folder of transformers, and print what was left out."""
    from trainer_lib.checkpointing.third_party.megatron_lm.weight_conversion import to_transformers

    left_out = to_transformers(options.folder, options.target, options.vocab_size, _shard_size(options))
    return _print_result(
        options, {"library": "Megatron-LM", "left_out": left_out}, "of Megatron-LM is in {}: `from_pretrained` and "
        "`load_checkpoint_in_model` read it", [], left_out,
    )  # fmt: skip


def _print_result(
    options: argparse.Namespace, facts: dict[str, Any], sentence: str, written: list[str], left_out: dict[str, str]
) -> int:  # fmt: skip
    if options.json:
        print(json.dumps({"path": str(options.folder), "target": str(options.target), **facts}, indent=1))
        return 0
    print(f"The checkpoint {options.folder} {sentence.format(options.target)}.")
    if written:
        print(f"  written: {', '.join(written)}")
    for name, reason in left_out.items():
        print(f"  without {name}: {reason}")
    return 0


def _export(options: argparse.Namespace) -> int:
    """Convert a checkpoint for another library, and print what was written and what was left out."""
    from trainer_lib.checkpointing.format.listing import newest_checkpoint
    from trainer_lib.checkpointing.third_party.export_checkpoint import export

    source = Path(str(newest_checkpoint(options.folder).path))
    result = export(source, options.target, options.to, options.overwrite, options.allow_pickle)
    facts = {"step": result.step, "written": result.written, "left_out": result.left_out}
    if options.json:
        print(json.dumps({"path": str(source), "target": str(options.target), "to": options.to, **facts}, indent=1))
        return 0
    print(f"The checkpoint {source} (step {result.step}) is in {options.target} for {options.to}.")
    print(f"  written: {', '.join(result.written)}")
    for name, reason in result.left_out.items():
        print(f"  without {name}: {reason}")
    return 0


def _shard_size(options: argparse.Namespace) -> str:
    return options.max_shard_size or "10GB"


def _passes(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be 0 or more")
    return value
