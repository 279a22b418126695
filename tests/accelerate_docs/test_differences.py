"""The numbers of docs/migrating.md: what Accelerate computes and what this library does."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from tests.accelerate_docs.differences import checkpoints, numbers
from tests.launched import ROOT
from tests.worlds import run_world
from trainer_lib.launchers.fork import run_forked

PAGE = (ROOT / "docs" / "migrating.md").read_text()

OURS = {
    "windows": [1.0, 1.0],
    "learning rate after two updates": 3.0,
    "zero_grad first": 3.5,
    "means gathered": [[0.5, 2.5], [4.5, 6.5], [8.5]],
    "iterable": "DataLoaderShard",
}
ACCELERATES = {
    "windows": [1.0, 0.75],
    "learning rate after two updates": 5.0,
    "zero_grad first": 1.625,
    "means gathered": [[0.5, 2.5], [4.5, 6.5], [8.5, 0.5]],
    "iterable": "DataLoaderDispatcher",
}


def test_our_numbers() -> None:
    for rank in run_world(lambda: numbers("trainer_lib")):
        assert rank == OURS
    assert checkpoints("trainer_lib") == {"next number": 3}


@pytest.mark.slow
def test_accelerates_numbers() -> None:
    pytest.importorskip("accelerate")
    assert run_forked(_quietly, (numbers,), num_processes=2, timeout=100) == [ACCELERATES] * 2
    assert run_forked(_quietly, (checkpoints,), num_processes=1, timeout=100) == [{"next number": 0}]


def _quietly(function: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Run a function with Accelerate, in a process that ends with it: its state is left there."""
    warnings.simplefilter("ignore")
    return function("accelerate")


def test_the_tests_that_the_page_names_are_there() -> None:
    table = PAGE.partition("## Known problems of Accelerate")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(line.split("|")[1]) for line in rows] == list(range(1, 26))
    for row in rows:
        names = re.findall(r"`(tests/[\w/]+\.py)`: `(\w+)`", row)
        assert names or "not in this version" in row, row
        for file, name in names:
            assert f"def {name}(" in (ROOT / file).read_text(), (file, name)
