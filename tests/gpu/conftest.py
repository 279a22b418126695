"""Tests that need GPUs: skipped with the reason unless `make test-gpu` or `make test-gpus` asks for them.

They run by themselves: most other tests fork, and a fork of a process that has used a GPU cannot train.
"""

from pathlib import Path

import pytest
import torch

_FOLDER = Path(__file__).parent
_NEEDED = {"gpu": 1, "gpus": 2}  # by marker


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine, or this way to start the tests, has no GPUs for."""
    chosen = str(config.getoption("markexpr")).split()
    for item in items:
        if _FOLDER not in item.path.parents:
            continue
        # Warnings of torch that only GPUs show are none of the library's errors.
        item.add_marker(pytest.mark.filterwarnings("default"))
        marker = next(name for name in _NEEDED if item.get_closest_marker(name))
        reason = _reason(marker, chosen)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def _reason(marker: str, chosen: list[str]) -> str:
    target = f"make test-{marker}"
    if marker not in chosen:
        return f"runs by itself, on a machine with GPUs: {target}"
    if torch.cuda.device_count() < _NEEDED[marker]:
        return f"{target} needs {_NEEDED[marker]} GPU(s), and this machine has {torch.cuda.device_count()}"
    return ""
