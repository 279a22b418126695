"""A training that is interrupted and resumed equals the one that was not, bit by bit."""

from pathlib import Path
from typing import Any

import pytest

from tests.accelerator.training import Training, assert_bitwise
from tests.worlds import run_world

STEPS = 12  # a pass has 7 batches on one process and 4 on two


TRAININGS = {
    "plain": Training(),
    "workers": Training(num_workers=1, noise=False),
    "fp16": Training(precision="fp16"),
    "bf16, clipped": Training(precision="bf16", clips=True),
    "bf16-true, clipped": Training(precision="bf16-true", clips=True),
    "accumulated": Training(accumulation=3),
    "accumulated in fp16, clipped": Training(accumulation=3, precision="fp16", clips=True),
    "accumulated and weighted": Training(accumulation=3, weighted=True),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_one_process(name: str, tmp_path: Path) -> None:
    training = TRAININGS[name]
    whole = training.run(STEPS)
    stops = {at: tmp_path / str(at) for at in ((3, 8) if training.num_workers else (1, 3, 6, 7, 8, 11))}
    saving = training.run(STEPS, save=stops)
    assert_bitwise(saving, whole)  # to save disturbs nothing
    for at, folder in stops.items():
        resumed = training.run(STEPS, load=folder)
        assert len(resumed["losses"]) == STEPS - at
        assert_bitwise(resumed, whole)


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("plain", "workers", "fp16")),
        "bf16-true, clipped",
        "accumulated and weighted",
    ],
)
def test_two_processes(name: str, tmp_path: Path) -> None:
    training = TRAININGS[name]
    stops = {at: tmp_path / str(at) for at in (2, 5)}

    def all_runs() -> list[Any]:
        return [training.run(STEPS), training.run(STEPS, save=stops)]

    runs = run_world(all_runs, timeout=60)
    for at, folder in stops.items():
        resumed = run_world(training.run, (STEPS, None, folder), timeout=60)
        for (whole, saving), again in zip(runs, resumed, strict=True):
            assert_bitwise(saving, whole)
            assert len(again["losses"]) == STEPS - at
            assert_bitwise(again, whole)
