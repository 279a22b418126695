"""What a Trainer does besides training, on each mesh as in one process.

One run for each mesh shows several features: an update that is skipped because the loss of one sample is not finite,
requests of a callback on one rank, loss weights of rows with unlike numbers of targets, sample counts, EMA, an
evaluation whose last batch is short, and what `gather_for_metrics` returns.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.strategies.split import LENGTH, PLAIN, VOCABULARY, WITH_VOCABULARY, Plain, data, model_of
from tests.trainer.fit.meshes import MESHES, replicas_of
from tests.worlds import run_world
from trainer_lib import (
    Accelerator,
    ParallelismConfig,
    ParameterGroup,
    Trainer,
    TrainingArguments,
)
from trainer_lib.callbacks import EMA, Freeze
from trainer_lib.events import Callback, Run
from trainer_lib.launchers import ProcessFailedError
from trainer_lib.utils import TorchTensorParallelConfig

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # a linear layer with bias returns a view

BAD = VOCABULARY - 1  # a token that `data` never draws


class Spoiled(Plain):
    """A plain module whose loss is NaN where a token is bad: with cut sequences, on one rank."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = super().forward(input_ids, labels)
        outputs["loss"] = outputs["loss"] * torch.where((input_ids == BAD).any(), torch.nan, 1.0)
        return outputs


class Asks(Callback):
    """Asks on the last rank only for an evaluation, a checkpoint and the end; notes what happens when."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, int]] = []

    def on_step_begin(self, run: Run) -> None:
        if run.accelerator.is_last_process:
            asked = {0: "evaluate", 2: "save", 3: "stop"}.get(run.state.step)
            if asked:
                setattr(run.control, asked, True)

    def on_step_skipped(self, run: Run) -> None:
        self.notes.append(("skipped", run.state.step))

    def on_evaluate_end(self, run: Run, metrics: Any) -> None:
        self.notes.append(("evaluated", run.state.step))

    def on_save_begin(self, run: Run, folder: Path) -> None:
        self.notes.append(("saved", run.state.step))


def samples() -> list[dict[str, Tensor]]:
    """Return sequences with unlike numbers of targets; a token of the second update's first half is bad."""
    rows = data(29)
    for number, row in enumerate(rows):
        row["labels"][: number % (LENGTH - 1)] = -100
    rows[10]["input_ids"][3] = BAD
    return rows


def train(mesh: str, folder: Path) -> Any:
    sizes: dict[str, Any] = MESHES[mesh][1]
    replicas, handler, asks = replicas_of(mesh), TorchTensorParallelConfig(plan=WITH_VOCABULARY), Asks()
    args = TrainingArguments(
        max_steps=9, learning_rate=0.05, optimizer="sgd", use_cpu=True, progress_bar=False, log_every=1, shuffle=False,
        per_device_train_batch_size=4 // replicas, gradient_accumulation_steps=2, per_device_eval_batch_size=2, seed=3,
        max_grad_norm=0.5, on_nonfinite="skip", output_dir=folder, max_tokens=10**9,
        parallelism=ParallelismConfig(**sizes, tp_handler=handler) if sizes else None,
    )  # fmt: skip
    trainer = Trainer(
        model_of(Spoiled), args, train_dataset=samples(), eval_dataset=data(7), metrics=["accuracy"],
        callbacks=[EMA(0.9), asks],
    )  # fmt: skip
    result = trainer.fit()
    history = [{name: entry.get(name, -1.0) for name in ("loss", "grad_norm", "eval_loss")} for entry in result.history]
    evaluated = {name: value for name, value in trainer.evaluate().items() if not name.endswith("_per_second")}
    state = trainer.run.state
    model: Any = trainer.run.model
    weights = trainer.accelerator.get_state_dict(model)
    gathered, seven = list[int](), [*range(7)]
    loader: Any = DataLoader(seven, batch_size=2)  # pyright: ignore[reportArgumentType]  # a list is a dataset
    for batch in trainer.accelerator.prepare(loader):
        gathered += trainer.accelerator.gather_for_metrics(batch).tolist()
    counts = (state.step, state.samples, state.tokens, state.status, sorted(gathered))
    return history, evaluated, counts, asks.notes, {name: value.clone() for name, value in weights.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", ["tp2", "cp2", "sp2", "pp2", "tp2_fsdp2", "pp2_tp2", "pp2_cp2", "pp2_sp2", "tp2_cp2_fsdp2", "tp2_hsdp4"]
)
def test_guard_requests_weights_counts_and_evaluation(mesh: str, tmp_path: Path) -> None:
    (expected,) = run_world(train, ("one", tmp_path / "one"), 1)
    history, evaluated, counts, notes, weights = expected
    assert {("evaluated", 1), ("skipped", 1), ("saved", 3)} <= set(notes), "of one process"
    assert counts[0] == 4
    assert counts[-1] == list(range(7))
    for rank, actual in enumerate(run_world(train, (mesh, tmp_path / mesh), MESHES[mesh][0], timeout=150)):
        assert actual[0] == [pytest.approx(entry, rel=2e-6, nan_ok=True) for entry in history]
        assert actual[1] == pytest.approx(evaluated, rel=2e-6)
        assert actual[2] == counts
        assert actual[3] == notes
        if rank == 0:
            torch.testing.assert_close(actual[4], weights, rtol=1e-5, atol=1e-6)


def train_groups(mesh: str, folder: Path, steps: int) -> Any:
    sizes: dict[str, Any] = MESHES[mesh][1]
    groups = [
        ParameterGroup("embed.*", weight_decay=0.3),
        ParameterGroup("blocks.0.*", learning_rate=0.002),
        ParameterGroup("blocks.1.up.*", frozen=True),
        ParameterGroup("head.*", learning_rate=0.03),
    ]
    args = TrainingArguments(
        max_steps=steps, schedule_steps=6, learning_rate=0.01, weight_decay=0.1, use_cpu=True, progress_bar=False,
        log_every=1, per_device_train_batch_size=4, seed=3, output_dir=folder, save_every=3, parameter_groups=groups,
        parallelism=ParallelismConfig(**sizes) if sizes else None,
    )  # fmt: skip
    result = Trainer(model_of(Plain), args, train_dataset=data(20)).fit("extend")
    return [
        {name: value for name, value in entry.items() if name.startswith(("loss", "grad_norm", "learning_rate"))}
        for entry in result.history
        if "loss" in entry
    ]


def test_parameter_groups_of_single_stages_of_a_pipeline(tmp_path: Path) -> None:
    """Each group has parameters on one of the two ranks; a run resumes on the other mesh."""
    (expected,) = run_world(train_groups, ("one", tmp_path / "one", 6), 1)
    assert len(expected) == 6
    for first, second in (("pp2", "pp2"), ("pp2", "one"), ("one", "pp2")):
        folder = tmp_path / f"{first} {second}"
        run_world(train_groups, (first, folder, 3), MESHES[first][0], timeout=120)
        for actual in run_world(train_groups, (second, folder, 6), MESHES[second][0], timeout=120):
            assert actual == [pytest.approx(entry, rel=2e-5) for entry in expected]


def train_frozen(mesh: str, names: tuple[str, ...], **when: str) -> Any:
    sizes: dict[str, Any] = MESHES[mesh][1]
    args = TrainingArguments(
        max_steps=5, learning_rate=0.01, use_cpu=True, progress_bar=False, log_every=1, per_device_train_batch_size=4,
        parallelism=ParallelismConfig(**sizes) if sizes else None,
    )  # fmt: skip
    trainer = Trainer(model_of(Plain), args, train_dataset=data(20), callbacks=[Freeze(*names, **when)])
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.fit().history if "loss" in entry]


@pytest.mark.parametrize("whole_stage", [False, True])
def test_weights_of_one_stage_of_a_pipeline_are_frozen_for_a_time(whole_stage: bool) -> None:
    names = ("blocks.1.*", "norm.*", "head.*") if whole_stage else ("blocks.0.*",)
    train = partial(train_frozen, names=names, until="2 steps")
    (expected,) = run_world(train, ("one",), 1)
    for actual in run_world(train, ("pp2",), 2, timeout=120):
        assert actual == [pytest.approx(entry, rel=2e-5) for entry in expected]


def test_a_pipeline_cannot_be_frozen_whole() -> None:
    with pytest.raises(ProcessFailedError, match="freezes all trained weights"):
        run_world(partial(train_frozen, names=("*",), until="2 steps"), ("pp2",), 2, timeout=120)


def overflows(mesh: str) -> Any:
    """Return scale, skipped updates and norms of half precision, in which the second update overflows in one part."""
    sizes: dict[str, Any] = MESHES[mesh][1]
    config = ParallelismConfig(**sizes, tp_handler=TorchTensorParallelConfig(plan=PLAIN))
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", parallelism_config=config)
    model: nn.Module = model_of(Plain)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    outcomes: list[Any] = []
    for factor in (1.0, 1e30, 1.0):
        batch = torch.utils.data.default_collate(data(4))
        buffers = list(batch.values())
        with accelerator.maybe_context_parallel(buffers, [1] * len(buffers), set(buffers)):
            loss = model(**batch)["loss"]
            accelerator.backward(loss * factor if accelerator.is_main_process else loss)
        norm = float(accelerator.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        skipped = accelerator.optimizer_step_was_skipped
        outcomes.append((skipped, accelerator.scaler.get_scale(), None if skipped else norm))
    return outcomes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:No attention was computed")
@pytest.mark.parametrize("mesh", ["tp2", "cp2", "sp2", "tp2_fsdp2", "tp2_hsdp4"])
def test_an_overflow_on_one_rank_is_skipped_by_all(mesh: str) -> None:
    first, *others = run_world(overflows, (mesh,), MESHES[mesh][0], timeout=150)
    assert [skipped for skipped, *_ in first] == [False, True, False]
    assert first[2][1] == first[0][1] / 2, "the scale is halved"
    assert others == [first] * len(others)
