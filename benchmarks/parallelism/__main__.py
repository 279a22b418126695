"""The command `python -m benchmarks.parallelism`: measure, and print or publish a table."""

import argparse
import re
from pathlib import Path

from benchmarks import machine
from benchmarks.parallelism.ours import OURS
from benchmarks.parallelism.rounds import AGAIN, BY_HAND, Result, measure_in_world
from benchmarks.parallelism.task import MESHES, Shape

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallelism", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="how often each contestant runs (default: 15)")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps a round (default: 8)")
    parser.add_argument(
        "--only", nargs="+", choices=MESHES, default=list(MESHES), metavar="MESH", help=", ".join(MESHES)
    )
    parser.add_argument("--publish", action="store_true", help=f"write the table into docs/{PAGE.name}")
    parser.add_argument("--messages", action="store_true", help="print each kind of message too")
    arguments = parser.parse_args()
    lines = ["| mesh | contestant | CPU time a step | ratio | messages | bytes |", "|---|---|---:|---:|---:|---:|"]
    for name in arguments.only:
        for contestant in OURS:
            result = measure_in_world(MESHES[name], Shape(), contestant, arguments.rounds, arguments.steps)
            lines += rows(MESHES[name].title, contestant, result)
            print("\n".join(lines[-3:]), flush=True)
            if arguments.messages:
                for label, counts in result.messages.items():
                    print(
                        label, *(f"{count} × {m.operation} {m.size}" for m, count in sorted(counts.items())), sep="\n  "
                    )
    where = f"{machine.describe()}; {arguments.rounds} rounds of {arguments.steps} steps."
    table = "\n".join(lines)
    print(f"\n{table}\n\n{where}")
    if arguments.publish:
        marked = re.compile(r"(<!-- parallelism -->\n).*(<!-- end of parallelism -->)", re.DOTALL)
        text = PAGE.read_text()
        PAGE.write_text(marked.sub(lambda match: f"{match[1]}\n{where}\n\n{table}\n\n{match[2]}", text))


def rows(title: str, contestant: str, result: Result) -> list[str]:
    """Return the rows of a table."""
    return [
        f"| {title} | {name} | {result.milliseconds(name):.1f} ms | {result.ratio(name):.3f} | "
        f"{result.messages[name].total()} | {sum(m.size * n for m, n in result.messages[name].items()):,} |"
        for name in (BY_HAND, AGAIN, contestant)
    ]


if __name__ == "__main__":
    main()
