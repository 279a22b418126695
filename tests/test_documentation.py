"""What the documentation shows runs as it stands there: the examples of docstrings, and the scripts of the pages."""

import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import trainer_lib
from trainer_lib.testing import reset_states

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(trainer_lib.__path__, "trainer_lib.")
    if module.name != "trainer_lib.launchers.worker"  # a script, which runs when it is imported
)
# A script names itself in its first line; the commands that start it are in the next block of the page.
SCRIPT = re.compile(r"```python\n# (\w+\.py)\n(.*?)```.*?```bash\n(.*?)```", re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = importlib.import_module(name)
    examples = [example for example in doctest.DocTestFinder(exclude_empty=True).find(module) if example.examples]
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for example in examples:
        reset_states()
        example.globs.update({"torch": torch, "Accelerator": trainer_lib.Accelerator})
        runner.run(example)
    assert runner.summarize(verbose=False).failed == 0


@pytest.mark.parametrize(
    "page", [page for page in PAGES if SCRIPT.search(page.read_text())], ids=lambda page: page.name
)
def test_scripts_of_pages(page: Path, tmp_path: Path) -> None:
    (tmp_path / "trainer-lib").write_text(f'#!/bin/sh\nexec {sys.executable} -m trainer_lib.commands.main "$@"\n')
    (tmp_path / "trainer-lib").chmod(0o755)
    paths = {"PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for name, script, commands in SCRIPT.findall(page.read_text()):
        (tmp_path / name).write_text(script)
        for command in commands.splitlines():
            done = subprocess.run(
                ["sh", "-c", command],
                cwd=tmp_path,
                env=os.environ | paths | {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                check=False,
                timeout=100,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
