"""The command `trainer-lib checkpoint`: list, verify, inspect, prune, consolidate and convert checkpoints."""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from trainer_lib.commands.checkpoint import convert, zero_to_fp32
from trainer_lib.commands.subcommands import Parser, count
from trainer_lib.filesystem.remote_paths import AnyPath, path_at
from trainer_lib.foundation.byte_sizes import convert_bytes
from trainer_lib.foundation.errors import CheckpointError

_SETTLED_AFTER = 600.0  # seconds without a change after which no save is in progress in a folder

_EPILOG = """\
DIR is a checkpoint, or a folder of checkpoints, a run's folder, or a folder of runs; or the URL of one, such as
s3://bucket/runs.
exit codes: 0 for success; 1 if something is damaged or missing; 2 for a wrong option.
"""


def run(arguments: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    options = _parser().parse_args(list(arguments))
    return options.verb(options)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="trainer-lib checkpoint",
        description="List, verify, inspect, prune, consolidate and convert checkpoints.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(
        required=True, metavar="list | verify | inspect | prune | consolidate | convert | zero-to-fp32"
    )
    _add(verbs, "list", _list, "list checkpoints: step, size, age, metrics, why each is kept")
    verify = _add(verbs, "verify", _verify, "read every byte of the newest checkpoint, and name what is damaged")
    verify.add_argument("--all", action="store_true", help="verify all checkpoints, not only the newest")
    _add(verbs, "inspect", _inspect, "show the contents of a checkpoint (or of the newest)")
    prune = _add(verbs, "prune", _prune, "delete old checkpoints; never the newest, the best, or the last whole one")
    prune.add_argument("--keep-last", type=count, required=True, metavar="N", help="how many of the newest to keep")
    prune.add_argument("--damaged", action="store_true", help="also delete checkpoints that were renamed as damaged")
    consolidate = _add(verbs, "consolidate", _consolidate, "write the unsharded weights to a folder")
    consolidate.add_argument("target", metavar="TARGET", type=_path, help="the folder to write to")
    consolidate.add_argument(
        "--max-shard-size", default="10GB", metavar="SIZE", help="the largest size of a file (default: 10GB)"
    )
    convert.add_options(
        _add(verbs, "convert", convert.convert, "convert a checkpoint from or to Hugging Face's Trainer or Accelerate")
    )
    zero_to_fp32.add_options(
        _add(
            verbs,
            "zero-to-fp32",
            zero_to_fp32.zero_to_fp32,
            "write the whole fp32 weights of a ZeRO checkpoint, of DeepSpeed's or this library's",
            aliases=["zero_to_fp32"],
        )
    )
    return parser


def _add(
    verbs: Any, name: str, verb: Callable[[argparse.Namespace], int], what: str, aliases: Sequence[str] = ()
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, aliases=aliases, help=what, description=f"{what[0].upper()}{what[1:]}.")
    parser.add_argument("folder", metavar="DIR", type=_path)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(verb=verb)
    return parser


def _path(text: str) -> AnyPath:
    return path_at(text).absolute()


def _list(options: argparse.Namespace) -> int:
    groups = _groups(options.folder)
    checkpoints = [checkpoint for group in groups for checkpoint in group]
    if options.json:
        _print_json([_facts(checkpoint) for checkpoint in checkpoints])
    else:
        for group in groups:
            print(group[0].path.parent)
            _print_table([_row(checkpoint) for checkpoint in group])
    return int(any(checkpoint.status == "damaged" for checkpoint in checkpoints))


def _verify(options: argparse.Namespace) -> int:
    from trainer_lib.checkpointing.load.find import verify_state

    present = [[entry for entry in group if not entry.is_aside] for group in _groups(options.folder)]
    chosen = [checkpoint for group in present for checkpoint in (group if options.all else group[-1:])]
    results: list[dict[str, Any]] = []
    for checkpoint in chosen:
        began, problem = time.monotonic(), None
        try:
            verify_state(checkpoint.path)
        except CheckpointError as error:
            problem = str(error)
        seconds = time.monotonic() - began
        path, is_whole = checkpoint.path, problem is None
        results.append({"path": str(path), "is_whole": is_whole, "problem": problem, "seconds": seconds})
        results[-1]["nonfinite"] = checkpoint.nonfinite
        if not options.json:
            faults = f"; not finite: {', '.join(checkpoint.nonfinite)}" if checkpoint.nonfinite else ""
            result = f"{convert_bytes(checkpoint.size)} in {seconds:.1f} s{faults}" if is_whole else problem
            print(f"{'whole  ' if is_whole else 'DAMAGED'}  {path}: {result}")
    if options.json:
        _print_json(results)
    return int(not results or not all(result["is_whole"] for result in results))


def _inspect(options: argparse.Namespace) -> int:
    from trainer_lib.checkpointing.format.listing import newest_checkpoint

    one = newest_checkpoint(options.folder)
    if one.manifest is None:
        raise CheckpointError(one.problem)
    if options.json:
        _print_json({**_facts(one), "manifest": one.manifest.content()})
        return int(one.problem is not None)
    print(f"{one.path}\n  {one.status}, step {one.step}, {convert_bytes(one.size)}, {_age(one.saved)} ago")
    _print_run(one)
    saved_by = f"{one.manifest.world_size} process{'' if one.manifest.world_size == 1 else 'es'}"
    print(f"  saved by {saved_by}, precision {one.manifest.precision}")
    print(f"  with {', '.join(f'{name} {version}' for name, version in one.manifest.versions.items())}")
    print(f"  parts: {', '.join(one.manifest.parts)}")
    for name, facts in one.manifest.files.items():
        print(f"  {convert_bytes(facts['size']):>12}  {name}")
    return int(one.problem is not None)


def _print_run(one: Any) -> None:
    manifest = one.manifest
    counts = [("epoch", manifest.epoch), ("samples", manifest.samples), ("items of the loss", manifest.items)]
    counted = [f"{name} {value:,.10g}" for name, value in counts if value is not None]
    of_run = [] if manifest.run_id is None else [f"of the run {manifest.run_id}"]
    if of_run or counted:
        print(f"  {', '.join([*of_run, *counted])}")
    if manifest.origin is not None:
        print(f"  imported from {manifest.origin['library']}")
    if manifest.reasons:
        print(f"  saved for: {', '.join(manifest.reasons)}")
    for name, value in one.metrics.items():
        print(f"  {name} {value:.6g}")
    for name, value in (manifest.arguments or {}).items():
        if value is not None:
            print(f"  {name} = {value!r}")


def _prune(options: argparse.Namespace) -> int:
    from trainer_lib.checkpointing.format.listing import checkpoints_by_run, debris_in, prunable
    from trainer_lib.checkpointing.save.retention import delete_state

    groups = checkpoints_by_run(options.folder, may_be_empty=bool(debris_in(options.folder)))
    damaged = [checkpoint for group in groups for checkpoint in group if checkpoint.is_aside]
    deleted = [checkpoint for group in groups for checkpoint in prunable(group, options.keep_last)]
    deleted += damaged if options.damaged else []
    for checkpoint in deleted:
        delete_state(checkpoint.path)
        if not options.json:
            print(f"deleted {checkpoint.path} ({convert_bytes(checkpoint.size)})")
    for checkpoint in damaged if not (options.damaged or options.json) else []:
        size = convert_bytes(checkpoint.size)
        print(f"kept {checkpoint.path} ({size}), which was set aside as damaged: --damaged deletes it")
    _prune_debris(options)
    if options.json:
        _print_json([_facts(checkpoint) for checkpoint in deleted])
    return 0


def _prune_debris(options: argparse.Namespace) -> None:
    """Delete what killed saves left, unless a program trains there or a save may be in progress."""
    from trainer_lib.checkpointing.format.listing import debris_in
    from trainer_lib.checkpointing.storage.storage import storage_of
    from trainer_lib.runs.run_lease import is_leased

    for path in debris_in(options.folder):
        sizes = storage_of(path).sizes()
        written = [(path / name).stat().st_mtime for name in sizes] or [path.stat().st_mtime]
        is_recent = time.time() - max(written) < _SETTLED_AFTER
        size = convert_bytes(sum(sizes.values()))
        if is_recent or is_leased(path.parent.parent):
            message = f"kept {path} ({size}): a save may be in progress"
        else:
            storage_of(path.parent).delete_debris([path])
            message = f"deleted {path} ({size}), left by an interrupted save"
        if not options.json:
            print(message)


def _consolidate(options: argparse.Namespace) -> int:
    from trainer_lib.checkpointing.format.listing import newest_checkpoint
    from trainer_lib.checkpointing.model_weights import checked_weights, save_weights
    from trainer_lib.tensor_files.weights_index import read_weights

    one = newest_checkpoint(options.folder)
    with checked_weights(one.path) as files:
        save_weights(read_weights(files), options.target, options.max_shard_size, safe=True)
    if options.json:
        _print_json({"path": str(one.path), "target": str(options.target)})
    else:
        print(f"The weights in {one.path} are in {options.target}.")
    return 0


def _groups(folder: AnyPath) -> Any:
    from trainer_lib.checkpointing.format.listing import checkpoints_by_run

    return checkpoints_by_run(folder)


def _facts(one: Any) -> dict[str, Any]:
    return {
        "path": str(one.path),
        "run_id": one.run_id,
        "step": one.step,
        **_counts(one.manifest),
        "size": one.size,
        "age": time.time() - one.saved,
        "saved": one.saved,
        "status": one.status,
        "problem": one.problem,
        "nonfinite": one.nonfinite,
        "metrics": dict(one.metrics),
        "kept": list(one.kept),
        "world_size": None if one.manifest is None else one.manifest.world_size,
    }


def _counts(manifest: Any) -> dict[str, Any]:
    names = ("epoch", "samples", "items", "reasons")
    return {name: None if manifest is None else getattr(manifest, name) for name in names}


def _row(one: Any) -> list[str]:
    metrics = "  ".join(f"{name} {value:.4g}" for name, value in one.metrics.items() if isinstance(value, float))
    step = "" if one.step is None else f"step {one.step}"
    why = [] if one.manifest is None else [f"saved for: {', '.join(one.manifest.reasons)}"] * bool(one.manifest.reasons)
    faults = [f"not finite: {', '.join(one.nonfinite)}"] if one.nonfinite else []
    notes = one.problem if one.status == "damaged" else "; ".join([*filter(None, [", ".join(one.kept)]), *faults, *why])
    return [one.path.name, step, convert_bytes(one.size), f"{_age(one.saved)} ago", one.status, notes or "", metrics]


def _print_table(rows: list[list[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _print_json(value: Any) -> None:
    from trainer_lib.tracking.delivery.plain_values import json_safe

    print(json.dumps(json_safe(value), indent=1))  # JSON has neither NaN nor Inf


def _age(moment: float) -> str:
    seconds = max(time.time() - moment, 0.0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
