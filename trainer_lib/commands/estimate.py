"""The command `trainer-lib estimate-memory`: the memory that a model takes, to load it and to train it with Adam."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainer_lib.commands.subcommands import add_option, count, make_parser
from trainer_lib.foundation.byte_sizes import convert_bytes
from trainer_lib.foundation.errors import ConfigurationError, TrainerLibError, unknown
from trainer_lib.foundation.imports import is_timm_available, is_transformers_available, require

if TYPE_CHECKING:
    from torch import nn

_SHARES = {"float32": 1, "float16": 2, "int8": 4, "int4": 8}  # of the size in float32
_PARTS = ["strategy", "precision", "weights", "gradients", "optimizer", "activations", "total", ""]
_BAR = 24  # characters of the longest bar
_HEADERS = ["dtype", "Largest Layer", "Total Size", "Training using Adam (Peak vRAM)"]


def create_empty_model(
    model_name: str, library_name: str | None = None, trust_remote_code: bool = False, access_token: str | None = None
) -> "nn.Module":
    """Return a model of transformers or timm whose weights are shapes without memory.

    Args:
        model_name: The name on the Hugging Face Hub, or a folder with a configuration (for timm: `local-dir:FOLDER`).
        library_name: "transformers" (the default) or "timm".
        trust_remote_code: Whether code of the model on the Hub may run.
        access_token: The token for a private model.
    """
    from trainer_lib.modules.init_on_device import init_empty_weights

    library = library_name or "transformers"
    if library == "timm":
        timm: Any = require("timm")
        with init_empty_weights():
            return timm.create_model(add_timm_hub_prefix(model_name), pretrained=False)
    if library != "transformers":
        raise ConfigurationError(unknown("library_name", library, ["timm", "transformers"]))
    transformers: Any = require("transformers", "transformers")
    options = {"trust_remote_code": trust_remote_code}
    config = transformers.AutoConfig.from_pretrained(model_name, token=access_token, **options)
    classes = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
    with init_empty_weights():
        known = next((kind for kind in classes if kind is not None), None)
        return known(config) if known is not None else transformers.AutoModel.from_config(config, **options)


def add_timm_hub_prefix(model_name: str) -> str:
    """Return a name for timm: a model on the Hub ("owner/name") gets timm's prefix for it, others stay.

    Example:
        >>> add_timm_hub_prefix("timm/resnet50.a1_in1k"), add_timm_hub_prefix("resnet50")
        ('hf-hub:timm/resnet50.a1_in1k', 'resnet50')
    """
    return f"hf-hub:{model_name}" if "/" in model_name and ":" not in model_name else model_name


def read_model(model_name: str, library_name: str | None = None, trust_remote_code: bool = False) -> "nn.Module":
    """Return a model without memory, as `create_empty_model` does, with an error in words for a name that is wrong."""
    try:
        return create_empty_model(model_name, library_name, trust_remote_code)
    except (OSError, ValueError, RuntimeError) as error:  # whatever the library raises for a name that it cannot read
        if isinstance(error, TrainerLibError):
            raise
        raise ConfigurationError(
            f"The configuration of {model_name!r} cannot be read: {str(error).splitlines()[0]} Name a folder "
            "with a config.json, such a file, or a model on the Hugging Face Hub that this machine reaches."
        ) from error


def estimate_training_usage(bytes: int, mixed_precision: str, msamp_config: str | None = None) -> dict[str, int]:
    """Return the bytes of a training with Adam on batches of one sample: model, gradients, optimizer, and a step.

    Args:
        bytes: The size of the model in float32.
        mixed_precision: "float32", "float16" or "bfloat16"; other types are not trained in, and have -1.
        msamp_config: Only `None`.
    """
    if msamp_config is not None:
        raise ConfigurationError(f"msamp_config must be None (got {msamp_config!r}): MS-AMP is for fp8.")
    if mixed_precision == "float32":
        return {"model": bytes, "optimizer": 2 * bytes, "gradients": bytes, "step": 4 * bytes}
    if mixed_precision in ("float16", "bfloat16"):
        return {"model": bytes, "optimizer": 2 * bytes, "gradients": bytes + bytes // 2, "step": 2 * bytes}
    return dict.fromkeys(("model", "optimizer", "gradients", "step"), -1)


def gather_data(args: argparse.Namespace) -> list[list[Any]]:
    """Return a row for each type in `args.dtypes`: its name, the largest layer, the model, and a training, in bytes."""
    return _loading(create_empty_model(args.model_name, args.library_name, args.trust_remote_code), args.dtypes)


def _loading(model: "nn.Module", dtypes: Sequence[str]) -> list[list[Any]]:
    from trainer_lib.modules.weights.tensor_sizes import calculate_maximum_sizes

    total, (largest, _) = calculate_maximum_sizes(model)
    return [
        [dtype, largest // _SHARES[dtype], total // _SHARES[dtype], estimate_training_usage(total, dtype)]
        for dtype in dtypes
    ]


def _training_table(model: "nn.Module", args: argparse.Namespace) -> str:
    """Return the table of a training by strategy and precision, with a bar for each total."""
    from trainer_lib.modules.example_inputs import example_forward
    from trainer_lib.modules.training_memory import training_memory

    forward, batch = example_forward(model, args.batch_size, args.sequence_length)
    memories = list(training_memory(model, forward, args.num_processes))
    most = max(memory.total for memory in memories)
    rows = [
        [
            memory.strategy,
            memory.precision,
            *(convert_bytes(part) for part in (memory.weights, memory.gradients, memory.optimizer)),
            "unknown" if memory.activations is None else convert_bytes(memory.activations),
            convert_bytes(memory.total),
            "█" * max(1, round(_BAR * memory.total / most)),
        ]
        for memory in memories
    ]
    title = f"Training with Adam on each of {args.num_processes} devices, batches of {batch}"
    return create_ascii_table(_PARTS, rows, title)


def create_ascii_table(headers: Sequence[str], rows: Sequence[Sequence[Any]], title: str) -> str:
    """Return a table with lines, its title above it.

    Example:
        >>> print(create_ascii_table(["name"], [["bias"]], "sizes"))
        ┌─────┐
        │sizes│
        ├─────┤
        │name │
        ├─────┤
        │bias │
        └─────┘
    """
    cells = [[str(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    widths[-1] += max(0, len(title) - sum(widths) - len(widths) + 1)
    lines = ["│" + "│".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + "│" for row in cells]
    return "\n".join([
        _rule("┌─┐", widths),
        f"│{title:^{sum(widths) + len(widths) - 1}}│",
        _rule("├┬┤", widths),
        lines[0],
        _rule("├┼┤", widths),
        *lines[1:],
        _rule("└┴┘", widths),
    ])  # fmt: skip


def check_has_model(error: Exception) -> str:
    """Return the library whose error says that it has no such model: "timm", "transformers", or "unknown"."""
    text = str(error)
    if is_timm_available() and isinstance(error, RuntimeError) and "Unknown model" in text:
        return "timm"
    if is_transformers_available() and isinstance(error, OSError) and "does not appear to have a file named" in text:
        return "transformers"
    return "unknown"


def verify_on_hub(repo: str, token: str | None = None) -> Any:
    """Return what the Hugging Face Hub knows of a model; "gated" or "repo" if it is not for you, or is not there."""
    hub: Any = require("huggingface_hub", "hub")
    errors: Any = require("huggingface_hub.utils", "hub")
    try:
        return hub.model_info(repo, token=token)
    except errors.GatedRepoError:
        return "gated"
    except errors.RepositoryNotFoundError:
        return "repo"


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the command, which is added to `subparsers` if you give them."""
    description = "Estimate the memory that a model takes, to load it and to train it with Adam."
    parser = make_parser("estimate-memory", description, subparsers)
    parser.add_argument(
        "model_name", help="a folder with a config.json, such a file, or a name on the Hugging Face Hub"
    )
    add_option(parser, "library_name", choices=["timm", "transformers"], help="default: transformers")
    parser.add_argument("--dtypes", nargs="+", choices=list(_SHARES), default=list(_SHARES), help="default: all")
    add_option(
        parser, "num_processes", type=count, default=1, help="devices to train on; with several, FSDP is listed too"
    )
    add_option(parser, "batch_size", type=count, default=1, help="samples on each device (default: 1)")
    add_option(parser, "sequence_length", type=count, default=512, help="tokens in a sample (default: 512)")
    add_option(parser, "trust_remote_code", action="store_true", help="run the model's own code from the Hub")
    parser.set_defaults(func=estimate_command)
    return parser


def estimate_command(args: argparse.Namespace) -> None:
    """Print the table that the parsed options ask for."""
    model = read_model(args.model_name, args.library_name, args.trust_remote_code)
    rows = [
        [
            dtype,
            convert_bytes(largest),
            convert_bytes(total),
            convert_bytes(max(use.values())) if use["step"] >= 0 else "-",
        ]
        for dtype, largest, total, use in _loading(model, args.dtypes)
    ]
    print(create_ascii_table(_HEADERS, rows, f"Memory Usage for loading `{args.model_name}`"))
    print(_training_table(model, args))


def run(arguments: Sequence[str]) -> int:
    """Print the table."""
    estimate_command(estimate_command_parser().parse_args(arguments))
    return 0


def main() -> None:
    """Print the table that the command line of this program asks for."""
    run(sys.argv[1:])


def _rule(corners: str, widths: Sequence[int]) -> str:
    return corners[0] + corners[1].join("─" * width for width in widths) + corners[2]


if __name__ == "__main__":
    main()
