"""The numbers of docs/migrating.md: what Accelerate computes and what this library does."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.accelerate_docs.differences import checkpoints, numbers
from tests.launched import ROOT
from tests.worlds import run_world

PAGE = (ROOT / "docs" / "migrating.md").read_text()

OURS = {
    "windows": [1.0, 1.0],
    "learning rate after two updates": 3.0,
    "zero_grad first": 3.5,
    "means gathered": "gather_for_metrics needs one row per sample",
    "iterable": "DataLoaderShard",
}
ACCELERATES = {
    "windows": [1.0, 0.75],
    "learning rate after two updates": 5.0,
    "zero_grad first": 1.625,
    "means gathered": [[0.5, 2.5], [4.5, 6.5], [8.5, 5.0]],
    "iterable": "DataLoaderDispatcher",
}


def test_our_numbers() -> None:
    for rank in run_world(lambda: numbers("trainer_lib")):
        assert rank == OURS
    assert checkpoints("trainer_lib") == {"next number": 3}


@pytest.mark.slow
@pytest.mark.launch
def test_accelerates_numbers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    script = str(Path(__file__).with_name("differences.py"))
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script, "numbers"]
    ranks = _printed(tmp_path, *two)
    assert len(ranks) == 2
    for rank in ranks:
        assert rank == ACCELERATES
    assert _printed(tmp_path, script, "checkpoints") == [{"next number": 0}]


def _printed(folder: Path, *command: str) -> list[dict[str, Any]]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    done = subprocess.run(
        [sys.executable, *command, "accelerate"],
        env=variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    return [json.loads(line) for line in re.findall(r"\{.*?\}", done.stdout)]


def test_the_tests_that_the_page_names_are_there() -> None:
    table = PAGE.partition("## Known problems of Accelerate")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(line.split("|")[1]) for line in rows] == list(range(1, 26))
    for row in rows:
        names = re.findall(r"`(tests/[\w/]+\.py)`: `(\w+)`", row)
        assert names or "not in this version" in row, row
        for file, name in names:
            assert f"def {name}(" in (ROOT / file).read_text(), (file, name)
