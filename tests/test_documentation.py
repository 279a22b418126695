"""What the documentation shows runs as it stands there: the examples of docstrings, and the scripts of the pages."""

import doctest
import gc
import importlib
import os
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import trainer_lib
from tests.launched import PYTHON_PATH
from tests.worlds import run_world
from trainer_lib.commands.launch.launch_parser import parse
from trainer_lib.launchers import ProcessFailedError
from trainer_lib.launchers.fork import rank_variables
from trainer_lib.processes.ports import free_port
from trainer_lib.testing import reset_states

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(trainer_lib.__path__, "trainer_lib.")
    if module.name != "trainer_lib.launchers.bootstrap"  # a script, which runs when it is imported
)
# A script names itself in its first line; the commands that start it are in the next block of the page.
SCRIPT = re.compile(r"```python\n# (\w+\.py)\n(.*?)```.*?```bash\n(.*?)```", re.DOTALL)
PAGES = [
    page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if SCRIPT.search(page.read_text())
]
# The commands of the first page a user reads, and those that need a shell: two launchers at once, an exit code.
TYPED = ["README.md", "multi_node.md", "stopping.md"]


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    """Let examples that collect garbage collect their own, not all that the process has imported."""
    gc.freeze()
    yield
    gc.unfreeze()


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_of_pages(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each as its commands say, on as many processes, but without a new interpreter."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    monkeypatch.chdir(tmp_path)
    for name, script, commands in SCRIPT.findall(page.read_text()):
        Path(name).write_text(script)
        assert name in commands
        if " &\n" in commands:
            continue  # several launchers at once, which are started below
        for command in commands.splitlines():
            start, _, expected = command.partition("; test $? = ")
            if name not in start:
                subprocess.run(["sh", "-c", command], check=True)
                continue
            processes, words = processes_and_script(shlex.split(start, comments=True))
            try:
                codes = run_world(run_script, (words, processes > 0), max(processes, 1), timeout=100)
            except ProcessFailedError as error:
                if not expected:
                    raise
                codes = [error.exit_code]  # a script that ends its process, as a hang does
            assert set(codes) == {int(expected or 0)}, command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_of_pages_print_the_result_of_a_fit_in_the_main_process_alone(page: Path) -> None:
    for name, script, _ in SCRIPT.findall(page.read_text()):
        assert not re.search(r"^print\(.*\.fit\(", script, re.MULTILINE), name


def processes_and_script(words: list[str]) -> tuple[int, list[str]]:
    """Return how many processes the launcher starts for a command (0: it is not used), and the script's own words."""
    if words[0] == "python":
        return 0, words[1:]
    assert words[:2] == ["trainer-lib", "launch"]
    options, script = parse(words[2:])
    changed = vars(options).items() - vars(parse(["script.py"])[0]).items()
    assert {option for option, _ in changed} <= {"cpu", "num_processes", "script"}  # other options need the launcher
    return options.num_processes, script


def run_script(words: list[str], is_launched: bool) -> int:
    """Run a script in this process, and return its exit code."""
    warnings.resetwarnings()  # those of a script are for people
    if not is_launched:
        for name in rank_variables(0, 1, 0, "").keys() - {"ACCELERATE_USE_CPU"}:
            del os.environ[name]
    sys.argv = words
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.parametrize(
    ("name", "script", "commands"),
    [
        pytest.param(*found, id=f"{page.name}, {found[0]}")
        for page in PAGES
        if page.name in TYPED
        for found in SCRIPT.findall(page.read_text())
    ],
)
def test_commands_of_pages(name: str, script: str, commands: str, tmp_path: Path) -> None:
    """As a user types them into a shell."""
    (tmp_path / "trainer-lib").write_text(f'#!/bin/sh\nexec {sys.executable} -m trainer_lib.commands.main "$@"\n')
    (tmp_path / "trainer-lib").chmod(0o755)
    paths = {"PYTHONPATH": PYTHON_PATH, "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    (tmp_path / name).write_text(script)
    commands = commands.replace("29511", str(free_port()))
    for command in [commands] if " &\n" in commands else commands.splitlines():
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


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "tutorials").glob("*.md")), ids=lambda page: page.name)
def test_tutorials_quote_the_examples_that_run(page: Path) -> None:
    text = page.read_text()
    examples = {name: (ROOT / name).read_text() for name in re.findall(r"(?:`|\")(examples/\w+\.py)", text)}
    assert examples
    blocks = re.findall(r"```(?:python| \{ \.python \})\n(.*?)```", text, re.DOTALL)  # ruff formats the first kind
    quotes = [block for block in blocks if not block.startswith("--8<--")]
    assert quotes
    for quote in quotes:
        indented = [textwrap.indent(quote, " " * spaces) for spaces in (0, 4, 8)]
        assert any(each in example for each in indented for example in examples.values()), quote


def test_the_list_of_examples_is_complete() -> None:
    listed = (ROOT / "examples" / "README.md").read_text()
    shown = [path for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".ipynb")]
    missing = [path.name for path in shown if path.parent.name != "metrics" and f"{path.name}`" not in listed]
    assert shown
    assert missing == []


@pytest.mark.parametrize("package", ["trainer_lib", "trainer_lib.callbacks"])
def test_each_public_name_is_in_the_reference(package: str) -> None:
    public = importlib.import_module(package)
    missing = [name for name in public.__all__ if not name.startswith("_") and not _is_in_the_reference(public, name)]
    assert public.__all__
    assert missing == []


def _is_in_the_reference(package: ModuleType, name: str) -> bool:
    return any(
        directive == f"{package.__name__}.{name}" or _shows(directive, options, name, getattr(package, name))
        for page in (ROOT / "docs" / "reference").glob("*.md")
        for directive, options in re.findall(r"^::: (\S+)\n((?: .*\n)*)", page.read_text(), re.MULTILINE)
    )


def _shows(directive: str, options: str, name: str, value: object) -> bool:
    """Return whether a directive for a module shows a name: all that is defined in it, or its `members`."""
    if "members:" in options.replace("inherited_members:", ""):
        is_listed = re.search(rf"\b{name}\b", options) is not None
        return is_listed and getattr(importlib.import_module(directive), name, None) is value
    module = getattr(value, "__module__", "")
    return module == directive or ("show_submodules" in options and module.startswith(f"{directive}."))
