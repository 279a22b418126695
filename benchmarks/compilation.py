"""What compiling costs a run, beside the compiled loop by hand: `python -m benchmarks.compilation`.

Three questions: how fast a step of `TrainingArguments(compile=True)` is, how often a run with evaluations, callbacks
and short last batches compiles, and how much sooner the first step of a deep model ends if its blocks are compiled
instead of the whole model. Each start has a process of its own, with an empty cache and then with the one it left.
"""

import argparse
import os
import resource
import tempfile
import time
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from benchmarks import machine
from benchmarks.contestants.bare import parts_by_hand
from benchmarks.contestants.trainer_lib import forget_state
from benchmarks.devices import add_device, wait_for_gpu
from benchmarks.figures import Sample
from benchmarks.fresh import measure_fresh
from benchmarks.isolation import isolated
from benchmarks.task import MAX_NORM, Task, optimization, weights_norm
from trainer_lib import Trainer, TrainingArguments
from trainer_lib.callbacks import EMA
from trainer_lib.events import Callback, Run
from trainer_lib.utils import TorchDynamoPlugin

WARM = 5  # steps before the clock starts; the first one compiles
DEEP = 12  # blocks
_START = "from benchmarks.compilation import tell_start\ntell_start({kind!r}, {layers}, {device!r})"


def main() -> None:
    """Measure, and print what was seen."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compilation", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often each loop runs (default: 5)")
    parser.add_argument("--steps", type=int, default=60, help="steps of a run (default: 60)")
    add_device(parser)
    parser.add_argument("--mode", default="default", help="of torch.compile (default: default)")
    parser.add_argument("--blocks", type=int, default=DEEP, help=f"of the deep model (default: {DEEP})")
    arguments = parser.parse_args()
    print(f"{machine.describe()}; load {os.getloadavg()[0]:.1f}")
    print_steps(Task(steps=arguments.steps, layers=2, device=arguments.device), arguments.rounds, arguments.mode)
    print_compilations(arguments.device)
    print_starts(arguments.blocks, arguments.device)


def print_steps(task: Task, rounds: int, mode: str) -> None:
    """Compare a step with that of the compiled loop by hand."""
    loops = {"by hand": by_hand, "by hand, again": by_hand, "trainer_lib": by_trainer}
    samples: dict[str, list[Sample]] = {name: [] for name in loops}
    for index in range(rounds):
        names = list(loops)
        for name in names[index % 3 :] + names[: index % 3]:
            samples[name].append(loops[name](task, mode))
    for name, runs in samples.items():
        ratios = sorted(run.cpu / first.cpu for run, first in zip(runs, samples["by hand"], strict=True))
        print(
            f"a step, {name}: CPU {median(run.cpu for run in runs) * 1e3:.2f} ms, "
            f"time {median(run.wall for run in runs) * 1e3:.2f} ms, "
            f"ratio {median(ratios):.3f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


def print_compilations(device: str) -> None:
    """Count the graphs of a run with two callbacks, evaluations, and last batches that are short."""
    graphs: list[bool] = []

    def count(graph: Any, inputs: list[Tensor]) -> Any:
        del inputs
        graphs.append(torch.is_grad_enabled())
        return graph.forward

    task = Task(steps=5, layers=2, device=device)
    rows: Any = task.loader().dataset
    with isolated():
        torch.compiler.reset()
        plugin = TorchDynamoPlugin(backend=count)  # type: ignore[arg-type]  # torch takes functions too
        args = TrainingArguments(num_train_epochs=3, eval_every=4, log_every=2, compile=plugin, use_cpu=device == "cpu")
        short = torch.utils.data.Subset(rows, range(len(rows) - 10))
        options: dict[str, Any] = {"train_dataset": short, "eval_dataset": short, "callbacks": [EMA(0.9)]}
        Trainer(task.model(), args, loss_fn=cross_entropy, **options).fit()
        forget_state()
    print(f"compilations of a run with evaluations: {sum(graphs)} to train, {len(graphs) - sum(graphs)} to evaluate")


def print_starts(layers: int, device: str) -> None:
    """Compare the first steps of a deep model that is compiled whole, and block by block."""
    seconds: dict[str, list[Sample]] = {}
    for kind in ("eager", "whole", "blocks"):
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder}
            program = _START.format(kind=kind, layers=layers, device=device)
            seconds[kind] = [measure_fresh(program, environment) for _ in range(1 if kind == "eager" else 2)]
    eager = seconds.pop("eager")[0]
    print(f"the first step of {layers} blocks, without compiling: CPU {eager.cpu:.1f} s, time {eager.wall:.1f} s")
    for kind, runs in seconds.items():
        for cache, run in zip(("with an empty cache", "with the cache of the run before"), runs, strict=True):
            print(f"the first step of {layers} blocks, {kind}, {cache}: CPU {run.cpu:.1f} s, time {run.wall:.1f} s")
    for index, cache in enumerate(("an empty cache", "a full cache")):
        whole, blocks = (seconds[kind][index].wall for kind in ("whole", "blocks"))
        print(
            f"blocks against the whole model, {cache}: {whole / blocks:.1f} times as fast (goal with an empty one: 3)"
        )


def by_hand(task: Task, mode: str) -> Sample:
    """Train a compiled model as one writes it."""
    model, optimizer, scheduler, loader = parts_by_hand(task)
    model.compile(mode=mode)
    clock, total = _Clock(), torch.zeros((), device=task.device)
    with isolated():
        for index, (inputs, labels) in enumerate(loader):
            if index == WARM:
                clock.start()
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
            clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            total += loss.detach()
        clock.stop()
    return clock.sample(task, weights_norm(model))


def by_trainer(task: Task, mode: str) -> Sample:
    """Train with `compile`, which `True` makes of the default mode."""
    model, clock = task.model(), _Clock()
    plugin = TorchDynamoPlugin(backend="inductor", mode=mode)
    with isolated():
        fit(model, task, compile=plugin, callbacks=[clock])
        forget_state()
    return clock.sample(task, weights_norm(model))


def fit(model: nn.Module, task: Task, callbacks: list[Callback], **options: Any) -> None:
    """Train as the loop by hand does."""
    optimizer, scheduler = optimization(model)
    args = TrainingArguments(
        num_train_epochs=1, max_grad_norm=MAX_NORM, log_every=100, use_cpu=task.device == "cpu", **options
    )
    objects: dict[str, Any] = {"optimizer": optimizer, "scheduler": scheduler, "callbacks": callbacks}
    Trainer(model, args, train_dataset=task.loader(), loss_fn=cross_entropy, **objects).fit()


def tell_start(kind: str, layers: int, device: str) -> None:
    """Print what the first step took, the compiler's processes included; a fresh process does this."""
    compiled: Any = {
        "eager": False,
        "whole": True,
        "blocks": TorchDynamoPlugin(backend="inductor", use_regional_compilation=True),
    }
    torch.set_num_threads(1)
    task = Task(steps=1, layers=layers, device=device)
    model, clock = task.model(), _Clock(start_at=0)
    with isolated():
        clock.start()
        fit(model, task, compile=compiled[kind], callbacks=[clock])
    print(clock.cpu, clock.wall, 0.0)


class _Clock(Callback):
    """The seconds from a step on to the last one, and the CPU time, that of ended child processes included."""

    cpu = wall = 0.0
    norm: float | None = None

    def __init__(self, start_at: int = WARM) -> None:
        self._start_at = start_at

    def on_step_begin(self, run: Run) -> None:
        if self._start_at and run.state.step == self._start_at:
            self.start()

    def on_epoch_end(self, run: Run) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to measure."""
        wait_for_gpu()
        self.wall, self.cpu = time.perf_counter(), _cpu()

    def stop(self) -> None:
        """End measuring."""
        wait_for_gpu()
        self.wall, self.cpu = time.perf_counter() - self.wall, _cpu() - self.cpu

    def sample(self, task: Task, norm: float) -> Sample:
        """Return the seconds of a step, once it is sure that all loops came to the same weights."""
        if _Clock.norm is not None and abs(norm - _Clock.norm) > 1e-4 * norm:
            raise RuntimeError(f"One loop came to {_Clock.norm} and another to {norm}: they do not do the same work.")
        _Clock.norm = norm
        steps = task.steps - WARM
        return Sample(self.cpu / steps, self.wall / steps)


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


if __name__ == "__main__":
    main()
