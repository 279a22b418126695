"""The command `python -m benchmarks`: measure, print a table, and write the requested files."""

import argparse
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import imports, machine, plot, report
from benchmarks.contestants import CONTESTANTS
from benchmarks.devices import add_device
from benchmarks.figures import Comparison
from benchmarks.fresh import compare_fresh
from benchmarks.imports import compare_imports
from benchmarks.processes import compare_on_processes
from benchmarks.rounds import compare
from benchmarks.scenarios import SCENARIOS

DOCS = Path(__file__).parent.parent / "docs"
_PICTURED = ("step", "fit", "fit-folder", "fit-ddp")  # with one scale: evaluating goes up to 12 times the loop by hand
TITLES = {scenario.name: scenario.title for scenario in SCENARIOS} | {imports.NAME: imports.TITLE}


def main() -> None:
    """Run the benchmarks, or read what runs wrote."""
    arguments = parse()
    if arguments.read:
        runs = [report.read_json(path, TITLES) for path in arguments.read]
    else:
        settings = {"rounds": arguments.rounds, "steps": arguments.steps, "date": time.strftime("%Y-%m-%d")}
        runs: list[tuple[dict[str, Any], list[Comparison]]] = [({"machine": machine.describe(), **settings}, [])]
        for comparison in measure(arguments):
            runs[0][1].append(comparison)
            if arguments.json:
                report.write_json(arguments.json, machine.describe(), settings, runs[0][1])
    measured = {comparison.name: comparison for _, comparisons in runs for comparison in comparisons}
    comparisons = [measured[name] for name in TITLES if name in measured]
    where = "; ".join(dict.fromkeys(_described(settings) for settings, _ in runs))
    print(f"{report.table(comparisons)}\n\n{where}")
    if arguments.publish:
        publish(where, comparisons)


def parse() -> argparse.Namespace:
    """Read the command line."""
    main_table = [scenario.name for scenario in SCENARIOS if not scenario.is_variant]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="What the engine costs beside others.")
    parser.add_argument("--rounds", type=int, default=7, help="how often each contestant runs (default: 7)")
    parser.add_argument("--steps", type=int, default=100, help="batches a run; a multiple of 4 (default: 100)")
    every, listed = list(TITLES), ", ".join(TITLES)
    add_device(parser)
    parser.add_argument("--only", nargs="+", choices=every, metavar="NAME", default=main_table, help=listed)
    parser.add_argument("--all", dest="only", action="store_const", const=every, help="with variants and imports")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single run there")
    parser.add_argument("--read", type=Path, nargs="+", metavar="FILE", help="measure nothing: take these files")
    parser.add_argument("--publish", action="store_true", help="put tables and picture into docs/")
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> Iterator[Comparison]:
    """Run the scenarios that were asked for."""
    few = max(3, arguments.rounds // 4)  # fresh processes take seconds each, and differ little
    for scenario in (scenario.on(arguments.device) for scenario in SCENARIOS if scenario.name in arguments.only):
        if arguments.device != "cpu" and (scenario.fresh or scenario.world_size > 1):
            tell(f"{scenario.title}: on the CPU alone", ends=True)
            continue
        began = time.perf_counter()
        if scenario.fresh:
            yield compare_fresh(scenario, CONTESTANTS, few, tell)
        elif scenario.world_size == 1:
            yield compare(scenario, CONTESTANTS, arguments.rounds, arguments.steps, tell)
        else:
            tell(f"{scenario.title}: {arguments.rounds} rounds")
            yield compare_on_processes(scenario, CONTESTANTS, arguments.rounds, arguments.steps)
        tell(f"{scenario.title}: {time.perf_counter() - began:.0f} s", ends=True)
    if imports.NAME in arguments.only:
        yield compare_imports(CONTESTANTS, few, tell)


def tell(progress: str, ends: bool = False) -> None:
    """Say on one line how far it is, where somebody watches; a scenario that ended keeps its line."""
    if sys.stderr.isatty():
        print(f"\r\033[K{progress} ", end="\n" if ends else "", file=sys.stderr, flush=True)
    elif ends:
        print(progress, file=sys.stderr, flush=True)


def publish(where: str, comparisons: list[Comparison]) -> None:
    """Write the picture, and replace what stands between the two marks in docs/benchmarks.md."""
    pictured = [comparison for comparison in comparisons if comparison.name in _PICTURED]
    if pictured:
        (DOCS / "benchmarks.svg").write_text(plot.svg(pictured))
    page = DOCS / "benchmarks.md"
    figures = f"\\1\n{where}.\n\n{report.markdown(comparisons)}\\2"
    marked = re.compile(r"(<!-- figures -->\n).*(<!-- end of figures -->)", re.DOTALL)
    page.write_text(marked.sub(figures, page.read_text()))


def _described(settings: dict[str, Any]) -> str:
    return f"{settings['machine']}; {settings['rounds']} rounds of {settings['steps']} steps, on {settings['date']}"


if __name__ == "__main__":
    main()
