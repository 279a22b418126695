"""Imports of the library: which packages they load, and that they leave the process alone."""

import importlib
import json
import pkgutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import trainer_lib
from tests.launched import ROOT

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

# Modules that `fit` or a later call imports.
LATER = {
    "numpy.random",
    "packaging",
    "trainer_lib.checkpointing.load.fallback",
    "trainer_lib.checkpointing.third_party",
    "trainer_lib.context_parallel.context_parallel",
    "trainer_lib.tracking.tracker_group",
    "trainer_lib.trainer.data.rank_data_check",
    "trainer_lib.trainer.evaluation.eval_loop",
    "trainer_lib.trainer.metrics.metric_spec",
    "trainer_lib.trainer.fit.session",
}

# torch comes first, since only what the library adds to it counts.
PROBE = """
import json, os, signal, sys, threading
import torch

def handlers():
    return [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())]

modules, environment = set(sys.modules), dict(os.environ)
signals, threads = handlers(), threading.active_count()
for statement in sys.argv[1:]:
    exec(statement)
    print(json.dumps({
        "added": sorted(set(sys.modules) - modules),
        "environment": dict(os.environ) == environment,
        "signals": handlers() == signals,
        "threads": threading.active_count() == threads,
        "group": not torch.distributed.is_initialized(),
        "cuda": not torch.cuda.is_initialized(),
    }))
"""
TRAINER = "from trainer_lib import Trainer"
ACCELERATOR = "from trainer_lib import Accelerator"
# The modules that there may be after a statement and those before it; folders, which hold no code, do not count.
MOST = {"import trainer_lib": 1, TRAINER: 91, ACCELERATOR: 134}
STATEMENTS = [
    "import trainer_lib",
    TRAINER,
    ACCELERATOR,
    "import trainer_lib.utils.dataclasses, trainer_lib.utils.modeling, trainer_lib.utils.operations",
    "import trainer_lib.utils.other, trainer_lib.utils.fsdp_utils, trainer_lib.hooks, trainer_lib.big_modeling",
]


@pytest.mark.launch
def test_imports_add_no_heavy_package_and_leave_the_process_alone() -> None:
    command = [sys.executable, "-W", "error", "-c", PROBE, *STATEMENTS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(STATEMENTS), f"an import prints nothing: {done.stdout}"
    after: dict[str, Any] = dict(zip(STATEMENTS, map(json.loads, lines), strict=True))
    # The public names are left for later.
    assert "trainer_lib" in after["import trainer_lib"]["added"]
    assert "trainer_lib.accelerator" not in after["import trainer_lib"]["added"]
    for statement, most in MOST.items():  # a module costs half a millisecond
        assert len(_files(after[statement]["added"])) <= most, statement
    for statement, seen in after.items():
        absent = HEAVY | LATER if statement in (ACCELERATOR, TRAINER) else HEAVY
        added = {name for name in seen.pop("added") if any(f"{name}.".startswith(f"{heavy}.") for heavy in absent)}
        assert added == set(), statement
        assert seen == dict.fromkeys(seen, True), statement


# What a first step without evaluations can do without: a module costs it half a millisecond.
AFTER_A_STEP = {
    "psutil",
    "sympy",
    "torch._dynamo",
    "trainer_lib.accelerator.megatron_lm",
    "trainer_lib.checkpointing.save.writer",
    "trainer_lib.options.deepspeed",
    "trainer_lib.options.fp8_options",
    "trainer_lib.strategies.deepspeed",
    "trainer_lib.trainer.data.rank_data_check",
    "trainer_lib.trainer.evaluation.eval_loop",
    "trainer_lib.trainer.metrics.metric_spec",
    "trainer_lib.utils",
}
MOST_FOR_A_STEP = 270
FIRST_STEP = """
import json, sys, tempfile, torch
from trainer_lib import Trainer, TrainingArguments
from trainer_lib.callbacks import LambdaCallback

report = LambdaCallback(on_step_end=lambda run: print(json.dumps(sorted(sys.modules))))
data = torch.ones(8, 4), torch.zeros(8, dtype=torch.long)
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(max_steps=1, use_cpu=True, progress_bar=False, save_every="never", output_dir=folder)
    options = {"train_dataset": data, "loss_fn": torch.nn.functional.cross_entropy, "callbacks": [report]}
    Trainer(torch.nn.Linear(4, 2), args, **options).fit()
"""


@pytest.mark.launch
def test_a_first_step_imports_only_what_it_needs() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_STEP], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    imported: list[str] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    assert [name for name in imported if any(f"{name}.".startswith(f"{later}.") for later in AFTER_A_STEP)] == []
    assert len(_files(name for name in imported if name.startswith("trainer_lib"))) <= MOST_FOR_A_STEP


def _files(modules: Iterable[str]) -> list[str]:
    """Return the modules that are files: an empty package costs next to nothing."""
    return [name for name in modules if not (ROOT / name.replace(".", "/")).is_dir()]


def test_no_module_hides_a_public_name() -> None:
    """An import of a module puts it into its package, where a public name of the same name would be looked for."""
    packages = [trainer_lib, *map(importlib.import_module, _lazy_packages())]
    modules = {package: {module.name for module in pkgutil.iter_modules(package.__path__)} for package in packages}
    hidden = [f"{package.__name__}.{name}" for package in packages for name in modules[package] & {*package.__all__}]
    assert len(packages) > 5
    assert hidden == ["trainer_lib.utils.tqdm"]  # a module that can be called, like the function


def _lazy_packages() -> list[str]:
    root = Path(trainer_lib.__file__).parents[1]
    return [".".join(stub.parent.relative_to(root).parts) for stub in (root / "trainer_lib").rglob("*/__init__.pyi")]
