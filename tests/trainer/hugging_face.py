"""A small task for tests beside Hugging Face's own Trainer: sequences, and a model of transformers that learns them."""

import os
import re
import runpy
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

DOCS = Path(__file__).parents[2] / "docs"
SIZES: dict[str, Any] = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "vocab_size": 13,
    "max_position_embeddings": 8,
}


def model(dropout: float = 0.0) -> Any:
    """Return a language model, the same each time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, attention_dropout=dropout, bos_token_id=1, eos_token_id=2))


def rows(count: int = 18, *, ragged: bool = False) -> Any:
    """Return sequences as a dataset of Hugging Face; ragged, the last tokens of some do not count."""
    from datasets import Dataset

    ids = torch.randint(13, (count, 8), generator=torch.Generator().manual_seed(2))
    lengths = torch.tensor([8, 3, 5, 2, 7, 4, 6]).repeat(count)[:count] if ragged else torch.full((count,), 8)
    labels = ids.masked_fill(torch.arange(8) >= lengths[:, None], -100)
    return Dataset.from_dict({"input_ids": ids.tolist(), "labels": labels.tolist()})


def their_arguments(folder: Path, **options: Any) -> transformers.TrainingArguments:
    """Return arguments of Hugging Face for a run in the order of the data, 3 steps a pass: 4 + 4, 4 + 4, 2 samples."""
    quiet: dict[str, Any] = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "save_strategy": "no",
        "train_sampling_strategy": "sequential",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    if "WORLD_SIZE" in os.environ:  # a process of a group, where they warn without it
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    return transformers.TrainingArguments(str(folder), **{**quiet, **options})


def run_snippet_of_page(page: str, folder: Path) -> dict[str, Any]:
    """Run the first example of a page as it stands there, in this process, and return its names."""
    script = folder / "example.py"
    script.write_text(re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)[0])
    return runpy.run_path(str(script))
