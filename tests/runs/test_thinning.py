"""Tests of downsampling: extremes and gaps are kept."""

import numpy as np
import pytest

from trainer_lib.runs.report.downsampling import means, thin


def test_a_short_curve_stays_as_it_is() -> None:
    assert thin([3.0, float("nan"), 1.0], 3).tolist() == [0, 1, 2]
    assert thin([], 10).tolist() == []


@pytest.mark.parametrize("count", [1501, 5000, 99_991, 1_000_000])
def test_the_lowest_the_highest_and_the_ends_of_each_stretch_stay(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    kept = thin(values, 1500)
    assert len(kept) <= 1500
    assert kept.tolist() == sorted(set(kept.tolist()))
    assert {0, count - 1, int(values.argmin()), int(values.argmax())} <= set(kept.tolist())
    length = -(-count // 300)
    for begin in range(0, count, length):
        stretch = values[begin : begin + length]
        inside = values[kept[(kept >= begin) & (kept < begin + length)]]
        assert (inside.min(), inside.max()) == (stretch.min(), stretch.max())
        assert (inside[0], inside[-1]) == (stretch[0], stretch[-1])


def test_nan_leaves_a_gap_and_hides_no_extreme() -> None:
    values = np.zeros(10_000)
    values[[11, 7777]] = np.nan, np.inf
    values[[4321, 8765]] = 5.0, -5.0
    values[9000:] = np.nan
    kept = thin(values, 500)
    assert {11, 7777, 4321, 8765} <= set(kept.tolist())
    last = values[kept[kept >= 9050]]
    assert len(last) > 0
    assert np.isnan(last).all()


def test_means_are_those_of_the_numbers() -> None:
    values = np.array([1.0, np.nan, 3.0, np.inf, np.nan, np.nan, 5.0])
    assert np.array_equal(means(values, 4), [1.0, 3.0, np.nan, 5.0], equal_nan=True)
