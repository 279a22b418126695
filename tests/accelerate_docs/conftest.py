"""The scripts of this folder choose no device: they run on the CPU, in a folder of their own."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Have `Accelerator()` choose the CPU, and give relative paths a folder."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.chdir(tmp_path)
