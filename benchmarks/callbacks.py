"""The cost of each callback per step: `python -m benchmarks.callbacks`.

The same training with one callback and without it, in turns; both have the callbacks that are there by default, but for
those that are measured themselves. EMA stands beside torch's `AveragedModel`. The clock runs from the first step to the
last, evaluations and logs (each 50 steps) included. The model is small, so that the callbacks show.
"""

import argparse
import gc
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks import machine
from benchmarks.isolation import isolated
from benchmarks.meters import CallCounter, Meter, Stopwatch
from benchmarks.task import BATCH_SIZE, CLASSES, FEATURES, Task
from trainer_lib import Trainer, TrainingArguments, callbacks
from trainer_lib.events import Callback, Run

_SIDE = 8  # of the pictures that a sample's features make up
_WORDS, _LENGTH = 100, 16

# Callbacks measured elsewhere, without work in a step, or that only display.
LEFT_OUT = {
    "benchmarks.trackers measures them": (
        "AimCallback ClearMLCallback CometCallback DVCLiveCallback MLflowCallback SwanLabCallback TensorBoardCallback "
        "TrackerCallback TrackioCallback WandbCallback"
    ),
    "benchmarks.checkpoints measures it": "Checkpoint",
    "it draws in a notebook": "NotebookChart",
    "it records memory of CUDA devices": "MemorySnapshot",
    "they send a message when a run ends, and nothing in a step": "Slack Webhook",
    "the base classes of all others": "Callback Modifier",
    "functions, which cost what they call": "after ask_run before every once replay_batch samples_of_step top_losses",
}


class Case(NamedTuple):
    """A callback to measure.

    Attributes:
        name: That of its class first, and what is particular about it.
        make: Makes it, and what it needs; it is given a folder for files.
        on_tokens: Whether it is about sequences.
        arguments: Those of the trainer, with the callback and without it.
        by_default: Whether it is there unless it is taken out.
    """

    name: str
    make: Callable[[Path], Sequence[Callback]]
    on_tokens: bool = False
    arguments: Mapping[str, Any] = {}
    by_default: bool = False


class Sample(NamedTuple):
    """Seconds a step: of the processor, and by the clock."""

    cpu: float
    wall: float


def averaged_by_torch(folder: Path) -> Sequence[Callback]:
    """Return a callback that keeps a moving average as torch does."""
    del folder
    made: dict[str, Any] = {}

    def begin(run: Run) -> None:
        made["source"] = run.modules[""]
        made["average"] = AveragedModel(run.modules[""], multi_avg_fn=get_ema_multi_avg_fn(0.999))

    def step(run: Run) -> None:
        del run
        made["average"].update_parameters(made["source"])

    return [callbacks.LambdaCallback(on_fit_begin=begin, on_step_end=step)]


def cases() -> list[Case]:
    """Return what there is to measure."""
    evaluated = {"eval_every": "250 steps"}
    far = "1000000 steps"
    return [
        Case("LearningRateMonitor", _one(callbacks.LearningRateMonitor), by_default=True),
        Case("Throughput", _one(callbacks.Throughput), by_default=True),
        Case("ProgressBar", _one(callbacks.ProgressBar), by_default=True),
        Case("Printer", _one(callbacks.Printer)),
        Case("JsonlLog", lambda folder: [callbacks.JsonlLog(folder / "history.jsonl")]),
        Case("CsvLog", lambda folder: [callbacks.CsvLog(folder / "history.csv")]),
        Case("LambdaCallback", _one(callbacks.LambdaCallback, on_step_end=lambda run: None)),
        Case("EarlyStopping", _one(callbacks.EarlyStopping, "eval_loss", patience=10**6), arguments=evaluated),
        Case("GarbageSchedule", _one(callbacks.GarbageSchedule, "500 steps")),
        Case("GradientNorms by layer", _one(callbacks.GradientNorms)),
        Case("SystemMonitor", _one(callbacks.SystemMonitor)),
        Case("Flops", _one(callbacks.Flops, peak=1e12)),
        Case("ModelSummary", _one(callbacks.ModelSummary)),
        Case("Timer", _one(callbacks.Timer)),
        Case("Histograms each 500 steps", _one(callbacks.Histograms)),
        Case("Histograms each 100 steps", _one(callbacks.Histograms, "100 steps")),
        Case("Histograms in each step", _one(callbacks.Histograms, "1 step")),
        Case("Predictions", _one(callbacks.Predictions), arguments=evaluated),
        Case("SampleLosses", _one(callbacks.SampleLosses)),
        Case("Provenance", lambda folder: [callbacks.Provenance(folder)]),
        Case("Profile of 5 steps", lambda folder: [callbacks.Profile(folder=folder)]),
        Case("LiveControl", lambda folder: [callbacks.LiveControl(file=folder / "control")]),
        Case("EMA", _one(callbacks.EMA, 0.999)),
        Case("EMA as torch's AveragedModel", averaged_by_torch),
        Case("EMA each 10 steps", _one(callbacks.EMA, 0.999, every="10 steps")),
        Case("SWA each 10 steps", _one(callbacks.SWA, start=0.5, every="10 steps")),
        Case("Freeze", _one(callbacks.Freeze, "1.weight", until=far)),
        Case("GradualUnfreezing", _one(callbacks.GradualUnfreezing, "3.*", "1.*", every=far)),
        Case("Mixup", _one(callbacks.Mixup, 0.2, num_classes=CLASSES)),
        Case("CutMix", _one(callbacks.CutMix, 1.0, num_classes=CLASSES)),
        Case("MixupOrCutMix", lambda _: [callbacks.MixupOrCutMix(*_mixing())]),
        Case("LabelSmoothing", _one(callbacks.LabelSmoothing, 0.1)),
        Case("SAM", _one(callbacks.SAM, 0.05)),
        Case("ClipValue", _one(callbacks.ClipValue, 0.5)),
        Case("AdaptiveClipping", _one(callbacks.AdaptiveClipping, 0.01)),
        Case("AccumulationSchedule", _one(callbacks.AccumulationSchedule, {0: 1})),
        Case("NEFTune", _one(callbacks.NEFTune, 5.0), on_tokens=True),
        Case(
            "SequenceLengthWarmup",
            _one(callbacks.SequenceLengthWarmup, 8, _LENGTH, until=far),
            on_tokens=True,
        ),
    ]


def main() -> None:
    """Measure, and print figures."""
    known = cases()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.callbacks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="how often each runs (default: 9)")
    parser.add_argument("--steps", type=int, default=1000, help="of a run (default: 1000)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="what the names of cases begin with")
    arguments = parser.parse_args()
    chosen = [case for case in known if arguments.only is None or case.name.startswith(tuple(arguments.only))]
    if not chosen:
        parser.error(f"--only: no case begins so. There are: {', '.join(case.name for case in known)}.")
    print(f"{machine.describe()}; load {os.getloadavg()[0]:.1f}; {arguments.rounds} rounds of {arguments.steps} steps")
    gc.freeze()  # what is there already; collections need not go through it each time
    with tempfile.TemporaryDirectory() as folder:
        for case in chosen:
            pairs = measured(case, arguments.rounds, arguments.steps, Path(folder))
            print(figures_line(case.name, pairs, more_calls(case, Path(folder))), flush=True)
    for reason, names in LEFT_OUT.items():
        print(f"not here: {', '.join(names.split())} ({reason})")


def measured(case: Case, rounds: int, steps: int, folder: Path) -> list[tuple[Sample, Sample]]:
    """Return what runs took with a callback and without it; who comes first changes from round to round."""
    pairs: list[tuple[Sample, Sample]] = []
    train(case, steps // 10 or 1, folder, has_it=True, meter=Meter())  # warms up
    for number in range(rounds):
        took: dict[bool, Sample] = {}
        for has_it in (True, False) if number % 2 else (False, True):
            watch = Stopwatch()
            train(case, steps, folder, has_it, watch)
            took[has_it] = Sample(watch.cpu / steps, watch.wall / steps)
        pairs.append((took[True], took[False]))
    return pairs


def more_calls(case: Case, folder: Path, short: int = 50, long: int = 150) -> float:
    """Return how many calls of Python functions a callback adds to a step, which a busy machine does not change."""

    def calls(has_it: bool) -> float:
        # The difference of two lengths: what a loop costs once, at its start and end, drops out.
        counters = {steps: CallCounter() for steps in (short, long)}
        for steps, counter in counters.items():
            train(case, steps, folder, has_it, counter, has_bar=False)  # a bar is drawn by the clock
        return (counters[long].calls - counters[short].calls) / (long - short)

    train(
        case, short, folder, has_it=True, meter=Meter(), has_bar=False
    )  # what is imported or kept at the first use is not counted
    return calls(has_it=True) - calls(has_it=False)


def figures_line(name: str, pairs: Sequence[tuple[Sample, Sample]], calls: float) -> str:
    """Return a line of figures: ratios of pairs, and what a step takes longer."""
    words = [f"{name:28} {calls:+6.1f} calls"]
    for place, field in enumerate(Sample._fields):
        ratios = sorted(having[place] / none[place] for having, none in pairs)
        calm = min(having[place] for having, _ in pairs) / min(none[place] for _, none in pairs)
        more = median(having[place] - none[place] for having, none in pairs)
        spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}, of the fastest {calm:.3f}"
        words.append(f"{field} {median(ratios):.3f} ({spread}), {more * 1e6:+.1f} µs a step")
    return "; ".join(words)


def train(case: Case, steps: int, folder: Path, has_it: bool, meter: Meter, has_bar: bool = True) -> None:
    """Train, and measure the loop."""
    around = callbacks.LambdaCallback(
        on_epoch_begin=lambda run: meter.start(), on_epoch_end=lambda run: meter.stop(), order=1000
    )
    with isolated():
        model, data = _tokens(steps) if case.on_tokens else _pictures(steps)
        options: dict[str, Any] = {"eval_every": "never", **case.arguments}
        arguments = TrainingArguments(
            num_train_epochs=1,
            per_device_train_batch_size=BATCH_SIZE,
            log_every="50 steps",
            progress_bar=has_bar,
            use_cpu=True,
            **options,
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=data,
            eval_dataset=tuple(column[: 4 * BATCH_SIZE] for column in data),
            loss_fn=_each_token if case.on_tokens else cross_entropy,
            callbacks=[around, *(case.make(folder) if has_it else [])],
        )
        if case.by_default and not has_it:
            trainer.events.remove(getattr(callbacks, case.name))
        trainer.fit()
        trainer.accelerator.free_memory()


def _one(kind: Callable[..., Callback], *values: Any, **options: Any) -> Callable[[Path], Sequence[Callback]]:
    return lambda folder: [kind(*values, **options)]


def _mixing() -> tuple[Any, Any]:
    return callbacks.Mixup(0.2, num_classes=CLASSES), callbacks.CutMix(1.0, num_classes=CLASSES)


def _pictures(steps: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    task = Task(steps=steps)
    inputs, labels = task.loader().dataset.tensors  # type: ignore[attr-defined]  # a TensorDataset
    assert _SIDE * _SIDE == FEATURES
    return nn.Sequential(nn.Flatten(), *task.model().children()), (inputs.view(-1, 1, _SIDE, _SIDE), labels)


def _tokens(steps: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(_WORDS, (steps * BATCH_SIZE, _LENGTH), generator=generator)
    model = nn.Sequential(nn.Embedding(_WORDS, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, _WORDS))
    return model, (words, words.roll(1, dims=1))


def _each_token(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


if __name__ == "__main__":
    main()
