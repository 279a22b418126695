"""`trainer-lib checkpoint convert`: convert another library's checkpoint into one of this library."""

import argparse
import json
from pathlib import Path

from trainer_lib.foundation.errors import ConfigurationError

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
        "--to", metavar="LIBRARY", help="write for another library: accelerate or transformers (default: for this one)"
    )
    parser.add_argument("--overwrite", action="store_true", help="with --to, replace TARGET if it exists")
    parser.add_argument(
        "--allow-pickle", action="store_true", help="with --to, read what the checkpoint has as pickles"
    )
    parser.add_argument("--max-shard-size", default="10GB", metavar="SIZE", help="of one file (default: 10GB)")


def convert(options: argparse.Namespace) -> int:
    """Convert, and print what was left out."""
    from trainer_lib.checkpointing.third_party.conversion import convert as make

    if not isinstance(options.folder, Path):
        raise ConfigurationError(f"{options.folder} is on another machine. Copy it to this machine first.")
    _check_direction(options)
    if options.to is not None:
        return _export(options)
    found = make(options.folder, options.target, options.epochs, options.without, options.max_shard_size)
    told = {"library": found.library, "step": found.step, "epochs": found.epochs, "left_out": found.left_out}
    if options.json:
        print(json.dumps({"path": str(options.folder), "target": str(options.target), **told}, indent=1))
        return 0
    epochs = "" if found.epochs is None else f", {found.epochs:.10g} epochs"
    print(f"The checkpoint of {found.library} in {options.folder} (step {found.step}{epochs}) is in {options.target}.")
    for name, reason in found.left_out.items():
        print(f"  without {name}: {reason}")
    return 0


def _check_direction(options: argparse.Namespace) -> None:
    """Raise for an option that the other direction has."""
    given = {
        "--epochs": options.epochs is not None,
        "--without": bool(options.without),
        "--overwrite": options.overwrite,
        "--allow-pickle": options.allow_pickle,
    }
    of_exports = ("--overwrite", "--allow-pickle")
    for name, is_given in given.items():
        if is_given and (name in of_exports) != (options.to is not None):
            need = "needs --to" if name in of_exports else "has no effect with --to"
            raise ConfigurationError(f"{name} {need}. `trainer-lib checkpoint convert -h` lists the options.")


def _export(options: argparse.Namespace) -> int:
    """Convert a checkpoint for another library, and print what was written and what was left out."""
    from trainer_lib.checkpointing.format.listing import newest_checkpoint
    from trainer_lib.checkpointing.third_party.export import export

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


def _passes(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be 0 or more")
    return value
