"""The examples run as their texts say, and learn the same on one process and on two."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DIGITS = "examples/digits_accelerator.py"
LAUNCH = ["-m", "trainer_lib.commands.main", "launch", "--cpu", "--num_processes", "2"]
EPOCH = re.compile(r"^epoch +(\d+): loss (\S+), accuracy (\S+)$", re.MULTILINE)


def run(*command: str) -> str:
    """Run Python in the root of the repository and return what it printed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def learned(printed: str) -> list[tuple[int, float, float]]:
    """Return epoch, loss and accuracy, line by line."""
    return [(int(epoch), float(loss), float(accuracy)) for epoch, loss, accuracy in EPOCH.findall(printed)]


def test_digits_learn_the_same_on_two_processes() -> None:
    alone = run(DIGITS, "--epochs", "1")
    together = run(*LAUNCH, DIGITS, "--epochs", "1")
    assert "1 process on cpu, 64 images each" in alone
    assert "2 processes on cpu, 32 images each" in together
    ((_, loss, accuracy),) = learned(alone)
    # Sums over halves are rounded elsewhere than sums over the whole, so the last printed digit may differ.
    assert learned(together) == [(1, pytest.approx(loss, abs=2e-4), accuracy)]
    assert accuracy > 0.3  # one in ten is chance


def test_digits_run_in_mixed_precision_and_with_accumulation() -> None:
    printed = run(DIGITS, "--epochs", "1", "--mixed-precision", "bf16", "--accumulation", "2")
    assert "an update every 2 batches, precision bf16" in printed
    ((_, _, accuracy),) = learned(printed)
    assert accuracy > 0.3
