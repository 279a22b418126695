"""`trainer-lib train`: each task is learned from a small file, as a script would, and bad input is named."""

import json
import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.launched import PYTHON_PATH
from trainer_lib import Trainer, TrainingArguments, set_seed
from trainer_lib.commands.main import main
from trainer_lib.commands.train.train_arguments import TrainArguments
from trainer_lib.commands.train.train_help import TOPICS, declared, help_text
from trainer_lib.testing import reset_states
from trainer_lib.trainer.arguments.declaration import settings

WORDS = ["[PAD]", "[UNK]", "[EOS]", *re.findall(r"\w+", "the a film was good bad we they saw read one two three")]
SMALL: dict[str, Any] = {
    "bert": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "initializer_range": 0.3,
    },
    "llama": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "initializer_range": 0.3,
    },
    "t5": {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 2},
    "vit": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 8,
        "patch_size": 4,
    },
}
QUICK = ["--use_cpu", "--progress_bar", "false", "--log_every", "never", "--save_every", "never"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder, which is the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def tokenizer(folder: Path) -> Path:
    """Write a tokenizer of words, and return its folder."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]")
    made.save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


def texts(count: int = 64) -> list[str]:
    draw = random.Random(0)
    return [f"{draw.choice(['the', 'a'])} film was {draw.choice(['good', 'bad'])} we saw one" for _ in range(count)]


def reviews(count: int = 64) -> list[dict[str, Any]]:
    return [{"sentence": text, "label": "pos" if "good" in text else "neg"} for text in texts(count)]


def jsonl(file: Path, rows: Sequence[Any]) -> Path:
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def train(*options: Any, model: str = "", **more: Any) -> dict[str, float]:
    """Train by the command, and return the metrics of its last evaluation."""
    reset_states()
    words = ["train", *map(str, options), *QUICK]
    if model:
        words += ["--from_config", "--model", model, "--model_options", json.dumps(SMALL[model])]
    for name, value in more.items():
        words += [f"--{name}", str(value)]
    assert main(words) == 0
    return metrics()


def metrics() -> dict[str, float]:
    run = max(Path("runs").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    return json.loads((run / "run.json").read_text())["metrics"]


def saved() -> Path:
    (folder,) = Path("runs").glob("*/model")
    return folder


def test_texts_are_classified_as_a_script_does_and_the_model_can_be_used(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, rows = tokenizer(folder), reviews()
    file = jsonl(folder / "train.jsonl", rows)
    held_out = jsonl(folder / "eval.jsonl", rows[:16])
    options = {"num_train_epochs": 5, "learning_rate": 0.01, "eval_data": held_out, "tokenizer": words}
    result = train("--task", "text-classification", "--data", file, model="bert", **options)
    captured = capsys.readouterr()
    assert "64 rows: text from 'sentence', labels from 'label' (2 classes: neg, pos)" in captured.err
    assert "BertForSequenceClassification (bert, new weights)" in captured.err
    assert result["eval_accuracy"] == 1.0
    assert captured.out.splitlines()[-1] == f"The model is in {saved().resolve()}."

    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        BertConfig,
        BertForSequenceClassification,
    )

    reset_states()
    set_seed(42)
    made = AutoTokenizer.from_pretrained(words)
    labels: dict[str, Any] = {"id2label": {0: "neg", 1: "pos"}, "label2id": {"neg": 0, "pos": 1}}
    config = BertConfig(
        **SMALL["bert"], vocab_size=len(made), pad_token_id=0, bos_token_id=None, eos_token_id=2, **labels
    )
    model = BertForSequenceClassification(config)
    samples = [{**made(row["sentence"]), "labels": int(row["label"] == "pos")} for row in rows]
    args = TrainingArguments(
        num_train_epochs=5, learning_rate=0.01, use_cpu=True, progress_bar=False, log_every="never"
    )
    script = Trainer(model, args, train_dataset=samples, eval_dataset=samples[:16], processing_class=made)
    script.fit()
    by_command: Any = AutoModelForSequenceClassification.from_pretrained(saved())
    for (name, expected), actual in zip(model.state_dict().items(), by_command.state_dict().values(), strict=True):
        assert torch.equal(expected, actual), name
    inputs = AutoTokenizer.from_pretrained(saved())(["a film was bad we saw one"], return_tensors="pt")
    assert by_command.config.id2label[int(by_command.eval()(**inputs).logits.argmax())] == "neg"
    assert json.loads((saved() / "task.json").read_text())["classes"] == ["neg", "pos"]


def make_bag(vocab_size: int, num_labels: int) -> nn.Module:
    """Return a model that sums the words of a text; the command calls it by its path."""

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(vocab_size, num_labels)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return (self.words(input_ids) * attention_mask[..., None]).sum(dim=1)

    return Bag()


@pytest.mark.slow
def test_a_saved_model_and_one_of_a_factory_are_trained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, file = tokenizer(folder), jsonl(folder / "train.jsonl", reviews())
    base = ["--task", "text-classification", "--data", file, "--eval_data", file, "--learning_rate", 0.01]
    train(*base, model="bert", tokenizer=words, num_train_epochs=5)
    first = saved().rename(folder / "first")
    config = json.loads((first / "config.json").read_text())
    result = train(*base, "--model", first, num_train_epochs=0.1, output_dir="runs")
    assert result["eval_accuracy"] == 1.0  # with the tokenizer and the weights of the folder
    ratings = [{"sentence": row["sentence"], "label": str(number % 3)} for number, row in enumerate(reviews())]
    jsonl(file, ratings)  # another number of classes: a new head
    train(*base, "--model", first, max_steps=1)
    latest = max(Path("runs").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert json.loads((latest / "model" / "config.json").read_text())["id2label"] == {"0": "0", "1": "1", "2": "2"}
    assert config["id2label"] == {"0": "neg", "1": "pos"}
    jsonl(file, reviews())
    factory = ["--model", f"{__name__}:make_bag", "--tokenizer", words]
    assert train(*base, *factory, num_train_epochs=20)["eval_accuracy"] == 1.0
    capsys.readouterr()
    jsonl(file, [{"text": "a"}])
    assert (
        main(
            [
                "train",
                "--task",
                "causal-lm",
                "--data",
                str(file),
                *map(str, factory),
                "--model_options",
                "{num_labels: 2}",
            ]
        )
        == 2
    )
    assert "forward() has no parameter `labels`" in capsys.readouterr().err


def of_tokens(folder: Path) -> list[Any]:
    rows = [
        {"tokens": row.split(), "tags": ["ADJ" if word in ("good", "bad") else "O" for word in row.split()]}
        for row in texts()
    ]
    return ["token-classification", "bert", jsonl(folder / "data.jsonl", rows), "eval_accuracy", 1.0, 1.0]


def of_language(folder: Path) -> list[Any]:
    (folder / "data.txt").write_text("\n".join(texts()))
    return ["causal-lm", "llama", folder / "data.txt", "eval_perplexity", 1.0, 2.5]


def of_sequences(folder: Path) -> list[Any]:
    rows = [{"input": text, "output": "they read" if "good" in text else "two three"} for text in texts()]
    return ["seq2seq", "t5", jsonl(folder / "data.jsonl", rows), "eval_perplexity", 1.0, 1.5]


def of_numbers(folder: Path) -> list[Any]:
    rows = [{"text": text, "score": 1.5 if "good" in text else -0.5} for text in texts()]
    return ["regression", "bert", jsonl(folder / "data.jsonl", rows), "eval_mse", 0.0, 0.1]


@pytest.mark.parametrize(
    "made",
    [of_tokens, of_language, *(pytest.param(made, marks=pytest.mark.slow) for made in (of_sequences, of_numbers))],
)
def test_a_task_on_texts_is_learned(made: Callable[[Path], list[Any]], folder: Path) -> None:
    task, model, file, metric, low, high = made(folder)
    words = tokenizer(folder)
    options = {
        "num_train_epochs": 8,
        "learning_rate": 0.01,
        "eval_fraction": 0.25,
        "tokenizer": words,
        "max_length": 16,
    }
    result = train("--task", task, "--data", file, model=model, **options)
    assert low <= result[metric] <= high, result
    assert {"config.json", "model.safetensors", "task.json", "tokenizer.json"} <= {
        path.name for path in saved().iterdir()
    }


@pytest.mark.slow
def test_what_a_model_generates_is_compared(folder: Path) -> None:
    task, model, file, *_ = of_sequences(folder)
    options: dict[str, Any] = {"num_train_epochs": 8, "learning_rate": 0.01, "eval_fraction": 0.25}
    options["tokenizer"] = tokenizer(folder)
    options |= {"predict_with_generate": True, "generation_kwargs": "{max_new_tokens: 4}"}
    assert train("--task", task, "--data", file, model=model, **options)["eval_exact_match"] == 1.0


def squares(folder: Path) -> Path:
    from PIL import Image

    draw = np.random.default_rng(0)
    for number in range(24):
        kind = "bright" if number % 2 else "dark"
        (folder / "images" / kind).mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 100, (9, 9, 3)) + (150 if kind == "bright" else 0)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / "images" / kind / f"{number}.png")
    return folder / "images"


def make_network(num_labels: int, image_size: int, width: int = 4) -> nn.Module:
    """Return a network for images; the command calls it by its path."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size**2, width), nn.Tanh(), nn.Linear(width, num_labels))


def test_folders_of_images_are_classified(folder: Path) -> None:
    images = squares(folder)
    options = {"num_train_epochs": 4, "learning_rate": 0.01, "eval_fraction": 0.25}
    assert train("--task", "image-classification", "--data", images, model="vit", **options)["eval_accuracy"] == 1.0
    config = json.loads((saved() / "preprocessor_config.json").read_text())
    assert config["size"] == {"height": 8, "width": 8}
    factory = ["--model", f"{__name__}:make_network", "--model_options", "{width: 8}", "--image_size", 4]
    factory += ["--output_dir", folder / "others"]
    sys.modules.setdefault(__name__, sys.modules[make_network.__module__])
    reset_states()
    words = ["train", "--task", "image-classification", "--data", images, *factory, *QUICK, "--num_train_epochs", 4]
    assert main([*map(str, words), "--learning_rate", "0.01", "--eval_fraction", "0.25"]) == 0
    (run,) = (folder / "others").iterdir()
    assert json.loads((run / "run.json").read_text())["metrics"]["eval_accuracy"] == 1.0

    from trainer_lib.commands.train.train import make_trainer

    files = sorted(images.rglob("*.png"))
    rows = [{"path": str(file.relative_to(folder)), "label": file.parent.name} for file in files]
    listed: dict[str, Any] = {
        "data": str(jsonl(folder / "list.jsonl", rows)),
        "model": f"{__name__}:make_network",
        "image_size": 4,
    }
    _, by_list, banner = make_trainer(TrainArguments(task="image-classification", use_cpu=True, **listed))
    listed["data"] = str(images)
    _, by_folder, _ = make_trainer(TrainArguments(task="image-classification", use_cpu=True, **listed))
    assert "images from 'path', labels from 'label' (2 classes: bright, dark)" in banner
    for (pixels, label), (expected, number) in zip(by_list.train, by_folder.train, strict=True):
        assert torch.equal(pixels, expected)
        assert label == number


def flowers(file: Path, rows: int = 80) -> Path:
    draw = random.Random(1)
    lines = ["width,colour,height,kind"]
    for _ in range(rows):
        width, colour, height = draw.gauss(3, 1), draw.choice(["red", "blue"]), draw.gauss(100, 20)
        lines.append(f"{width:.3f},{colour},{height:.1f},{int(width + (colour == 'red') > 3.4)}")
    file.write_text("\n".join(lines))
    return file


def test_a_table_is_classified_as_a_script_does_and_numbers_are_predicted(folder: Path) -> None:
    file = flowers(folder / "flowers.csv")
    options: dict[str, Any] = {"num_train_epochs": 15, "learning_rate": 0.02, "label_column": "kind"}
    result = train("--task", "tabular", "--model", "mlp:8", "--data", file, eval_data=file, **options)
    assert result["eval_accuracy"] >= 0.95

    rows = [line.split(",") for line in file.read_text().splitlines()[1:]]
    values = [[float(w), float(c == "blue"), float(c == "red"), float(h)] for w, c, h, _ in rows]
    features, labels = torch.tensor(values), torch.tensor([int(row[3]) for row in rows])
    mean, std = features.mean(dim=0), features.std(dim=0, correction=0)

    class Standardize(nn.Module):
        def forward(self, numbers: torch.Tensor) -> torch.Tensor:
            return (numbers - mean) / std

    reset_states()
    set_seed(42)
    model = nn.Sequential(Standardize(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    args = TrainingArguments(
        num_train_epochs=15, learning_rate=0.02, use_cpu=True, progress_bar=False, log_every="never"
    )
    script = Trainer(
        model, args, train_dataset=(features, labels), eval_dataset=(features, labels), loss_fn=cross_entropy
    )
    assert result["eval_loss"] == pytest.approx(script.fit().metrics["eval_loss"], rel=1e-6)
    assert json.loads((saved() / "task.json").read_text())["features"] == [
        "width",
        "colour=blue",
        "colour=red",
        "height",
    ]

    options |= {"label_column": "height", "eval_data": file, "feature_columns": "[width, kind]", "output_dir": "other"}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    reset_states()
    assert main(["train", "--task", "regression", "--model", "mlp", "--data", str(file), *words, *QUICK]) == 0
    (run,) = Path("other").iterdir()
    height = torch.tensor([float(row[2]) for row in rows])
    assert json.loads((run / "run.json").read_text())["metrics"]["eval_mse"] < float(height.var(correction=0))


def test_every_form_of_data_holds_the_same_rows(folder: Path) -> None:
    import datasets
    import pyarrow
    from pyarrow import parquet

    from trainer_lib.commands.train.data_files import read_data

    rows = reviews(6)
    jsonl(folder / "rows.jsonl", rows)
    (folder / "rows.json").write_text(json.dumps(rows))
    for suffix, separator in (("csv", ","), ("tsv", "\t")):
        lines = [separator.join(row.values()) for row in [{"a": "sentence", "b": "label"}, *rows]]
        (folder / f"rows.{suffix}").write_text("\n".join(lines), encoding="utf-8-sig")
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    dataset = datasets.Dataset.from_list(rows).class_encode_column("label")  # numbers, with names
    dataset.save_to_disk(str(folder / "saved"))
    datasets.DatasetDict({"train": dataset, "test": dataset.select([0])}).save_to_disk(str(folder / "splits"))
    (folder / "files").mkdir()
    jsonl(folder / "files" / "train.jsonl", rows)
    jsonl(folder / "files" / "validation.jsonl", rows[:2])
    for name in ("rows.jsonl", "rows.json", "rows.csv", "rows.tsv", "rows.parquet", "saved", "splits", "files"):
        table, evaluation = read_data(str(folder / name))
        assert [table.columns[column] for column in ("sentence", "label")] == [
            [row[column] for row in rows] for column in ("sentence", "label")
        ], name
        assert (evaluation.rows if evaluation else 0) == {"splits": 1, "files": 2}.get(name, 0)


def test_long_values_and_other_line_separators_are_read(tmp_path: Path) -> None:
    from trainer_lib.commands.train.data_files import read_data

    (tmp_path / "long.csv").write_text(f'text,label\n"{"word " * 40_000}",1\nshort,0\n')
    table, _ = read_data(str(tmp_path / "long.csv"))
    assert [len(text) for text in table.columns["text"]] == [200_000, 5]
    (tmp_path / "lines.txt").write_bytes("a\u2028b\r\n\nc\x0cd\n".encode())
    table, _ = read_data(str(tmp_path / "lines.txt"))
    assert table.columns["text"] == ["a\u2028b", "c\x0cd"]
    assert table.where(1).endswith("line 3")


def test_options_override_the_file_and_a_run_resumes(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    file = flowers(folder / "flowers.csv")
    config = folder / "run.yaml"
    config.write_text(
        f"task: tabular\nmodel: mlp:4\ndata: {file}\nlabel_column: kind\nmax_steps: 5\nuse_cpu: true\n"
        "progress_bar: false\nlearning_rate: 1e-3\nsave_every: 2 steps\n"
    )
    assert main(["train", "--config", str(config), "--max-steps", "4"]) == 0
    assert "steps             4 in" in re.sub(r"steps +4", "steps             4", capsys.readouterr().out)
    reset_states()
    assert main(["train", "--config", str(config), "--resume=extend"]) == 0
    assert len(list(Path("runs").iterdir())) == 1
    assert metrics() == {}
    reset_states()
    assert main(["train", "--config", str(config), "--resume"]) == 0
    assert "is finished: there is nothing to train" in caplog.text
    reset_states()
    assert main(["train", "--config", str(config), "--dry-run", "--output_dir", "none"]) == 0
    assert "Check passed: TableNetwork" in capsys.readouterr().out
    assert not Path("none").exists()


BAD: list[Any] = [
    ("gone.csv", None, [], "--data gone.csv: there is no such file or folder"),
    ("empty.csv", "", [], "empty.csv is empty."),
    ("header.csv", "text,label\n", [], "header.csv has no rows."),
    ("rows.csv", "text,label\na,1\nb,2,3\n", [], "rows.csv, line 3: 3 values, and the first line names 2 columns."),
    (
        "twice.csv",
        "label,label\na,1\n",
        [],
        "twice.csv, line 1: the first line names the columns, and names 'label' twice",
    ),
    ("rows.jsonl", '{"text": "a"}\n\n{"text": \n', [], "rows.jsonl, line 3: invalid JSON: Expecting value"),
    ("list.jsonl", '["a"]\n', [], "list.jsonl, line 1: a row must be an object"),
    ("rows.json", '{"text": 1}', [], "rows.json must hold a list of objects, and holds a dict."),
    ("rows.parquet", "no parquet", [], "rows.parquet is no Parquet file that can be read"),
    ("rows.doc", "text", [], "Unknown kind of data file '.doc'."),
    ("ok.csv", "txt,label\na,1\n", ["--label_column", "labl"], "has no column 'labl' (--label_column)"),
    (
        "ok.csv",
        "a,b\n1,2\n",
        [],
        "ok.csv has no column that is known to hold the label. It has 'a', 'b'. Name it: --label_column",
    ),
    ("ok.jsonl", '{"a": 1, "label": 0.5}', [], "ok.jsonl, line 1: 'label' is 0.5, and must be an integer or a text."),
    ("ok.jsonl", '{"a": 1, "label": 1}\n{"a": 2}', [], "ok.jsonl, line 2: 'label' is missing"),
    ("one.csv", "a,label\n1,x\n2,x\n", [], "the column 'label' has the single class 'x'"),
    ("ok.csv", "a,label\n1,x\n,y\n", [], "ok.csv, line 3: 'a' is missing"),
    (
        "ok.csv",
        "a,label\n1,x\n2,y\n",
        ["--eval_data", "ok.csv", "--eval_fraction", "0.5"],
        "both set the evaluation data",
    ),
    ("ok.csv", "a,label\n1,x\n2,y\n", ["--model", "mlp:a"], "the widths of layers must be whole numbers"),
    ("ok.csv", "a,label\n1,x\n2,y\n", ["--model", "nowhere.at:all"], "the module 'nowhere.at' cannot be imported"),
    ("ok.csv", "a,label\n1,x\n2,y\n", ["--model", "bert"], "--task tabular does not fit --model bert."),
    ("ok.csv", "a,label\n1,x\n2,y\n", ["--task", "tabulr"], "Did you mean 'tabular'?"),
    ("ok.csv", "a,label\n1,x\n2,y\n", ["--max_stps", "3"], "Did you mean 'max_steps'?"),
    (
        "ok.csv",
        "text,label\na,x\nb,y\n",
        ["--task", "text-classification"],
        "does not fit --model mlp, which takes numbers",
    ),
    (
        "ok.csv",
        "text,label\na,x\nb,y\n",
        ["--task", "text-classification", "--model", "./no"],
        "The model './no' cannot be read",
    ),
]


@pytest.mark.parametrize(("name", "content", "options", "message"), BAD)
def test_bad_input_is_named(
    name: str, content: str | None, options: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (folder / name).write_text(content)
    base = {
        "--task": "tabular",
        "--model": "mlp",
        "--data": name,
        **dict(zip(options[::2], options[1::2], strict=True)),
    }
    assert main(["train", "--use_cpu", *(word for pair in base.items() for word in pair)]) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs").exists()


def test_the_line_of_a_file_of_arguments_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, message in (
        ("task: tabular\nmax_stps: 3\n", "run.yaml, line 2: TrainArguments has no argument 'max_stps'"),
        ("task: tabular\nmodel: mlp\ndata: a\nlearning_rate: fast\n", "run.yaml, line 4: learning_rate"),
        ("task: tabular\n\ttabs: 1\n", "run.yaml, line 2: invalid YAML"),
    ):
        (folder / "run.yaml").write_text(text)
        assert main(["train", "--config", "run.yaml"]) == 2
        assert message in capsys.readouterr().err
    assert main(["train", "--config", "run.yaml", "--config", "gone.yaml"]) == 2


def test_a_task_that_does_not_fit_the_model_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = jsonl(folder / "rows.jsonl", [{"input": "a", "output": "b"}])
    words = ["--from_config", "--model", "vit", "--tokenizer", str(tokenizer(folder)), "--data", str(file)]
    assert main(["train", "--task", "seq2seq", *words]) == 2
    error = capsys.readouterr().err
    assert "--task seq2seq does not fit --model vit: transformers has no AutoModelForSeq2SeqLM of a vit." in error
    assert "It fits --task image-classification." in error


def test_rows_that_do_not_fit_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--from_config", "--model", "bert", "--tokenizer", str(tokenizer(folder)), "--use_cpu"]
    file = jsonl(folder / "words.jsonl", [{"tokens": ["a", "film"], "tags": ["O", "N"]}, {"tokens": ["a"], "tags": []}])
    assert main(["train", "--task", "token-classification", "--data", str(file), *words]) == 2
    assert "words.jsonl, line 2: 1 values in 'tokens' and 0 in 'tags'" in capsys.readouterr().err
    file = jsonl(folder / "images.jsonl", [{"image": "gone.png", "label": 1}, {"image": "gone.png", "label": 2}])
    words = ["--model", f"{__name__}:make_network", "--use_cpu"]
    assert main(["train", "--task", "image-classification", "--data", str(file), *words]) == 2
    assert "images.jsonl, line 1: the image 'gone.png' cannot be read" in capsys.readouterr().err.replace(
        f"{folder}/", ""
    )
    for name in ("datasets.config", "huggingface_hub.constants"):
        monkeypatch.setattr(f"{name}.HF_HUB_OFFLINE", True)  # it would try again for twenty seconds
    assert main(["train", "--task", "tabular", "--data", "user/data", "--model", "mlp", "--use_cpu"]) == 2
    assert "Hugging Face's datasets cannot load it by name" in capsys.readouterr().err


def test_labels_that_only_the_evaluation_has_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a.csv").write_text("n,label\n1,x\n2,y\n")
    (folder / "b.csv").write_text("n,label\n1,x\n2,z\n")
    assert main(shlex.split("train --task tabular --model mlp --data a.csv --eval_data b.csv --use_cpu")) == 2
    assert "b.csv, line 3: the class 'z' is not in the training data. Its classes: x, y." in capsys.readouterr().err


def test_help_is_what_is_declared_and_a_screen_a_topic(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    expected = {name: setting.text.replace("`", "") for name, setting in settings(TrainArguments).items()}
    assert {argument.name: argument.text for argument in declared()} == expected
    assert {setting.section for setting in settings(TrainArguments).values()}.__len__() == len(TOPICS)
    for topic in TOPICS.values():
        assert 2 <= len(help_text(topic).splitlines()) <= 50
        assert all(len(line) <= 120 for line in help_text(topic).splitlines())
    assert main(["train", "--help"]) == 0
    assert len(capsys.readouterr().out.splitlines()) <= 50
    monkeypatch.setenv("COLUMNS", "80")
    assert all(len(line) <= 80 for topic in TOPICS.values() for line in help_text(topic).splitlines())
    assert main(["train", "--help", "optimzer"]) == 2
    assert "Did you mean 'optimizer'?" in capsys.readouterr().err
    assert main(["train"]) == 2


@pytest.mark.launch
@pytest.mark.slow
def test_the_program_trains_on_two_ranks_and_helps_without_torch(folder: Path) -> None:
    flowers(folder / "flowers.csv")
    program = [sys.executable, "-m", "trainer_lib"]
    words = shlex.split("train --task tabular --model mlp --data flowers.csv --label_column kind --eval_fraction 0.2")
    words += shlex.split("--num_train_epochs 15 --learning_rate 0.02 --per_device_train_batch_size 4") + QUICK
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 200}
    launcher = ["launch", "--cpu", "--num_processes", "2", "-m", "trainer_lib"]
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    done = subprocess.run([*program, *launcher, *words], env=environment, check=False, **options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("The model is in ") == 1
    assert metrics()["eval_accuracy"] >= 0.8
    check = (
        "import sys; from trainer_lib.commands.main import main; "
        "main(['train', '--help']); print('torch' in sys.modules)"
    )
    helped = subprocess.run([sys.executable, "-c", check], env=environment, check=False, **options)
    assert helped.stdout.splitlines()[-1] == "False"
