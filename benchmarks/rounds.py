"""The measurement: all contestants in turn, round after round."""

import gc
import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from benchmarks.contestants import Contestant, NotOfferedError
from benchmarks.figures import Comparison, Row, Sample
from benchmarks.isolation import isolated
from benchmarks.meters import CallCounter, Meter, Stopwatch
from benchmarks.scenarios import Scenario

# The difference of two lengths: what a loop costs once, at its start and end, drops out.
_SHORT, _LONG = 40, 120


def compare(
    scenario: Scenario,
    contestants: Sequence[type[Contestant]],
    rounds: int,
    steps: int,
    tell: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Measure the contestants in one scenario; the first is what the others are compared with."""
    contestants = [contestant for contestant in contestants if contestant.takes_part(scenario.loop)]
    steps = scenario.steps or steps
    entrants, notes = _warm_up(scenario, contestants)
    gc.freeze()  # what the contestants' packages brought in stays; collections need not go through it each time
    samples: dict[str, list[Sample]] = {entrant.name: [] for entrant in entrants}
    for index in range(rounds):
        tell(f"{scenario.title}: round {index + 1} of {rounds}")
        # Each contestant comes first, second, … equally often.
        start = index % len(entrants)
        for entrant in entrants[start:] + entrants[:start]:
            samples[entrant.name].append(_time(entrant, scenario, steps))
    gc.unfreeze()
    calls = {entrant.name: calls_per_step(entrant, scenario) for entrant in entrants}
    rows = [
        Row(
            contestant=name,
            samples=samples.get(name, ()),
            baseline=samples[contestants[0].name],
            calls=calls.get(name),
            note=notes.get(name, ""),
            target=scenario.target if name == "trainer_lib" else "",
        )
        for name in (contestant.name for contestant in contestants)
    ]
    return Comparison(name=scenario.name, title=scenario.title, rows=rows)


def calls_per_step(contestant: Contestant, scenario: Scenario) -> float:
    """Count the calls of Python functions that one step makes."""
    short, long = CallCounter(), CallCounter()
    run(contestant, scenario, _SHORT, short)
    run(contestant, scenario, _LONG, long)
    return (long.calls - short.calls) / (_LONG - _SHORT)


def _warm_up(scenario: Scenario, contestants: Sequence[type[Contestant]]) -> tuple[list[Contestant], dict[str, str]]:
    entrants: list[Contestant] = []
    notes: dict[str, str] = {}
    expected = None
    for kind in contestants:
        if not kind.is_installed():
            notes[kind.name] = "not installed"
            continue
        try:
            outcome = run(kind(), scenario, _SHORT, Meter())
        except NotOfferedError:
            notes[kind.name] = "has no such loop"
            continue
        expected = outcome if expected is None else expected
        if not math.isclose(outcome, expected, rel_tol=scenario.tolerance):
            raise RuntimeError(
                f"{kind.name} came to {outcome} in '{scenario.name}', and {contestants[0].name} to {expected}: "
                "they do not do the same work, so their times cannot be compared."
            )
        entrants.append(kind())
    return entrants, notes


def _time(contestant: Contestant, scenario: Scenario, steps: int) -> Sample:
    watch = Stopwatch()
    run(contestant, scenario, steps, watch)
    times = torch.tensor([watch.cpu, watch.wall], dtype=torch.float64) / (steps * scenario.world_size)
    if scenario.world_size > 1:
        dist.all_reduce(times)
    cpu, wall = times.tolist()
    return Sample(cpu, wall, watch.memory)


def run(contestant: Contestant, scenario: Scenario, steps: int, meter: Meter) -> float:
    """Let a contestant do its loop once, and return what it came to."""
    with isolated():
        try:
            return getattr(contestant, scenario.loop)(scenario.task(steps), meter)
        finally:
            contestant.reset()
