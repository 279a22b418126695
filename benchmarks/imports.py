"""The time of an import after `import torch`, measured in fresh processes."""

from collections.abc import Callable, Sequence

from benchmarks.contestants import Contestant
from benchmarks.figures import Comparison, Row, Sample
from benchmarks.fresh import measure_fresh

NAME, TITLE = "imports", "Imports, after `import torch`"
_TARGETS = {"from trainer_lib import Trainer": "≤ 0.08 s", "from trainer_lib import Accelerator": "≤ 0.05 s"}

_PROBE = """
import time, torch
wall, cpu = time.perf_counter(), time.process_time()
{statement}
print(time.process_time() - cpu, time.perf_counter() - wall)
"""


def compare_imports(
    contestants: Sequence[type[Contestant]], rounds: int, tell: Callable[[str], None] = lambda _: None
) -> Comparison:
    """Measure the imports, in turn, round after round; the median leaves out one that found nothing compiled."""
    wanted = {"import trainer_lib": True} | {
        kind.statement: kind.is_installed() for kind in contestants if kind.statement is not None
    }
    samples: dict[str, list[Sample]] = {statement: [] for statement in wanted}
    installed = [statement for statement, is_installed in wanted.items() if is_installed]
    for index in range(rounds):
        tell(f"{TITLE}: round {index + 1} of {rounds}")
        start = index % len(installed)
        for statement in installed[start:] + installed[:start]:
            samples[statement].append(_time(statement))
    rows = [
        Row(
            contestant=f"`{statement}`",
            samples=samples[statement],
            note="" if is_installed else "not installed",
            target=_TARGETS.get(statement, ""),
        )
        for statement, is_installed in wanted.items()
    ]
    return Comparison(name=NAME, title=TITLE, rows=rows)


def _time(statement: str) -> Sample:
    return measure_fresh(_PROBE.format(statement=statement))
