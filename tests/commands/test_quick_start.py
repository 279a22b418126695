"""Commands that only look, and the help of all commands, start without torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.tasks import arguments, points, trainer
from trainer_lib.commands.main import COMMANDS

HEAVY = ("torch", "numpy", "transformers", "datasets", "accelerate", "huggingface_hub", "fsspec", "http", "asyncio")

# One process runs all commands, and reports which of these modules were there after each.
PROBE = """
import contextlib, io, json, sys
from trainer_lib.commands.main import main

heavy = json.loads(sys.argv[1])
for command in json.loads(sys.argv[2]):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(command)
    print(json.dumps([command, code, printed.getvalue(), sorted(set(heavy) & set(sys.modules))]))
"""


@pytest.mark.launch
def test_commands_that_look_and_all_help_import_nothing_heavy(tmp_path: Path) -> None:
    trainer(arguments(output_dir=tmp_path, max_steps=2), eval_dataset=points(16)).fit()
    helps = [[name, "--help"] for name in COMMANDS if name != "completion"]
    commands = {
        ("--help",): "launch           start a script",
        ("launch", "--help"): "processes:",
        ("launch", "--help", "all"): "--shutdown_timeout",
        ("env",): "- Python: ",
        ("env", "--json"): '"torch"',
        ("runs", str(tmp_path)): "finished",
        ("checkpoint", "list", str(tmp_path)): "checkpoint-00000002",
        ("checkpoint", "inspect", str(tmp_path)): "complete, step 2",
        ("checkpoint", "verify", str(tmp_path)): "whole",
        ("completion",): "complete -o default -F",
    } | {tuple(command): "--help" for command in helps if command[0] != "launch"}
    probe = [sys.executable, "-c", PROBE, json.dumps(HEAVY), json.dumps([*commands])]
    environment = {**os.environ, "TRAINER_LIB_HOME": str(tmp_path), "HF_HOME": str(tmp_path)}
    done = subprocess.run(probe, capture_output=True, text=True, check=True, timeout=60, env=environment)
    for line, (command, text) in zip(done.stdout.splitlines(), commands.items(), strict=True):
        name, code, printed, imported = json.loads(line)
        assert (tuple(name), code, imported) == (command, 0, []), printed
        assert text in printed, command


LAUNCH = """
import json, sys
from trainer_lib.commands.main import main

assert main(["launch", "--cpu", "--num_processes", "2", "--no_python", "true"]) == 0
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.slow
@pytest.mark.launch
def test_a_launch_on_the_cpu_imports_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", LAUNCH], capture_output=True, text=True, check=True, timeout=120)
    imported = set(json.loads(done.stdout))
    assert imported.isdisjoint(HEAVY)
    assert imported.isdisjoint({"trainer_lib.trainer", "trainer_lib.accelerator", "trainer_lib.strategies"})


@pytest.mark.launch
def test_python_m_runs_the_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trainer_lib", "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    assert "launch           start a script" in done.stdout
