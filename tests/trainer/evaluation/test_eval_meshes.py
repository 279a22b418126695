"""Evaluations and predictions of models that are split or in a pipeline are those of one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.strategies.split import WITH_VOCABULARY, Plain, gpt2, llama, model_of
from tests.trainer.fit.meshes import MESHES, replicas_of
from tests.worlds import run_world
from trainer_lib import ParallelismConfig, Trainer, TrainingArguments
from trainer_lib.callbacks import EarlyStopping
from trainer_lib.utils import TorchTensorParallelConfig

LENGTH, VOCABULARY, SAMPLES = 8, 63, 11  # the last batch has three rows


def rows(count: int) -> list[dict[str, Any]]:
    """Return texts of which different numbers of tokens count."""
    random = torch.Generator().manual_seed(count)
    tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=random)
    labels = tokens.clone()
    for row, label in enumerate(labels):
        label[: row % 5] = -100
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def sums(results: Any) -> dict[str, float]:
    """Return what all rows have a part in."""
    predictions, labels = (torch.as_tensor(values) for values in results)
    return {"rows": len(labels), "labels": float(labels.sum()), "size": float(predictions.double().norm())}


def evaluated(mesh: str, kind: Callable[[], nn.Module], folder: Path) -> Any:
    sizes: dict[str, Any] = MESHES[mesh][1]
    plan = TorchTensorParallelConfig(plan=WITH_VOCABULARY if kind is Plain else None)
    batch = 4 // replicas_of(mesh)
    arguments = TrainingArguments(
        output_dir=str(folder / mesh), max_steps=12, learning_rate=0.3, optimizer="sgd", use_cpu=True, seed=3,
        progress_bar=False, per_device_train_batch_size=batch, per_device_eval_batch_size=batch, eval_every=1,
        save_every=1, load_best_at_end=True, metric_for_best="size", greater_is_better=False,
        parallelism=ParallelismConfig(**sizes, tp_handler=plan) if sizes else None,
    )  # fmt: skip
    trainer = Trainer(
        model_of(kind),
        arguments,
        train_dataset=rows(40),
        eval_dataset=rows(SAMPLES),
        compute_metrics=sums,
        callbacks=[EarlyStopping(patience=2)],
    )
    before = trainer.predict(rows(5))
    result = trainer.fit()
    metrics = [{name: entry[name] for name in ("eval_loss", "eval_rows", "eval_labels", "eval_size")}
               for entry in result.history if "eval_loss" in entry]  # fmt: skip
    final = trainer.evaluate()
    return (
        torch.as_tensor(before.predictions),
        torch.as_tensor(before.label_ids),
        metrics,
        {name: final[name] for name in metrics[0]},
    )


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp2", "pp2", "tp2_dp2", "pp2_dp2"])
@pytest.mark.parametrize("kind", [Plain, gpt2, llama], ids=lambda kind: kind.__name__)
def test_evaluations_are_those_of_one_process(mesh: str, kind: Any, tmp_path: Path) -> None:
    (expected,) = run_world(evaluated, ("one", kind, tmp_path), 1)
    assert 2 < len(expected[2]) <= 12
    assert expected[3] == min(expected[2], key=lambda metrics: metrics["eval_size"])
    assert expected[3]["eval_rows"] == SAMPLES
    for predictions, labels, metrics, final in run_world(evaluated, (mesh, kind, tmp_path), MESHES[mesh][0]):
        torch.testing.assert_close(predictions, expected[0], rtol=1e-5, atol=1e-6)
        assert torch.equal(labels, expected[1])
        assert len(metrics) == len(expected[2]), "stops at the same step"
        for actual, other in zip([*metrics, final], [*expected[2], expected[3]], strict=True):
            assert actual == pytest.approx(other, rel=1e-5)


def test_a_pipeline_trains_after_an_evaluation() -> None:
    def losses() -> list[float]:
        torch.manual_seed(0)
        data = [(torch.ones(4), torch.zeros(4))] * 4
        arguments = TrainingArguments(
            max_steps=2, use_cpu=True, progress_bar=False, parallelism=ParallelismConfig(pp_size=2), log_every=1
        )
        loss_fn = nn.functional.mse_loss
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))  # stages of different sizes
        trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data, loss_fn=loss_fn)
        before = trainer.evaluate()["eval_loss"]
        return [before, trainer.fit().history[0]["loss"]]

    for before, first in run_world(losses):
        assert first == pytest.approx(before, rel=1e-6)
