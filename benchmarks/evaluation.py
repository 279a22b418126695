"""Evaluation, prediction and generation beside loops written by hand: `python -m benchmarks.evaluation`.

All contestants take turns in the same processes, and come to the same numbers. The memory of predictions that go to
files is measured on two processes, for a set and for one ten times as large.
"""

import argparse
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import machine, report
from benchmarks.contestants.bare import Bare, shared_by_hand
from benchmarks.contestants.base import Contestant
from benchmarks.contestants.trainer import Trainer
from benchmarks.docstrings import docstrings
from benchmarks.figures import Comparison, Row, Sample
from benchmarks.meters import Meter, Stopwatch
from benchmarks.processes import compare_on_processes
from benchmarks.rounds import compare, run
from benchmarks.scenarios import Scenario
from benchmarks.task import BATCH_SIZE, SCORES, Task

PAD, END, ENDS_PROMPT, FIRST_WORD = 0, 1, 2, 3
WORDS = 512  # the vocabulary
LONGEST = 128  # tokens of a prompt
PROMPTS, PER_BATCH = 192, 8
MEGABYTE = 1 << 20


class TrainerOnLoader(Trainer):
    """The Trainer, with the DataLoader of the loop by hand instead of its dataset."""

    name = "trainer_lib, the same DataLoader"

    def evaluate(self, task: Task, meter: Meter) -> float:
        """Evaluate by a metric that is called by its name."""
        trainer, loader = _trainer(metrics="accuracy"), task.scores()
        trainer.evaluate(task.scores(2))
        with meter:
            metrics = trainer.evaluate(loader)
        return metrics["eval_loss"] + metrics["eval_accuracy"]


class RowsByHand(Contestant):
    """Rows are kept, gathered once, put in order, and given to a function on the first rank."""

    name = "by hand"

    def evaluate(self, task: Task, meter: Meter) -> float:
        """Compute the loss, and the accuracy of all rows at once."""
        loader, loss, rows, labels = shared_by_hand(task, task.scores()), torch.zeros(()), [], []
        with meter, torch.no_grad():
            for scores, targets in loader:
                loss += cross_entropy(scores, targets, reduction="sum")
                rows.append(scores)
                labels.append(targets)
            all_rows, all_labels = (_in_order(torch.cat(parts), task.world_size) for parts in (rows, labels))
            if task.world_size > 1:
                dist.all_reduce(loss)
            values = [accuracy(all_rows.numpy(), all_labels.numpy())["accuracy"] if _is_first() else 0.0]
            if task.world_size > 1:
                dist.broadcast_object_list(values, 0)
        return float(loss) / len(all_labels) + values[0]


class RowsOfTrainer(Trainer):
    """`compute_metrics` of the Trainer."""

    def evaluate(self, task: Task, meter: Meter) -> float:
        """Compute the loss, and the accuracy of all rows at once."""
        trainer, loader = _trainer(compute_metrics=accuracy), task.scores()
        trainer.evaluate(task.scores(2))
        with meter:
            metrics = trainer.evaluate(loader)
        return metrics["eval_loss"] + metrics["eval_accuracy"]


class PredictByHand(RowsByHand):
    """Rows are kept, and gathered once."""

    def evaluate(self, task: Task, meter: Meter) -> float:
        """Predict."""
        loader, loss, rows, labels = shared_by_hand(task, task.scores()), torch.zeros(()), [], []
        with meter, torch.no_grad():
            for scores, targets in loader:
                loss += cross_entropy(scores, targets, reduction="sum")
                rows.append(scores)
                labels.append(targets)
            all_rows, all_labels = (_in_order(torch.cat(parts), task.world_size).numpy() for parts in (rows, labels))
        return float(np.float64(all_rows[-1].sum()) + all_labels.sum())


class PredictOfTrainer(Trainer):
    """`predict` of the Trainer, into memory."""

    def evaluate(self, task: Task, meter: Meter) -> float:
        """Predict."""
        trainer, loader = _trainer(), task.scores()
        trainer.predict(task.scores(2))
        with meter:
            rows, labels, _ = trainer.predict(loader)
        return float(np.float64(rows[-1].sum()) + labels.sum())


class GenerateByHand(Contestant):
    """`generate` for each batch, in the order of the data."""

    name = "by hand, in the order of the data"

    def evaluate(self, task: Task, meter: Meter) -> float:
        """Generate."""
        model, rows = writer(), []
        with meter, torch.no_grad():
            for batch in _prompts(task):
                written = model.generate(**batch, **options())
                rows += written[:, batch["input_ids"].shape[1] :].tolist()
        return checksum(rows)


class GenerateOfTrainer(Trainer):
    """`predict` of the Trainer with `predict_with_generate`."""

    name = "trainer_lib, by length"

    def evaluate(self, task: Task, meter: Meter) -> float:
        """Generate."""
        arguments = {"predict_with_generate": True, "generation_kwargs": options(), "collate_fn": padded}
        trainer = _trainer(writer(), PER_BATCH, None, **arguments)
        data = self.data(task)
        with meter:
            rows = trainer.predict(data).predictions
        return checksum(rows.tolist())

    def data(self, task: Task) -> Any:
        """Return the data, which is read by length."""
        return corpus()[: task.steps * PER_BATCH]


class GenerateInOrder(GenerateOfTrainer):
    """The same, with a DataLoader, which keeps its order."""

    name = "trainer_lib, in the order of the data"

    def data(self, task: Task) -> Any:
        """Return the data in its order."""
        return _prompts(task)


STREAMING: list[type[Contestant]] = [Bare, Trainer, TrainerOnLoader]
ROWS: list[type[Contestant]] = [RowsByHand, RowsOfTrainer]
PREDICTION: list[type[Contestant]] = [PredictByHand, PredictOfTrainer]
LAST = GenerateOfTrainer
GENERATION: list[type[Contestant]] = [GenerateByHand, GenerateInOrder, LAST]


def scenario(name: str, title: str, target: str, world_size: int = 1, steps: int = 313) -> Scenario:
    """Return a comparison of loops that evaluate."""
    settings = {"world_size": world_size}
    return Scenario(name=name, title=title, loop="evaluate", settings=settings, target=target, steps=steps)


SCENARIOS: list[tuple[Scenario, list[type[Contestant]]]] = [
    (scenario("metrics", "Evaluating 10,016 × 100 scores, for each batch", "time ≤ 1.0"), STREAMING),
    (scenario("metrics-2", "The same for each of two processes", "time ≤ 1.0", 2), STREAMING),
    (scenario("rows", "compute_metrics of 10,016 × 100 scores, for each batch", "time ≤ 1.2"), ROWS),
    (scenario("rows-2", "The same for each of two processes, gathered", "time ≤ 1.2", 2), ROWS),
    (scenario("predict", "Predicting 10,016 × 100 scores, for each batch", "time ≤ 1.0"), PREDICTION),
    (scenario("predict-2", "The same for each of two processes, gathered on both", "time ≤ 1.0", 2), PREDICTION),
]
GENERATE = scenario(
    "generate",
    f"Answers as long as their prompts: {PROMPTS} docstrings, for each batch of {PER_BATCH}",
    "time ≤ 0.67",
    steps=PROMPTS // PER_BATCH,
)
FILES = "files"


def main() -> None:
    """Measure, and print tables."""
    names = [*(scenario.name for scenario, _ in SCENARIOS), GENERATE.name, FILES]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evaluation", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="how often each contestant runs (default: 15)")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows that go to files (default: 1000000)")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    arguments = parser.parse_args()
    comparisons = [
        compare_on_processes(scenario, contestants, arguments.rounds, 0)
        if scenario.world_size > 1
        else compare(scenario, contestants, arguments.rounds, 0)
        for scenario, contestants in SCENARIOS
        if scenario.name in arguments.only
    ]
    if GENERATE.name in arguments.only:
        comparisons.append(compare_generation(max(3, arguments.rounds // 5)))
    print(f"{report.table(comparisons)}\n\n{machine.describe()}; {arguments.rounds} rounds")
    if FILES in arguments.only:
        for rows in (arguments.rows // 10, arguments.rows):
            for rank, added in enumerate(memory_of_files(rows)):
                print(f"predict(to=…) of {rows:,} × {SCORES} scores, rank {rank} of 2: {added / MEGABYTE:.0f} MB more")


def compare_generation(rounds: int) -> Comparison:
    """Measure generation, which takes long: fewer rounds, and calls are not counted."""
    samples: dict[type[Contestant], list[Sample]] = {kind: [] for kind in GENERATION}
    results: set[float] = set()
    for _ in range(rounds):
        for kind, taken in samples.items():
            watch = Stopwatch()
            results.add(run(kind(), GENERATE, PROMPTS // PER_BATCH, watch))
            taken.append(Sample(watch.cpu * PER_BATCH / PROMPTS, watch.wall * PER_BATCH / PROMPTS))
    if len(results) > 1:
        raise RuntimeError(f"The contestants wrote different tokens: {sorted(results)}")
    baseline = samples[GENERATION[0]]
    rows = [
        Row(contestant=kind.name, samples=samples[kind], baseline=baseline, target=GENERATE.target * (kind is LAST))
        for kind in GENERATION
    ]
    return Comparison(name=GENERATE.name, title=GENERATE.title, rows=rows)


# -- scores ------------------------------------------------------------------------------------------------------


def accuracy(predictions: Any, labels: Any) -> dict[str, float]:
    """Return the share of rows whose highest score is that of their label."""
    return {"accuracy": float((predictions.argmax(1) == labels).mean())}


def _trainer(
    model: nn.Module | None = None, batch_size: int = BATCH_SIZE, loss_fn: Any = cross_entropy, **options: Any
) -> Any:
    from trainer_lib import Trainer, TrainingArguments

    names = ("metrics", "compute_metrics", "collate_fn")
    objects = {name: options.pop(name) for name in names if name in options}
    arguments = TrainingArguments(per_device_eval_batch_size=batch_size, progress_bar=False, use_cpu=True, **options)
    return Trainer(model or nn.Identity(), arguments, loss_fn=loss_fn, **objects)


def _in_order(rows: Tensor, world_size: int) -> Tensor:
    """Return the rows of all ranks; `DistributedSampler` deals them out one by one."""
    if world_size == 1:
        return rows
    parts = [torch.empty_like(rows) for _ in range(world_size)]
    dist.all_gather(parts, rows)
    return torch.stack(parts, dim=1).flatten(0, 1)


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


# -- generation --------------------------------------------------------------------------------------------------


@cache
def corpus() -> list[dict[str, list[int]]]:
    """Return docstrings as prompts, in the order of the files."""
    numbers = [[FIRST_WORD + crc32(word.encode()) % (WORDS - FIRST_WORD) for word in words] for words in docstrings()]
    step = len(numbers) // PROMPTS
    return [{"input_ids": [*tokens[: LONGEST - 1], ENDS_PROMPT]} for tokens in numbers[::step][:PROMPTS]]


def padded(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Return prompts that are padded on the left."""
    size = max(len(sample["input_ids"]) for sample in samples)
    tokens = torch.tensor([[PAD] * (size - len(row["input_ids"])) + row["input_ids"] for row in samples])
    return {"input_ids": tokens, "attention_mask": (tokens != PAD).long()}


def _prompts(task: Task) -> DataLoader[Any]:
    data: Any = corpus()[: task.steps * PER_BATCH]
    return DataLoader(data, PER_BATCH, collate_fn=padded)


def writer() -> Any:
    """Return a small GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": WORDS, "n_positions": 2 * LONGEST, "n_embd": 64, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**shape, bos_token_id=END, eos_token_id=END, initializer_range=0.3, tie_word_embeddings=False)
    return GPT2LMHeadModel(config).eval()


def options() -> dict[str, Any]:
    """Return arguments of `generate`: greedy, and answers end where a trained model that repeats its prompt ends."""
    return {
        "max_new_tokens": LONGEST,
        "do_sample": False,
        "pad_token_id": PAD,
        "logits_processor": [_as_long_as_the_prompt],
    }


def _as_long_as_the_prompt(tokens: Tensor, scores: Tensor) -> Tensor:
    places = (tokens == ENDS_PROMPT).int().argmax(dim=1)
    prompts = places + 1 - (tokens == PAD).cumprod(dim=1).sum(dim=1)
    is_over = tokens.shape[1] - 1 - places >= prompts
    scores = scores.clone()
    scores[:, [PAD, END, ENDS_PROMPT]] = -torch.inf
    scores[is_over] = -torch.inf
    scores[is_over, END] = 0.0
    return scores


def checksum(rows: list[list[int]]) -> float:
    """Return a number that tells whether the same tokens were written for the same rows."""
    total = 0
    for index, row in enumerate(rows):
        words = [token for token in row if token >= FIRST_WORD]
        total += sum((index + 1) * (place + 1) * token for place, token in enumerate(words)) % 1_000_003
    return float(total)


# -- memory ------------------------------------------------------------------------------------------------------


def memory_of_files(rows: int) -> list[float]:
    """Return by how many bytes the memory of each of two ranks grows while scores of so many rows go to files."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_write_files, (Path(folder), rows), nprocs=2)
        return [float((Path(folder) / f"rank-{rank}").read_text()) for rank in range(2)]


def _write_files(rank: int, folder: Path, rows: int) -> None:
    from benchmarks.fresh import peak_memory

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainer = _trainer(nn.Linear(8, SCORES), batch_size=256)
    inputs, labels = torch.randn(rows, 8), torch.arange(rows) % SCORES
    trainer.predict(TensorDataset(inputs[:4096], labels[:4096]), to=folder / "first")  # what is loaded once
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = peak_memory()
    written = trainer.predict(TensorDataset(inputs, labels), to=folder / "all")
    (folder / f"rank-{rank}").write_text(str(peak_memory() - before))
    assert written.predictions.shape == (rows, SCORES)
    np.testing.assert_array_equal(written.labels, labels.numpy())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
