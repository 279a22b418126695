"""Deliberate one-line breaks of the library, and which test goes red for each: `python -m tests.mutants`."""

import argparse
import compileall
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
MEMORY, ROOM = Path("/dev/shm"), 1 << 30
LIMIT, LIMIT_OF_ALL = 240, 3600  # seconds for the tests of one mutant, and for the whole suite
# A test that hangs is ended after 100 seconds, by pytest's faulthandler.
FLAGS = ("-x", "-q", "-rfE", "-p", "no:cacheprovider", "-p", "no:randomly", "--no-header", "-ofaulthandler_timeout=100")


@dataclass(frozen=True)
class Mutant:
    """One break of the library: text of a file, what replaces it, and the tests most likely to go red."""

    name: str
    area: str
    file: str
    before: str
    after: str
    tests: Sequence[str]

    def broken(self, tree: Path) -> str:
        """Return the text of the file with the break in it."""
        text = (tree / self.file).read_text(encoding="utf-8")
        if text.count(self.before) != 1:
            raise SystemExit(f"{self.name!r}: `before` occurs {text.count(self.before)} times in {self.file}.")
        return text.replace(self.before, self.after)

    def check(self, tree: Path) -> None:
        """Raise unless the break fits, and the files and functions of its tests are there."""
        self.broken(tree)
        for path, *names in (test.split("::") for test in self.tests):
            text = (tree / path).read_text(encoding="utf-8") if (tree / path).is_file() else ""
            if not (tree / path).exists() or any(not re.search(rf"(def|class) {name}\b", text) for name in names):
                raise SystemExit(f"{self.name!r}: there is no test {'::'.join([path, *names])} in {tree}.")


@dataclass(frozen=True)
class Result:
    """Which test went red: its id, "collection error" or "hang"; else what came instead."""

    area: str
    is_caught: bool
    red: str


def read_mutants(only: str | None) -> list[Mutant]:
    """Return the mutants of tests/mutants.toml, or those of one name or area."""
    mutants = [Mutant(**entry) for entry in tomllib.loads((ROOT / "tests/mutants.toml").read_text("utf-8"))["mutant"]]
    chosen = [mutant for mutant in mutants if only in (None, mutant.name, mutant.area)]
    if not chosen or len({mutant.name for mutant in mutants}) < len(mutants):
        raise SystemExit(f"tests/mutants.toml has no mutant and no area {only!r}, or has one name twice.")
    return chosen


def copy_tree(tree: Path, to: Path) -> None:
    """Copy what git tracks or does not ignore, as it is in the working tree, and compile the library."""
    names = subprocess.check_output(["git", "-C", tree, "ls-files", "-zco", "--exclude-standard"], text=True)
    for name in names.rstrip("\0").split("\0"):
        if os.path.lexists(tree / name):  # else it is deleted, and git has not been told
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, to / name, follow_symlinks=False)
    for folder in ("trainer_lib", "callbacks"):
        compileall.compile_dir(to / folder, quiet=2)


def end_processes(copy: Path) -> None:
    """Kill the processes that still run in a copy, those in sessions of their own included."""
    for process in psutil.process_iter(["environ"]):
        if (process.info["environ"] or {}).get("PYTHONPATH", "").split(os.pathsep)[0] == str(copy):
            process.kill()


def run_tests(copy: Path, tests: Sequence[str], marker: str | None, limit: float) -> tuple[bool, str]:
    """Run tests in a copy; return whether one went red, and which."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTEST_DEBUG_TEMPROOT": str(copy.parent)}
    command = [sys.executable, "-u", "-m", "pytest", *FLAGS, *(["-m", marker] if marker else []), *tests]
    with (copy.parent / "output").open("w+") as output:
        process = subprocess.Popen(command, cwd=copy, env=environment, stdout=output, stderr=output, process_group=0)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        end_processes(copy)
        output.seek(0)
        text = output.read()
    if red := re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", text, re.MULTILINE):
        return True, red[1]
    if code in (0, 5):
        return False, "all green" if code == 0 else "the marker leaves out all tests"
    if "Timeout (" in text:
        return True, "hang"
    if code is None:
        return False, "not through in time"
    if code == 4 and "ImportError while loading conftest" not in text:  # a wrong marker, say
        raise SystemExit(f"pytest refuses its arguments:\n{text}")
    return True, "collection error" if code in (2, 4) else f"exit code {code}"


def check_tests(mutants: Sequence[Mutant], base: Path) -> None:
    """Raise unless the tests can be collected without a break: an environment that is broken looks like red tests."""
    files = sorted({test.partition("::")[0] for mutant in mutants for test in mutant.tests})
    is_red, why = run_tests(base, ["--collect-only", *files], None, LIMIT_OF_ALL)
    if is_red or why != "all green":
        output = (base.parent / "output").read_text(encoding="utf-8")
        raise SystemExit(f"{output}\nThe tests do not run on the unbroken tree either: {why}.")


def try_mutant(mutant: Mutant, base: Path, marker: str | None, whole: bool) -> Result:
    """Break a copy of the library, run the tests of the mutant in it, and return which went red."""
    with tempfile.TemporaryDirectory(dir=base.parent, prefix="m", ignore_cleanup_errors=True) as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(base, copy, symlinks=True)
        (copy / mutant.file).write_text(mutant.broken(copy), encoding="utf-8")
        is_caught, red, ends = False, "", time.monotonic() + LIMIT
        for test in mutant.tests:  # one after the other: pytest would bring them into an order of its own
            if not is_caught:
                is_caught, red = run_tests(copy, [test], marker, ends - time.monotonic())
        if whole and not is_caught:
            is_caught, red = run_tests(copy, [], marker, LIMIT_OF_ALL)
    result = Result(mutant.area, is_caught, red)
    print("caught  " if is_caught else "SURVIVED", f"{mutant.area}: {mutant.name}: {red}", flush=True)
    return result


def main() -> int:
    """Try the mutants, print a table by area, and return 1 if one survived."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout to break copies of")
    parser.add_argument("--marker", help="an expression for pytest's -m, such as 'not slow'")
    parser.add_argument("--whole", action="store_true", help="run all tests on what survives its own")
    parser.add_argument("--jobs", type=int, default=2, help="how many mutants to try at a time")
    parser.add_argument("--only", help="the name of a mutant, or an area")
    parser.add_argument("--json", type=Path, help="where to write the red test of each mutant")
    parser.add_argument("--list", action="store_true", help="only check that each break fits, and run no test")
    options = parser.parse_args()
    mutants = read_mutants(options.only)
    for mutant in mutants:
        mutant.check(options.tree)
    if options.list:
        print("\n".join(f"{mutant.area}: {mutant.name}" for mutant in mutants), f"\n{len(mutants)} mutants fit.")
        return 0
    memory = MEMORY if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM else None
    with tempfile.TemporaryDirectory(dir=memory, prefix="mutants-") as folder:
        copy_tree(options.tree.resolve(), base := Path(folder) / "base")
        check_tests(mutants, base)
        try_each = partial(try_mutant, base=base, marker=options.marker, whole=options.whole)
        with ThreadPoolExecutor(options.jobs) as pool:
            results = dict(zip((mutant.name for mutant in mutants), pool.map(try_each, mutants), strict=True))
    if options.json is not None:
        reports = {name: asdict(result) for name, result in results.items()}
        options.json.write_text(json.dumps(reports, indent=1) + "\n", encoding="utf-8")
    print(f"\n{'area':26} caught survived")
    for area in [*dict.fromkeys(mutant.area for mutant in mutants), "all"]:
        caught = [result.is_caught for result in results.values() if area in (result.area, "all")]
        print(f"{area:26} {sum(caught):6} {len(caught) - sum(caught):8}")
    return int(not all(result.is_caught for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
