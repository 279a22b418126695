"""Model cards: the facts about a run, for people and for the Hub."""

import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from torch import nn

from tests.pages import run_example
from tests.trainer.tasks import arguments, points, trainer
from trainer_lib import Trainer, TrainingArguments


def parsed(card: str) -> Any:
    """Return what the Hub's client reads of a card."""
    from huggingface_hub import ModelCard

    read = ModelCard(card)
    assert str(ModelCard(str(read))) == str(read)
    return read


def section(card: str, name: str) -> str:
    match = re.search(rf"## {name}\n\n(.*?)(?=\n## |\Z)", card, re.DOTALL)
    assert match is not None, card
    return match[1]


def test_it_tells_figures_arguments_and_versions(tmp_path: Any) -> None:
    used = trainer(
        arguments(output_dir=tmp_path / "runs", run_name="mine", warmup="5%", optimizer_kwargs={"betas": [0.8, 0.9]}),
        eval_dataset=points(16),
        metrics=["accuracy"],
    )
    result = used.fit()
    card = used.model_card(name="sides", license="mit", language=["en", "de"], tags=["points", "trainer_lib"])
    read = parsed(card)
    assert read.data.to_dict() == {
        "library_name": "trainer_lib",
        "license": "mit",
        "language": ["en", "de"],
        "tags": ["trainer_lib", "points"],
        "metrics": ["accuracy"],
    }
    assert "# sides" in read.text
    assert "A `Sequential` of 74 parameters, trained with trainer_lib: 10 updates of 80 samples in 2 epochs" in card
    results = section(card, "Results")
    assert f"| training loss | {result.metrics['loss']:.6g} |" in results
    assert f"| eval_accuracy | {result.metrics['eval_accuracy']:.6g} |" in results
    table = section(card, "Evaluations").strip().splitlines()
    assert table[0] == "| step | epoch | eval_loss | eval_accuracy |"
    evaluated = [entry for entry in result.history if "eval_loss" in entry]
    expected = [f"| {result['step']} | {result['epoch']:.4g} | {result['eval_loss']:.6g} |" for result in evaluated]
    assert [line[: len(start)] for line, start in zip(table[2:], expected, strict=True)] == expected
    text = section(card, "Training")
    assert "warmup: 5%" in text
    assert "learning_rate: 0.05" in text
    assert "betas:" in text
    for private in ("output_dir", str(tmp_path), "run_name"):
        assert private not in card
    assert f"- torch {version('torch')}" in section(card, "Versions")


@dataclass(kw_only=True)
class MoreArguments(TrainingArguments):
    """Arguments with one of the script's."""

    label_smoothing_start: float = 0.1


def test_arguments_of_a_subclass_are_listed() -> None:
    args = MoreArguments(max_steps=2, use_cpu=True, label_smoothing_start=0.3)
    assert "label_smoothing_start: 0.3" in section(trainer(args).model_card(), "Training")


def test_results_are_listed_where_the_hub_can_know_of_what(tmp_path: Any) -> None:
    used = trainer(
        arguments(eval_every="1 epoch", load_best_at_end=True, output_dir=tmp_path, num_train_epochs=4),
        eval_dataset={"near": points(16), "far": points(24)},
        metrics=["accuracy"],
        callbacks=None,
    )
    used.args.metric_for_best, used.args.greater_is_better = "eval_far_loss", True  # so that the first is the best
    result = used.fit()
    assert result.state.best is not None
    step = result.state.best.step
    best = next(entry for entry in result.history if entry["step"] == step and "eval_far_loss" in entry)
    assert best["step"] < result.state.step
    read = parsed(used.model_card(name="sides", task="tabular-classification", datasets="me/points"))
    assert read.data.datasets == ["me/points"]
    assert read.data.pipeline_tag == "tabular-classification"
    results = {(result.dataset_split, result.metric_type): result.metric_value for result in read.data.eval_results}
    assert results == {("near", "accuracy"): best["eval_near_accuracy"], ("far", "accuracy"): best["eval_far_accuracy"]}
    assert {(result.task_type, result.dataset_type, result.dataset_name) for result in read.data.eval_results} == {
        ("tabular-classification", "me/points", "points")
    }
    assert read.data.model_name == "sides"
    # Without a task there is nothing that they could be listed under.
    assert "model-index" not in used.model_card(datasets="me/points")
    assert "model-index" not in used.model_card(task="tabular-classification")


def test_a_model_and_data_of_others_say_what_they_are() -> None:
    from transformers import BertConfig, BertForSequenceClassification

    config: Any = BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9
    )
    model = BertForSequenceClassification(config)
    model.config._name_or_path = "google/bert-of-nine"
    data = Dataset.from_dict({"input_ids": [[1, 2], [3, 4]], "labels": [0, 1]}).with_format("torch")
    data.info.dataset_name = "imdb"
    args = arguments(max_steps=1, report_to=[], optimizer_kwargs={"betas": (0.9, 0.99)})
    used = Trainer(model, args, train_dataset=data, eval_dataset=data, metrics=["accuracy"])
    used.fit()
    read = parsed(used.model_card())
    metadata = read.data.to_dict()
    assert {name: metadata[name] for name in ("library_name", "base_model", "datasets", "pipeline_tag")} == {
        "library_name": "transformers",
        "base_model": "google/bert-of-nine",
        "datasets": ["imdb"],
        "pipeline_tag": "text-classification",
    }
    assert [result.metric_type for result in read.data.eval_results] == ["accuracy"]
    assert "from [google/bert-of-nine](https://huggingface.co/google/bert-of-nine), trained on imdb" in read.text


@pytest.mark.parametrize("name", ["./mine", "/tmp/bert", "", None])
def test_a_folder_of_this_machine_is_no_base_model(name: Any) -> None:
    class Config:
        _name_or_path = name

    class Model(nn.Linear):
        config = Config()

    card = Trainer(Model(2, 2), arguments()).model_card()
    assert "base_model" not in card
    assert parsed(card).data.to_dict() == {"library_name": "trainer_lib", "tags": ["trainer_lib"]}


def test_the_example_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_example("other_libraries.md", "trainer.model_card(", tmp_path)
    assert [result.metric_type for result in parsed(names["card"]).data.eval_results] == ["accuracy"]
    assert sorted(path.name for path in (tmp_path / "sides").iterdir()) == [
        "README.md",
        "model.pt2",
        "model.safetensors",
    ]
