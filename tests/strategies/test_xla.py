"""Devices of torch_xla, with a recorder in its place: which documented calls are made, and when.

torch_xla cannot be installed beside the torch that this library needs, so what runs here is `recorded_torch_xla`, which
writes down each call and computes on the CPU through gloo. Numbers equal to one process show that the calls are enough
and in order. They do not show that a TPU computes anything.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.launched import PYTHON_PATH, ROOT
from tests.strategies.xla_script import train
from trainer_lib import Accelerator

RECORDER = ROOT / "tests" / "strategies" / "recorded_torch_xla"
SCRIPT = str(ROOT / "tests" / "strategies" / "xla_script.py")
pytestmark = [pytest.mark.launch, pytest.mark.slow]


def start(folder: Path, *command: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run Python beside the recorder."""
    paths = f"{RECORDER}{os.pathsep}{PYTHON_PATH}"
    environment = os.environ | {"PYTHONPATH": paths, "RECORDED_CALLS": str(folder / "calls"), **variables}
    words = [sys.executable, *command, str(folder)]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)


def launch(folder: Path, *options: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run the script by the launcher, beside the recorder."""
    return start(folder, "-m", "trainer_lib", "launch", *options, SCRIPT, **variables)


def calls_of(folder: Path, rank: int) -> list[tuple[str, dict[str, Any]]]:
    return [json.loads(line) for line in (folder / f"calls.{rank}").read_text().splitlines()]


def assert_close(figures: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("losses", "norms", "outputs"):
        assert figures[name][: len(expected[name])] == pytest.approx(expected[name], rel=1e-6), name
    for name, values in expected["weights"].items():
        assert figures["weights"][name] == pytest.approx(values, rel=1e-4, abs=1e-7), name


def test_two_ranks_compute_the_numbers_of_one_process(tmp_path: Path) -> None:
    done = launch(tmp_path, "--tpu", "--num_processes", "2")
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    expected = train(Accelerator(cpu=True, gradient_accumulation_steps=2), tmp_path / "alone")
    for figures in ranks:
        assert figures["kind"] == "XLA"
        assert (figures["ranks"], figures["flags"], figures["last"]) == ([0, 1], [False, True], 1)
        assert_close(figures, expected)
    assert ranks[0]["weights"] == ranks[1]["weights"]

    recorded = [calls_of(tmp_path, rank) for rank in (0, 1)]
    names = [name for name, _ in recorded[0]]
    # Ranks whose graphs differ would wait for each other: the same calls, and collectives alone in a graph.
    apart = ("sync", "manual_seed")  # torch gives each process a seed of its own
    assert [call for call in recorded[0] if call[0] not in apart] == [
        call for call in recorded[1] if call[0] not in apart
    ]
    for position, name in enumerate(names):
        if name in ("all_reduce", "all_gather", "collective_broadcast"):
            assert (names[position - 1], names[position + 1]) == ("sync", "sync")
    # The tied weight is sent once. One message holds all gradients of an update, and which of them a rank has.
    assert names.count("collective_broadcast") == 7
    gradients = sum(parameter.numel() + 1 for parameter in _tied().parameters())
    messages = [facts["shapes"] for name, facts in recorded[0] if name == "all_reduce"]
    assert messages.count([[gradients]]) == len(expected["norms"])
    assert names.count("manual_seed") == 2  # where the world forms, and by set_seed


def test_one_device_needs_no_launcher_and_no_collective(tmp_path: Path) -> None:
    done = start(tmp_path, SCRIPT, PJRT_DEVICE="CPU")
    assert done.returncode == 0, done.stderr
    expected = train(Accelerator(cpu=True, gradient_accumulation_steps=2), tmp_path / "alone")
    figures = json.loads((tmp_path / "0.json").read_text())
    assert figures["kind"] == "XLA"
    assert_close(figures, expected)
    assert {name for name, _ in calls_of(tmp_path, 0)} == {"sync", "manual_seed"}


NOTEBOOK = """
import json
import sys
from pathlib import Path
from tests.strategies.xla_script import train
from trainer_lib import Accelerator, notebook_launcher

def function(folder):
    return train(Accelerator(gradient_accumulation_steps=2), Path(folder))

ranks = notebook_launcher(function, (sys.argv[1],), num_processes=2)
Path(sys.argv[1], "0.json").write_text(json.dumps(ranks[0]))
"""


def test_a_notebook_starts_processes_too(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(NOTEBOOK)
    done = start(tmp_path, str(script), PJRT_DEVICE="TPU")
    assert done.returncode == 0, done.stderr
    expected = train(Accelerator(cpu=True, gradient_accumulation_steps=2), tmp_path / "alone")
    figures = json.loads((tmp_path / "0.json").read_text())
    assert figures["kind"] == "XLA"
    assert_close(figures, expected)


REFUSED = """
import torch
from trainer_lib import Accelerator, FullyShardedDataParallelPlugin
from trainer_lib.foundation.device_types import device_name, generator_state, generator_type, set_generator_state
from trainer_lib.foundation.errors import TrainerLibError
from trainer_lib.foundation.imports import is_torch_xla_available
from trainer_lib.precision import choose_precision
from trainer_lib.state import AcceleratorState

def joined():
    accelerator = Accelerator()
    with accelerator.join_uneven_inputs([accelerator.prepare(torch.nn.Linear(1, 1))]):
        pass

for refused in (
    lambda: Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin()),
    lambda: choose_precision("fp16", "xla"),
    joined,
):
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        refused()
    except TrainerLibError as error:
        print("REFUSED", error)
set_generator_state(generator_type(), generator_state("xla"))
print("ANSWERS", device_name("xla"), is_torch_xla_available(check_is_tpu=True), is_torch_xla_available(False, True))
"""


def test_what_does_not_work_there_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(REFUSED)
    done = start(tmp_path, str(script), PJRT_DEVICE="TPU")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("REFUSED", "ANSWERS"))]
    assert "fsdp_plugin=FullyShardedDataParallelPlugin does not work on devices of torch_xla" in lines[0]
    assert "mixed_precision='fp16' does not work on xla devices" in lines[1]
    assert "join_uneven_inputs does not work on devices of torch_xla" in lines[2]
    assert lines[3:] == ["ANSWERS TPU True False"]
    numbers = [facts for name, facts in calls_of(tmp_path, 0) if name == "set_rng_state"]
    assert numbers == [{"seed": 2**64 - 7}]


@pytest.mark.parametrize(
    ("options", "variables", "message"),
    [
        (["--tpu"], {}, "--tpu needs --num_processes, the number of chips"),
        (["--tpu", "--cpu", "--num_processes", "2"], {}, "tpu (--tpu) and cpu (--cpu) contradict each other."),
        (["--num_processes", "1"], {"PJRT_DEVICE": "TPU", "RECORDED_DEVICES": "2"}, "gives this process 2 devices"),
    ],
)
def test_launches_that_cannot_be(options: list[str], variables: dict[str, str], message: str, tmp_path: Path) -> None:
    done = launch(tmp_path, *options, **variables)
    assert done.returncode != 0
    assert message in done.stderr


def _tied() -> nn.Module:
    from tests.strategies.xla_script import Tied

    with torch.random.fork_rng():
        return Tied()
