"""Scripts arranged as Accelerate's examples have the same numbers under `accelerate` and under `trainer_lib`.

Each one imports `accelerate`; the runner swaps the name. Losses of all steps, rates, metrics and weights are compared.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

import accelerate  # noqa: F401 # pyright: ignore[reportUnusedImport] - processes that are forked need not import it
import pytest
import torch

from tests.accelerate_scripts import local_data
from tests.accelerate_scripts.record import take_records
from tests.accelerate_scripts.runner import leave_world, run_script
from tests.worlds import run_world

SCRIPTS = Path(__file__).with_name("scripts")
_SWITCH = {"Accelerator(": "Accelerator(scheduler_steps_per_process=True, "}
_TEXT = ("text_classification", "token_weighted_accumulation", "sharded")

Records = list[tuple[str, Any]]


class Example(NamedTuple):
    """A script, its arguments, and what its copy for this library is given."""

    script: str
    arguments: tuple[str, ...] = ()
    replaced: dict[str, str] = {}  # noqa: RUF012 - never changed
    quick: bool = False


EXAMPLES = {
    "nlp": Example("text_classification", replaced=_SWITCH),
    "nlp, bf16": Example("text_classification", ("--mixed_precision", "bf16"), _SWITCH),
    "nlp, steps by hand": Example("text_classification", ("--batch_size", "16"), _SWITCH),
    "tracking": Example("text_classification", ("--with_tracking", "--own_tracker"), _SWITCH),
    "checkpointing": Example("text_classification", ("--checkpointing_steps", "3", "--seedable"), _SWITCH),
    "checkpointing by epoch": Example("text_classification", ("--checkpointing_steps", "epoch"), _SWITCH),
    "cv": Example("image_classification", replaced=_SWITCH, quick=True),
    "cv, bf16": Example("image_classification", ("--mixed_precision", "bf16"), _SWITCH),
    "automatic accumulation": Example("gradient_accumulation", replaced=_SWITCH, quick=True),
    "tokens": Example("token_weighted_accumulation"),
    "cross validation": Example("cross_validation"),
    "early stopping": Example("early_stopping"),
    "local SGD": Example("local_sgd", quick=True),
    "DDP hook": Example("ddp_comm_hook", ("--ddp_comm_hook", "fp16")),
    "PowerSGD": Example("ddp_comm_hook", ("--ddp_comm_hook", "power_sgd")),
    "schedule-free": Example("schedule_free"),
    "FSDP": Example("sharded"),
}


def _run(example: Example, package: str, processes: int, folder: Path) -> Records:
    """Run a script and return what rank 0 recorded."""

    def body() -> Records:
        os.chdir(folder)
        if processes == 1:
            leave_world()
        take_records()
        replaced = {} if package == "accelerate" else example.replaced
        run_script(SCRIPTS / f"{example.script}.py", package, ["--cpu", *example.arguments], replaced)
        return take_records()

    return run_world(body, num_processes=processes, timeout=100)[0]


def _differences(expected: Records, actual: Records, tolerance: float) -> list[str]:
    """Return the entries that differ."""
    assert [name for name, _ in expected] == [name for name, _ in actual]
    found = []
    for index, ((name, left), (_, right)) in enumerate(zip(expected, actual, strict=True)):
        lefts, rights = (value if isinstance(value, dict) else {"": value} for value in (left, right))
        assert list(lefts) == list(rights)
        for key in lefts:
            if isinstance(lefts[key], str):
                same = lefts[key] == rights[key]
            else:
                first, second = torch.as_tensor(lefts[key]), torch.as_tensor(rights[key])
                same = torch.equal(first, second) or torch.allclose(first, second, rtol=tolerance, atol=tolerance / 10)
            if not same:
                found.append(f"{index} {name} {key}: {lefts[key]} != {rights[key]}"[:200])
    return found


CASES = [
    pytest.param(name, processes, marks=[] if EXAMPLES[name].quick else [pytest.mark.slow])
    for name in EXAMPLES
    for processes in (1, 2)
]


@pytest.mark.parametrize(("name", "processes"), CASES)
def test_an_example_keeps_its_numbers(name: str, processes: int, tmp_path: Path) -> None:
    example = EXAMPLES[name]
    if example.script in _TEXT:
        local_data.import_models()
    folders = [tmp_path / package for package in ("accelerate", "trainer_lib")]
    for folder in folders:
        folder.mkdir()
    expected, actual = (_run(example, folder.name, processes, folder) for folder in folders)
    assert any(entry == "loss" for entry, _ in expected)
    assert _differences(expected, actual, 0.0 if processes == 1 else 1e-6) == []


# Where the numbers differ on purpose: a script on some processes, and the first entry that differs.
DIFFERENCES = {
    # Schedules step once per update, not once per process.
    "schedule": (Example("image_classification"), 2, "rate"),
    # A window cut short by the end of the data is divided by the micro-batches it held.
    "window": (Example("gradient_accumulation", ("--images", "72")), 1, "norm"),
}


@pytest.mark.parametrize("name", [pytest.param("schedule", marks=pytest.mark.slow), "window"])
def test_differences_on_purpose_begin_where_the_table_says(name: str, tmp_path: Path) -> None:
    example, processes, entry = DIFFERENCES[name]
    expected, actual = (_run(example, package, processes, tmp_path) for package in ("accelerate", "trainer_lib"))
    assert _differences(expected, actual, 1e-6)[0].split()[1] == entry


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_script_that_skips_batches_resumes_in_mid_epoch_as_without_a_break(processes: int, tmp_path: Path) -> None:
    whole = _run(Example("image_classification", ("--checkpointing_steps", "2")), "trainer_lib", processes, tmp_path)
    resumed = Example("image_classification", ("--resume_from_checkpoint", "step_2"))
    rest = _run(resumed, "trainer_lib", processes, tmp_path)
    assert _differences(whole[4:], rest, 0.0) == []  # two steps of a loss and a rate each
