"""A step leaves nothing behind: the process holds as many objects late in a run as early in it."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.run_memory import growth, soak
from trainer_lib.callbacks import LambdaCallback

STEPS = 900

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _frozen() -> Iterator[None]:
    gc.freeze()  # only what a run makes is counted
    yield
    gc.unfreeze()


def test_steps_leave_no_objects_behind() -> None:
    # An evaluation adds its metrics to the history of the run.
    assert growth(soak(STEPS, points=18)).objects < STEPS / 3


def test_one_object_a_step_is_noticed() -> None:
    kept: list[Any] = []
    leak = LambdaCallback(on_step_end=lambda run: kept.append([run.state.step]))
    assert growth(soak(STEPS, points=18, callbacks=[leak])).objects > 2 * STEPS / 3
