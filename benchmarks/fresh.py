"""Runs in a fresh process: the time to the first step, and the memory used."""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.contestants import CONTESTANTS, Contestant, NotOfferedError
from benchmarks.figures import Comparison, Row, Sample
from benchmarks.meters import Meter
from benchmarks.rounds import run
from benchmarks.scenarios import SCENARIOS, Scenario

_ROOT = Path(__file__).parent.parent
_NOT_OFFERED = 3  # an exit code
_PROBE = """
import time, torch
wall, cpu = time.perf_counter(), time.process_time()
from benchmarks.fresh import tell_end
tell_end({contestant!r}, {scenario!r}, {steps}, wall, cpu)
"""


class _End(Meter):
    """Notes the time when the loop ends, before garbage collection, which takes longer than a step."""

    cpu = wall = 0.0

    def start(self) -> None:
        """Begin."""

    def stop(self) -> None:
        """End."""
        self.wall, self.cpu = time.perf_counter(), time.process_time()


def compare_fresh(
    scenario: Scenario,
    contestants: Sequence[type[Contestant]],
    rounds: int,
    tell: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Measure the contestants in turn, each time in a fresh process, from `import torch` to the end of the loop."""
    contestants = [contestant for contestant in contestants if contestant.takes_part(scenario.loop)]
    samples: dict[str, list[Sample]] = {kind.name: [] for kind in contestants}
    installed = [kind for kind in contestants if kind.is_installed()]
    programs = {
        kind.name: _PROBE.format(contestant=kind.__name__, scenario=scenario.name, steps=scenario.steps or 1)
        for kind in installed
    }
    notes = {kind.name: "not installed" for kind in contestants if kind not in installed}
    for kind in list(installed):
        try:
            measure_fresh(programs[kind.name])  # so that files are in the system's cache, and compiled
        except subprocess.CalledProcessError as error:
            if error.returncode != _NOT_OFFERED:
                raise
            notes[kind.name] = "has no such loop"
            installed.remove(kind)
    for index in range(rounds):
        tell(f"{scenario.title}: round {index + 1} of {rounds}")
        start = index % len(installed)
        for kind in installed[start:] + installed[:start]:
            samples[kind.name].append(measure_fresh(programs[kind.name]))
    rows = [
        Row(
            contestant=kind.name,
            samples=samples[kind.name],
            baseline=samples[contestants[0].name],
            note=notes.get(kind.name, ""),
            target=scenario.target if kind.name == "trainer_lib" else "",
        )
        for kind in contestants
    ]
    return Comparison(name=scenario.name, title=scenario.title, rows=rows)


def measure_fresh(program: str, environment: Mapping[str, str] | None = None) -> Sample:
    """Run a program that prints its sample last, with this process's environment or another one."""
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=_ROOT, env=environment)
    return Sample(*(float(number) for number in done.stdout.splitlines()[-1].split()))


def tell_end(contestant: str, scenario: str, steps: int, wall: float, cpu: float) -> None:
    """Run a loop, and print what it took since the times given; this is what the fresh process does."""
    (kind,) = (candidate for candidate in CONTESTANTS if candidate.__name__ == contestant)
    (chosen,) = (candidate for candidate in SCENARIOS if candidate.name == scenario)
    end = _End()
    exec(kind.statement or "")  # noqa: S102 - where a script has its imports
    try:
        run(kind(), chosen, steps, end)
    except NotOfferedError:
        sys.exit(_NOT_OFFERED)
    print(end.cpu - cpu, end.wall - wall, peak_memory())


def peak_memory() -> float:
    """Return the most memory that this process had, in bytes; 0 where the system does not tell."""
    status = Path("/proc/self/status")  # not getrusage, which counts what its parent had before the program began
    lines = status.read_text().splitlines() if status.exists() else []
    return next((float(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0.0)
