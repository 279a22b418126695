"""This file is the tests of what an import of the library brings in, and leaves alone."""

import json
import subprocess
import sys
from typing import Any

import pytest

HEAVY = {
    "accelerate",
    "comet_ml",
    "datasets",
    "evaluate",
    "fsspec",
    "mlflow",
    "tensorboard",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "trackio",
    "transformers",
    "wandb",
}

# torch comes first, since only what the library adds to it counts.
PROBE = """
import json, os, signal, sys, threading
import torch

def handlers():
    return [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())]

modules, environment = set(sys.modules), dict(os.environ)
signals, threads = handlers(), threading.active_count()
{statement}
print(json.dumps({{
    "added": sorted(set(sys.modules) - modules),
    "environment": dict(os.environ) == environment,
    "signals": handlers() == signals,
    "threads": threading.active_count() == threads,
    "group": not torch.distributed.is_initialized(),
    "cuda": not torch.cuda.is_initialized(),
}}))
"""


def after(statement: str) -> dict[str, Any]:
    """Run one import statement in a fresh process and tell what it changed."""
    command = [sys.executable, "-W", "error", "-c", PROBE.format(statement=statement)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1, f"an import prints nothing: {done.stdout}"
    return json.loads(done.stdout)


@pytest.mark.parametrize("statement", ["import trainer_lib", "from trainer_lib import Accelerator"])
def test_import_adds_no_heavy_package_and_leaves_the_process_alone(statement: str) -> None:
    seen = after(statement)
    added = {name for name in seen.pop("added") if any(f"{name}.".startswith(f"{heavy}.") for heavy in HEAVY)}
    assert added == set()
    assert seen == dict.fromkeys(seen, True)


def test_bare_import_leaves_the_public_names_for_later() -> None:
    added = after("import trainer_lib")["added"]
    assert "trainer_lib" in added
    assert "trainer_lib.accelerator" not in added
