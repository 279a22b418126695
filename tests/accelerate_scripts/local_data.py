"""Text pairs, images, a tokenizer, a tiny BERT and a metric, for scripts that would load them from the Hub."""

import json
import random
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

WORDS = "the a cat dog bird sees hears likes red blue green small large house tree river and or not".split()  # noqa: SIM905


def text_pairs(count: int, seed: int) -> list[dict[str, Any]]:
    """Return pairs of sentences of 3 to 9 words; the label says whether they begin with the same word."""
    source = random.Random(seed)
    pairs = []
    for index in range(count):
        first, second = ([source.choice(WORDS) for _ in range(source.randint(3, 9))] for _ in range(2))
        if source.random() < 0.5:
            second[0] = first[0]
        label = int(first[0] == second[0])
        pairs.append({"idx": index, "sentence1": " ".join(first), "sentence2": " ".join(second), "label": label})
    return pairs


def import_models() -> None:
    """Import what a process that is forked from this one would import by itself."""
    import_module("datasets")
    for name in ("bert", "gpt2"):
        import_module(f"transformers.models.{name}.modeling_{name}")


def load_dataset(*_: Any, **__: Any) -> Any:
    """Return training and validation pairs."""
    from datasets import Dataset, DatasetDict

    sizes: dict[str, Any] = {"train": 88, "validation": 37}
    return DatasetDict({name: Dataset.from_list(text_pairs(size, size)) for name, size in sizes.items()})


@cache
def tokenizer() -> Any:
    """Return a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


def classifier() -> Any:
    """Return a BERT with two small layers and random weights."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    return BertForSequenceClassification(BertConfig(vocab_size=len(WORDS) + 2, max_position_embeddings=32, **sizes))


def text_loaders(accelerator: Any, batch_size: int, seed: int = 1) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return loaders of tokenized pairs, padded to the longest of a batch, as Accelerate's examples make them."""
    with accelerator.main_process_first():
        pairs = load_dataset().map(
            lambda rows: tokenizer()(rows["sentence1"], rows["sentence2"], truncation=True, max_length=None),
            batched=True,
            remove_columns=["idx", "sentence1", "sentence2"],
        )
    pairs = pairs.rename_column("label", "labels")

    def pad(rows: list[Any]) -> Any:
        multiple = None if accelerator.mixed_precision == "no" else 8
        return tokenizer().pad(rows, padding="longest", pad_to_multiple_of=multiple, return_tensors="pt")

    order = _order(accelerator, seed)
    return (
        DataLoader(pairs["train"], shuffle=True, collate_fn=pad, batch_size=batch_size, generator=order),
        DataLoader(pairs["validation"], shuffle=False, collate_fn=pad, batch_size=8),
    )


class Images(Dataset[dict[str, Any]]):
    """Digits of 8 x 8 pixels."""

    def __init__(self, start: int, stop: int) -> None:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        self._images = torch.tensor(images[start:stop], dtype=torch.float32).view(-1, 1, 8, 8) / 16
        self.labels = torch.tensor(labels[start:stop])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self._images[index], "label": self.labels[index]}


def image_loaders(
    accelerator: Any, batch_size: int, images: int = 68, seed: int = 1
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return a shuffled loader of digits to train on, and one of 37 others."""
    order = _order(accelerator, seed)
    return (
        DataLoader(Images(0, images), shuffle=True, batch_size=batch_size, generator=order),
        DataLoader(Images(200, 237), shuffle=False, batch_size=8),
    )


def _order(accelerator: Any, seed: int) -> torch.Generator | None:
    # On several processes, only loaders with a generator have the same order in both libraries.
    return torch.Generator().manual_seed(seed) if accelerator.num_processes > 1 else None


def image_model() -> nn.Module:
    """Return a network with running statistics and dropout."""
    # Without a bias, whose gradients would be zero but for rounding, which Adam amplifies.
    body = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    return nn.Sequential(body, nn.Dropout(0.2), nn.Linear(144, 10))


class Accuracy:
    """The metric of `evaluate.load("glue", "mrpc")`, without its F1."""

    def __init__(self) -> None:
        self._right: list[bool] = []

    def add_batch(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
        """Count a batch."""
        self._right += (predictions == references).tolist()

    def compute(self, predictions: Iterable[Any] = (), references: Iterable[Any] = ()) -> dict[str, float]:
        """Return the share of right predictions, and start again."""
        right = self._right + [bool(left == other) for left, other in zip(predictions, references, strict=True)]
        self._right = []
        return {"accuracy": sum(right) / len(right), "samples": len(right)}


def write_deepspeed_config(path: Path, stage: int, *, model_only: bool = False) -> None:
    """Write a config of a ZeRO stage, where "auto" is filled; without optimizer and schedule if `model_only`."""
    sizes = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping"), "auto")
    config: dict[str, Any] = {**sizes, "gradient_accumulation_steps": 1, "steps_per_print": 1000}
    config |= {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": stage}}
    if not model_only:
        warm_up = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
        config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}
        config["scheduler"] = {"type": "WarmupLR", "params": warm_up}
    path.write_text(json.dumps(config))


@contextmanager
def local_hub() -> Generator[None]:
    """Give these to whoever loads data, models or metrics from the Hub."""
    import datasets
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    import_models()

    evaluate: Any = ModuleType("evaluate")
    evaluate.load = lambda *_: Accuracy()
    stand_ins: list[tuple[Any, str, Callable[..., Any]]] = [
        (datasets, "load_dataset", load_dataset),
        (AutoTokenizer, "from_pretrained", lambda *_: tokenizer()),
        (AutoModelForSequenceClassification, "from_pretrained", lambda *_, **__: classifier()),
    ]
    with ExitStack() as patches:
        sys.modules["evaluate"] = evaluate
        patches.callback(sys.modules.pop, "evaluate")
        for owner, name, stand_in in stand_ins:
            patches.enter_context(patch.object(owner, name, stand_in))
        yield
