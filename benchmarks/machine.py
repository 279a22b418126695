"""A description of the machine that the figures were measured on."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = (
    "torch", "accelerate", "transformers", "lightning", "pytorch-accelerated", "pytorch-ignite", "skorch", "fastai"
)  # fmt: skip


def describe() -> str:
    """Return processor, system and versions in one line."""
    packages = [f"{name} {number}" for name in PACKAGES if (number := _version(name))]
    return ", ".join([
        *([torch.cuda.get_device_name()] if torch.cuda.is_initialized() else []),
        _processor(),
        f"{os.cpu_count()} cores",
        platform.system(),
        f"Python {platform.python_version()}",
        *packages,
    ])  # fmt: skip


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    names = [line for line in facts.read_text().splitlines() if line.startswith("model name")] if facts.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()
