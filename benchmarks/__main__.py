"""The command `python -m benchmarks`: measure, print a table, and write the requested files."""

import argparse
import re
import sys
from pathlib import Path

from benchmarks import imports, machine, plot, report
from benchmarks.contestants import CONTESTANTS
from benchmarks.figures import Comparison
from benchmarks.fresh import compare_fresh
from benchmarks.imports import compare_imports
from benchmarks.processes import compare_on_processes
from benchmarks.rounds import compare
from benchmarks.scenarios import SCENARIOS

DOCS = Path(__file__).parent.parent / "docs"


def main() -> None:
    """Run the benchmarks."""
    arguments = parse()
    comparisons = measure(arguments)
    where = f"{machine.describe()}; {arguments.rounds} rounds of {arguments.steps} steps"
    print(f"{report.table(comparisons)}\n\n{where}")
    if arguments.json:
        settings = {"rounds": arguments.rounds, "steps": arguments.steps}
        report.write_json(arguments.json, machine.describe(), settings, comparisons)
    if arguments.publish:
        publish(where, comparisons)


def parse() -> argparse.Namespace:
    """Read the command line."""
    names = [*(scenario.name for scenario in SCENARIOS), imports.NAME]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="What the engine costs beside others.")
    parser.add_argument("--rounds", type=int, default=30, help="how often each contestant runs (default: 30)")
    parser.add_argument("--steps", type=int, default=200, help="batches a run; a multiple of 4 (default: 200)")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single run there")
    parser.add_argument("--publish", action="store_true", help="put tables and picture into docs/")
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> list[Comparison]:
    """Run the scenarios that were asked for."""
    comparisons: list[Comparison] = []
    few = max(3, arguments.rounds // 4)  # fresh processes take seconds each, and differ little
    for scenario in SCENARIOS:
        if scenario.name in arguments.only and scenario.fresh:
            comparisons.append(compare_fresh(scenario, CONTESTANTS, few, tell))
        elif scenario.name in arguments.only and scenario.world_size == 1:
            comparisons.append(compare(scenario, CONTESTANTS, arguments.rounds, arguments.steps, tell))
        elif scenario.name in arguments.only:
            tell(f"{scenario.title}: {arguments.rounds} rounds")
            comparisons.append(compare_on_processes(scenario, CONTESTANTS, arguments.rounds, arguments.steps))
    if imports.NAME in arguments.only:
        comparisons.append(compare_imports(CONTESTANTS, few, tell))
    return comparisons


def tell(progress: str) -> None:
    """Say on one line how far it is, where somebody watches."""
    if sys.stderr.isatty():
        print(f"\r\033[K{progress} ", end="", file=sys.stderr, flush=True)


def publish(where: str, comparisons: list[Comparison]) -> None:
    """Write the picture, and replace what stands between the two marks in docs/benchmarks.md."""
    (DOCS / "benchmarks.svg").write_text(plot.svg(comparisons))
    page = DOCS / "benchmarks.md"
    figures = f"\\1\n{where}.\n\n{report.markdown(comparisons)}\\2"
    marked = re.compile(r"(<!-- figures -->\n).*(<!-- end of figures -->)", re.DOTALL)
    page.write_text(marked.sub(figures, page.read_text()))


if __name__ == "__main__":
    main()
