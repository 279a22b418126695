"""Tests of garbage collection at an interval."""

import gc

from trainer_lib.callbacks import GarbageSchedule
from trainer_lib.events import Run


def test_garbage_is_collected_at_the_interval_only() -> None:
    assert gc.isenabled()
    schedule, run = GarbageSchedule("3 steps"), Run()
    so_far = gc.get_stats()[2]["collections"]
    schedule.on_fit_begin(run)
    assert gc.get_stats()[2]["collections"] == so_far + 1
    assert not gc.isenabled()
    collected: list[int] = []
    for step in range(1, 8):
        run.state.step = step
        before = gc.get_stats()[2]["collections"]
        schedule.on_step_end(run)
        if gc.get_stats()[2]["collections"] > before:
            collected.append(step)
    assert collected == [3, 6]
    schedule.on_fit_end(run)
    assert gc.isenabled()


def test_collection_stays_off_if_it_was_off_before() -> None:
    gc.disable()
    try:
        schedule, run = GarbageSchedule(100), Run()
        schedule.on_fit_begin(run)
        schedule.on_fit_end(run)
        assert not gc.isenabled()
    finally:
        gc.enable()
