"""The command `trainer-lib env`: versions, devices, packages, configuration and variables, to paste into a report."""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from trainer_lib.commands.subcommands import add_option, make_parser
from trainer_lib.foundation import environment
from trainer_lib.foundation.byte_sizes import convert_bytes
from trainer_lib.foundation.errors import TrainerLibError
from trainer_lib.launchers.settings.config_file import find_config_file, load_config_from_file
from trainer_lib.processes.nvidia_driver import read_gpus

_DISTRIBUTION = "trainer_lib"
_FOR_DEVELOPMENT = re.compile(r"extra == .(bench|dev|examples|test)\b")
_ENGINES = ("accelerate", "deepspeed", "peft", "torchao", "transformers")  # not all of them extras of this library


def run(arguments: Sequence[str]) -> int:
    """Print the report."""
    env_command(env_command_parser().parse_args(arguments))
    return 0


def env_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the command, which is added to `subparsers` if you give them."""
    description = "Print versions, devices, packages, configuration and variables, to paste into a report."
    parser = make_parser("env", description, subparsers)
    add_option(parser, "config_file", help="the configuration to show (default: the one that `launch` uses)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(func=env_command)
    return parser


def env_command(args: argparse.Namespace) -> dict[str, Any]:
    """Print the report that the parsed options ask for, and return it."""
    report = describe(args.config_file)
    if getattr(args, "json", False):
        print(json.dumps(report, indent=1))
    else:
        for name, value in report.items():
            print(f"- {name}:{_shown(value)}")
    return report


def main() -> int:
    """Print the report that the command line of this program asks for."""
    env_command(env_command_parser().parse_args())
    return 0


def describe(config_file: str | None = None) -> dict[str, Any]:
    """Return the report: facts by name.

    Args:
        config_file: The configuration to show; by default the one that counts.
    """
    import psutil

    memory = psutil.virtual_memory()
    return {
        "trainer_lib": _version(_DISTRIBUTION) or "not installed",
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        "torch": _version("torch") or "not installed",
        "Platform": platform.platform(),
        "Program": shutil.which("trainer-lib") or "not in PATH (python -m trainer_lib works too)",
        "CPU cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "Memory": f"{convert_bytes(memory.available)} of {convert_bytes(memory.total)} available",
        "Devices": _devices(),
        "Packages": _packages(),
        "Configuration": _configuration(config_file),
        "Environment variables": environment.settings_of_launchers(),
    }


def _devices() -> list[str]:
    driver, gpus = read_gpus()
    if gpus:
        memory = [f"{convert_bytes(gpu.free)} of {convert_bytes(gpu.memory)} free" for gpu in gpus]
        return [f"{gpu.name}, {free}, driver {driver}" for gpu, free in zip(gpus, memory, strict=True)]
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return ["Apple GPU (mps)"]
    return ["no NVIDIA driver (devices of other vendors are seen by torch only)"]


def _packages() -> dict[str, str]:
    """Return the packages that the extras name, with their versions; nothing is imported."""
    try:
        requirements = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    for_users = [requirement for requirement in requirements if not _FOR_DEVELOPMENT.search(requirement)]
    names = {re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in for_users} | set(_ENGINES)
    names -= {"torch", _DISTRIBUTION, "trainer-lib"}
    versions = {name: _version(name) for name in sorted(names, key=str.lower)}
    absent = ", ".join(name for name, version in versions.items() if version is None)
    return {name: version for name, version in versions.items() if version} | {"not installed": absent or "none"}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _configuration(config_file: str | None) -> dict[str, Any]:
    file = config_file or find_config_file()
    if file is None:
        return {"file": "none (`trainer-lib config` writes one)"}
    try:
        return {"file": str(file), **load_config_from_file(file).to_dict()}
    except TrainerLibError as error:
        if config_file is not None:
            raise
        return {"file": str(file), "error": str(error)}


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        entries: dict[str, Any] = value
        texts = {key: json.dumps(entry) if isinstance(entry, (dict, list)) else entry for key, entry in entries.items()}
        lines = [f"{key}: {text}" for key, text in texts.items()]
        return "".join(f"\n    - {line}" for line in lines) or " none"
    if isinstance(value, list):
        return "".join(f"\n    - {line}" for line in value)
    return f" {value}"


if __name__ == "__main__":
    sys.exit(main())
