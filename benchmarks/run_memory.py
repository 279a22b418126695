"""The memory of a run beside a loop written by hand: `python -m benchmarks.run_memory`.

The peak is that of training and evaluating a transformer of about 100 million parameters, each time in a fresh process.
With `--soak` a tiny model trains for 100,000 steps, with logs, evaluations, checkpoints and a history, and neither its
memory nor its number of objects may grow.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import machine
from benchmarks.fresh import measure_fresh, peak_memory

WIDTH, LAYERS, VOCABULARY, LENGTH, BATCH = 768, 12, 16_384, 32, 2
STEPS = 4
MEGABYTE = 1 << 20
_PROBE = "from benchmarks.run_memory import tell_peak; tell_peak({!r})"
GROWTH = 2 * MEGABYTE  # of the resident memory in a soak of 100,000 steps; arenas of the allocator settle until then


class LanguageModel(nn.Module):
    """A transformer of about 100 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 12, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores of each position."""
        return self.head(self.encoder(self.embedding(tokens)))


def loss_of(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss."""
    return cross_entropy(scores.flatten(0, 1), labels.flatten())


def data(seed: int) -> TensorDataset:
    """Return tokens with labels."""
    tokens = torch.randint(VOCABULARY, (STEPS * BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def by_hand() -> None:
    """Train, clip, and evaluate in the middle and at the end."""
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for step, (tokens, labels) in enumerate(DataLoader(data(0), BATCH, shuffle=True), 1):
        loss_of(model(tokens), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 0:
            model.eval()
            with torch.no_grad():
                losses = [loss_of(model(tokens), labels) for tokens, labels in DataLoader(data(1), BATCH)]
            assert torch.stack(losses).mean().isfinite()
            model.train()


def by_trainer() -> None:
    """Do the same with the Trainer."""
    from trainer_lib import Trainer, TrainingArguments

    arguments = TrainingArguments(
        max_steps=STEPS,
        eval_every="2 steps",
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        learning_rate=1e-4,
        max_grad_norm=1.0,
        progress_bar=False,
        use_cpu=True,
    )
    Trainer(LanguageModel(), arguments, train_dataset=data(0), eval_dataset=data(1), loss_fn=loss_of).fit()


LOOPS: dict[str, Callable[[], None]] = {"by hand": by_hand, "trainer_lib": by_trainer}


def main() -> None:
    """Measure, and print figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run_memory", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="processes of each loop (default: 3)")
    parser.add_argument("--soak", nargs="?", type=int, const=100_000, metavar="STEPS", help="train so long instead")
    arguments = parser.parse_args()
    if arguments.soak:
        sys.exit(tell_soak(soak(arguments.soak)))
    peaks: dict[str, list[float]] = {name: [] for name in LOOPS}
    for _ in range(arguments.rounds):
        for name, taken in peaks.items():
            taken.append(measure_fresh(_PROBE.format(name)).memory)
    base = median(peaks["by hand"])
    for name, taken in peaks.items():
        print(f"{name:12} {median(taken) / MEGABYTE:7.0f} MB  {median(taken) / base:.3f}")
    print(f"{machine.describe()}; {arguments.rounds} processes each (target: 1.01)")


def tell_peak(name: str) -> None:
    """Run a loop, and print its CPU time, its time and its peak; this is what the fresh process does."""
    torch.set_num_threads(1)
    wall, cpu = time.perf_counter(), time.process_time()
    LOOPS[name]()
    print(time.process_time() - cpu, time.perf_counter() - wall, peak_memory())


# -- soak --------------------------------------------------------------------------------------------------------


class Observation(NamedTuple):
    """What a process holds after a step."""

    step: int
    resident: float  # bytes
    objects: int  # those that Python's garbage collection follows


def soak(steps: int, points: int = 40, callbacks: Sequence[Any] = ()) -> list[Observation]:
    """Train for so many steps, and return what the process holds at as many points."""
    from trainer_lib import Trainer, TrainingArguments
    from trainer_lib.callbacks import LambdaCallback

    observations: list[Observation] = []

    def observe(run: Any) -> None:
        if run.state.step % (steps // points) == 0:
            run.accelerator.wait_for_save()  # one that is under way holds some hundred objects
            gc.collect()
            observations.append(Observation(run.state.step, resident_memory(), len(gc.get_objects())))

    torch.manual_seed(0)
    inputs = torch.randn(4096, 8)
    rows = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=64,
            eval_every=f"{steps // 10} steps",
            save_every=f"{steps // 10} steps",
            keep_last=2,
            log_every=50,
            progress_bar=False,
            use_cpu=True,
        )
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        trainer = Trainer(
            model,
            arguments,
            train_dataset=rows,
            eval_dataset=TensorDataset(*rows[:256]),
            loss_fn=cross_entropy,
            metrics="accuracy",
            callbacks=[*callbacks, LambdaCallback(on_step_end=observe)],
        )
        trainer.fit()
    return observations


def resident_memory() -> float:
    """Return the bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096.0


def growth(observations: list[Observation]) -> Observation:
    """Return what a run of this length adds, by the median of the slopes between observations of its second half."""
    late, last = observations[len(observations) // 2 :], observations[-1].step
    pairs = list(combinations(late, 2))
    resident = median((after.resident - before.resident) / (after.step - before.step) for before, after in pairs)
    objects = median((after.objects - before.objects) / (after.step - before.step) for before, after in pairs)
    return Observation(last, resident * last, round(objects * last))


def tell_soak(observations: list[Observation]) -> int:
    """Print what was observed, and return whether it grew."""
    for observation in observations[:: max(1, len(observations) // 10)]:
        resident = observation.resident / MEGABYTE
        print(f"step {observation.step:8,}: {resident:7.1f} MB, {observation.objects:,} objects")
    grown = growth(observations)
    print(f"growth over {grown.step:,} steps: {grown.resident / MEGABYTE:.2f} MB, {grown.objects} objects")
    return int(grown.resident > GROWTH or grown.objects > grown.step / 1000)


if __name__ == "__main__":
    main()
