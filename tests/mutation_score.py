"""The mutation score of the core: a seeded random sample of small breaks, and how many the tests notice.

`python -m tests.mutation_score` makes the mutants listed by tests/mutation_score.toml, one at a time, in a copy of the
tree, and runs the tests named there until one fails. A run that was interrupted continues where it stopped.
"""

import argparse
import ast
import gc
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import zip_longest
from pathlib import Path

import psutil

from tests.mutants import FLAGS, MEMORY, ROOM, ROOT, copy_tree, end_processes

LIST = ROOT / "tests" / "mutation_score.toml"
RESULTS = ROOT / "build" / "mutation_score.jsonl"
SEED = 1
LIMIT = 200  # seconds for the tests of a mutant: an endless loop is noticed too
# Imported once, before each mutant gets a process of its own: packages of others only.
_QUIETLY = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # of plugins among them
_IMPORTED_FIRST = ("torch", "transformers", "pytest", "torch._dynamo", "torch.distributed.tensor")
_COMPARED: Mapping[type, str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_COMPUTED: Mapping[type, str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "//",
}
_SAID = ("_logger", "add_note", "warn", "warning", "warning_once", "debug", "info", "shown", "described")


@dataclass(frozen=True)
class Change:
    """A piece of a file, by its place, and what replaces it."""

    file: str
    start: int
    end: int
    before: str
    after: str
    line: int
    kind: str

    @property
    def name(self) -> str:
        """A name that stays the same as long as the line is where it is."""
        return f"{self.file}:{self.line}: {self.kind}: {_short(self.before)} -> {_short(self.after)}"


def _short(text: str) -> str:
    return " ".join(text.split())[:70] or "(nothing)"


class Changes(ast.NodeVisitor):
    """All changes that a file allows; what only words a message, names a type or decorates is left alone."""

    def __init__(self, file: str, text: str) -> None:
        self.found: list[Change] = []
        self._file, self._text = file, text.encode()
        self._lines = [0]
        for line in self._text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def _add(self, node: ast.expr | ast.stmt, after: str, kind: str) -> None:
        start, end = self._span(node)
        before = self._text[start:end].decode()
        if before != after:
            self.found.append(Change(self._file, start, end, before, after, node.lineno, kind))

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._lines[node.lineno - 1] + node.col_offset, self._lines[node.end_lineno - 1] + node.end_col_offset

    def _source(self, node: ast.expr | ast.stmt) -> str:
        start, end = self._span(node)
        return self._text[start:end].decode()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Leave decorators, defaults' types and the docstring alone."""
        for default in [*node.args.defaults, *(each for each in node.args.kw_defaults if each)]:
            self.visit(default)
        self._body(node.body)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Leave bases, decorators and the docstring alone."""
        self._body(node.body)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Leave the type alone."""
        if node.value is not None:
            self._deleted(node, isinstance(node.target, ast.Attribute))
            self.visit(node.value)

    def visit_Import(self, node: ast.Import) -> None:
        """Leave imports alone: without one nothing runs."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Leave these alone too."""

    def visit_Raise(self, node: ast.Raise) -> None:
        """Delete it; leave the message alone."""
        self._add(node, "pass", "deleted statement")

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave assertions alone: they are for type checkers."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave texts alone."""

    def visit_Expr(self, node: ast.Expr) -> None:
        """Delete a call."""
        if isinstance(node.value, ast.Call | ast.Await) and not self._says(node.value):
            self._add(node, "pass", "deleted statement")
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Delete what is stored on an object or in a mapping."""
        self._deleted(node, all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets))
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Delete it."""
        self._deleted(node, True)
        self.visit(node.value)

    def _deleted(self, node: ast.stmt, is_seen: bool) -> None:
        if is_seen:
            self._add(node, "pass", "deleted statement")

    def visit_Call(self, node: ast.Call) -> None:
        """Leave what is said alone."""
        if not self._says(node):
            self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Turn a comparison into its neighbour."""
        if len(node.ops) == 1 and (other := _COMPARED.get(type(node.ops[0]))):
            self._add(node, f"{self._source(node.left)} {other} {self._source(node.comparators[0])}", "comparison")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Compute something else."""
        other = _COMPUTED.get(type(node.op))
        if other and not (_is_text(node.left) or _is_text(node.right)):
            self._add(node, f"{self._source(node.left)} {other} {self._source(node.right)}", "operator")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Turn `and` into `or`, and the other way round."""
        other = " or " if isinstance(node.op, ast.And) else " and "
        self._add(node, f"({other.join(f'({self._source(value)})' for value in node.values)})", "and, or")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Drop a `not` or a minus."""
        if isinstance(node.op, ast.Not | ast.USub):
            self._add(node, f"({self._source(node.operand)})", "dropped sign")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        """Take the other branch."""
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self._add(node.test, f"not ({self._source(node.test)})", "condition")
            self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        """Return `None` instead of a value."""
        if node.value is not None and not isinstance(node.value, ast.Constant):
            self._add(node, "return None", "returned value")
            self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Take another number, or the other truth."""
        if isinstance(node.value, bool):
            self._add(node, str(not node.value), "constant")
        elif _is_number(node):
            self._add(node, f"({self._source(node)} + 1)", "constant")

    def _says(self, node: ast.expr) -> bool:
        function = node.func if isinstance(node, ast.Call) else node
        names = {
            part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "") for part in ast.walk(function)
        }
        return not names.isdisjoint(_SAID)

    def _body(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self.visit(statement)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool)


def all_changes(tree: Path, file: str) -> list[Change]:
    """Return the changes of a file that leave it valid Python."""
    text = (tree / file).read_text(encoding="utf-8")
    visitor = Changes(file, text)
    visitor.visit(ast.parse(text))
    return [change for change in visitor.found if _compiles(changed(text, change))]


def changed(text: str, change: Change) -> str:
    """Return the text of a file with the change in it."""
    data = text.encode()
    return (data[: change.start] + change.after.encode() + data[change.end :]).decode()


def _compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec")
    except SyntaxError:
        return False
    return True


@dataclass(frozen=True)
class Area:
    """Modules of the core, the tests that protect them, and how many mutants to draw."""

    name: str
    files: Sequence[str]
    tests: Sequence[str]
    mutants: int

    def sample(self, tree: Path, seed: int) -> list[Change]:
        """Return a random sample of the changes of all files, the same for a seed."""
        changes = [change for file in self.files for change in all_changes(tree, file)]
        order = random.Random(f"{seed} {self.name}")
        return order.sample(changes, min(self.mutants, len(changes)))


def read_areas(only: str | None) -> list[Area]:
    """Return the areas of tests/mutation_score.toml, or one."""
    areas = [Area(**entry) for entry in tomllib.loads(LIST.read_text("utf-8"))["area"]]
    if not (chosen := [area for area in areas if only in (None, area.name)]):
        raise SystemExit(f"tests/mutation_score.toml has no area {only!r}, it has {[area.name for area in areas]}.")
    named = [path for area in chosen for path in (*area.files, *area.tests)]
    if missing := [path for path in named if not (ROOT / path).exists()]:
        raise SystemExit(f"tests/mutation_score.toml names what is not there: {', '.join(missing)}.")
    return chosen


def run_tests(copy: Path, tests: Sequence[str], marker: str, limit: float) -> tuple[str, float]:
    """Run tests in a process of its own; return what failed first ("" if nothing did), and the seconds."""
    begin = time.monotonic()
    output = copy.parent / "output"
    if (pid := os.fork()) == 0:
        _test_here(copy, tests, marker, output)
    try:
        code = _wait(pid, limit)
    finally:
        _end_session(pid)
        end_processes(copy)
    seconds = time.monotonic() - begin
    if code == 0:
        return "", seconds
    red = re.search(r"^(?:FAILED|ERROR) (\S+)", output.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    return "hang" if code is None else red[1] if red else f"exit code {code}", seconds


def _test_here(copy: Path, tests: Sequence[str], marker: str, output: Path) -> None:
    """Run pytest in this process, which ends with its exit code."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy), "PYTEST_DEBUG_TEMPROOT": str(copy.parent)}
    sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "trainer_lib")]:
        del sys.modules[name]
    code = 3
    try:
        code = int(import_module("pytest").main([*FLAGS, *_QUIETLY, "-m", marker, *tests]))
    except BaseException:  # the process ends here without a traceback of its own
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        os._exit(code)


def _wait(pid: int, limit: float) -> int | None:
    ends = time.monotonic() + limit
    has_ended = False
    try:
        while time.monotonic() < ends:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if has_ended := bool(ended):
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        return None
    finally:  # at an interrupt too
        if not has_ended:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _end_session(leader: int) -> None:
    """Kill what a test session left running: forked worlds, above all of a session that was killed."""
    for pid in psutil.pids():
        with suppress(OSError):
            if os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)


def try_change(area: Area, change: Change, copy: Path, options: argparse.Namespace) -> dict[str, object]:
    """Break the copy, run the tests of the area, mend the copy, and return which test failed ("" if none did)."""
    path = copy / change.file
    text = path.read_text(encoding="utf-8")
    try:
        _write(path, changed(text, change))
        red, seconds = run_tests(copy, area.tests, options.marker, options.limit)
    finally:
        _write(path, text)
    print("killed  " if red else "SURVIVED", change.name, red, f"{seconds:.0f} s", flush=True)
    return {"name": change.name, "red": red, "seconds": round(seconds, 1), **asdict(change)}


def _write(path: Path, text: str) -> None:
    """Write a module so that no compiled form of it is taken for this one."""
    path.write_text(text, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()


def read_results(path: Path) -> dict[str, dict[str, object]]:
    """Return the results of earlier runs, by the name of the mutant."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {result["name"]: result for result in map(json.loads, lines)}


def table(
    areas: Sequence[Area], results: Mapping[str, Mapping[str, object]], drawn: Mapping[str, Sequence[Change]]
) -> str:
    """Return the score of each area as a Markdown table, and the survivors."""
    lines = ["| area | mutants | killed | score |", "|---|---|---|---|"]
    survivors: list[str] = []
    killed_of_all = tried_of_all = 0
    for area in areas:
        tried = [results[change.name] for change in drawn[area.name] if change.name in results]
        alive = [str(result["name"]) for result in tried if not result["red"]]
        survivors += alive
        killed = len(tried) - len(alive)
        killed_of_all, tried_of_all = killed_of_all + killed, tried_of_all + len(tried)
        lines.append(f"| {area.name} | {len(tried)} | {killed} | {killed / max(len(tried), 1):.0%} |")
    lines.append(f"| all | {tried_of_all} | {killed_of_all} | {killed_of_all / max(tried_of_all, 1):.0%} |")
    return "\n".join([*lines, "", *(f"survived: {name}" for name in survivors)])


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation_score", description=__doc__)
    parser.add_argument("--only", help="the name of an area")
    parser.add_argument("--seed", type=int, default=SEED, help="of the random sample")
    parser.add_argument("--marker", default="not slow", help="an expression for pytest's -m")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for each mutant; more on a busy machine")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are kept")
    parser.add_argument("--shard", default="0/1", help="which part of the sample to try: 0/2 and 1/2 at the same time")
    parser.add_argument("--tries", type=int, help="end after so many mutants; the next run continues")
    parser.add_argument("--again", action="store_true", help="try those that survived once more, after new tests")
    parser.add_argument("--list", action="store_true", help="print what is known of the sample, and try nothing")
    parser.add_argument("--goal", type=float, default=0.85, help="the score below which the exit code is 1")
    return parser.parse_args()


def in_turn(drawn: Mapping[str, Sequence[Change]], areas: Sequence[Area]) -> list[tuple[Area, Change]]:
    """Return the changes of all areas, one of each in turn, so that an interrupted run says something of all."""
    turns = zip_longest(*([(area, change) for change in drawn[area.name]] for area in areas))
    return [each for turn in turns for each in turn if each is not None]


def try_all(
    todo: Sequence[tuple[Area, Change]], results: dict[str, dict[str, object]], options: argparse.Namespace
) -> None:
    """Try changes, and keep each result as it comes."""
    for name in _IMPORTED_FIRST:
        import_module(name)
    gc.freeze()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    memory = MEMORY if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM else None
    with tempfile.TemporaryDirectory(dir=memory, prefix="mutation-", ignore_cleanup_errors=True) as folder:
        copy_tree(ROOT, copy := Path(folder) / "tree")
        for area, change in todo:
            results[change.name] = try_change(area, change, copy, options)
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(results[change.name]) + "\n")
        if options.tries is not None:  # a later part looks at the tests without a mutant
            return
        # Where a mutant survived, the tests are green without one. Elsewhere they may be red by themselves.
        for area in {area.name: area for area, _ in todo}.values():
            if all(results[change.name]["red"] for other, change in todo if other is area):
                red, _ = run_tests(copy, area.tests, options.marker, options.limit)
                if red:
                    raise SystemExit(f"{area.name}: {red} is red without a mutant too.")


def main() -> int:
    """Try the sample, and print the score; return 1 if it is below the goal."""
    options = parse_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    areas = read_areas(options.only)
    drawn = {area.name: area.sample(ROOT, options.seed) for area in areas}
    results = read_results(options.results)
    part, parts = map(int, options.shard.split("/"))
    todo = [
        (area, change)
        for area, change in in_turn({name: sample[part::parts] for name, sample in drawn.items()}, areas)
        if change.name not in results or (options.again and not results[change.name]["red"])
    ][: options.tries]
    if todo and not options.list:
        try_all(todo, results, options)
    print(table(areas, results, drawn))
    known = [results[change.name] for area in areas for change in drawn[area.name] if change.name in results]
    score = sum(bool(result["red"]) for result in known) / max(len(known), 1)
    return int(not options.list and score < options.goal)


if __name__ == "__main__":
    sys.exit(main())
