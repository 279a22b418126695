"""Train a language model on texts of different lengths, with equal weight for each token of an update.

The mean over the tokens of an update is not the mean of the means of its micro-batches: so the tokens of all of them,
on all processes, are counted before the first forward.
"""

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

from trainer_lib import Accelerator
from trainer_lib.utils import DataLoaderConfiguration, set_seed

IGNORED = -100


class Texts(Dataset[Tensor]):
    """88 texts of 4 to 32 tokens, each counting on from somewhere."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.lengths = torch.randint(4, 33, (88,), generator=generator).tolist()
        self.starts = torch.randint(1, 64, (88,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        return 1 + (self.starts[index] + torch.arange(self.lengths[index])) % 63


def main() -> None:
    arguments = parse_arguments()
    steps = arguments.gradient_accumulation_steps
    accelerator = Accelerator(
        cpu=arguments.cpu,
        mixed_precision=arguments.mixed_precision,
        gradient_accumulation_steps=steps,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    set_seed(arguments.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    loader = DataLoader(Texts(), arguments.batch_size, collate_fn=pad)
    updates_an_epoch = -(-len(loader) // steps)
    scheduler = get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=arguments.warmup, num_training_steps=arguments.epochs * updates_an_epoch
    )
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    model.train()
    losses: list[float] = []
    rates: list[float] = []
    for _ in range(arguments.epochs):
        iterator = iter(loader)
        remaining = len(loader)
        for _ in range(updates_an_epoch):
            batches = [next(iterator) for _ in range(min(steps, remaining))]
            remaining -= len(batches)
            # The first token of a text has nothing before it to be predicted from.
            tokens = sum((batch["labels"][:, 1:] != IGNORED).sum() for batch in batches)
            num_items_in_batch = accelerator.gather(tokens).sum().item()

            total = torch.zeros((), device=accelerator.device)
            for number, batch in enumerate(batches):
                is_last = number == len(batches) - 1
                local = is_last or accelerator.num_processes == 1
                with contextlib.nullcontext() if local else model.no_sync():
                    loss = model(**batch, num_items_in_batch=num_items_in_batch).loss
                    # backward divides by the accumulation steps, and the processes' gradients are averaged: the count
                    # of tokens has both in it already.
                    accelerator.backward(loss * steps * accelerator.num_processes)
                total += loss.detach()
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rates.append(scheduler.get_last_lr()[0])
            scheduler.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(total, reduction="sum").item())

    if accelerator.is_main_process:
        figures = {"losses": losses, "rates": rates, "last_rate": scheduler.get_last_lr()[0]}
        Path(arguments.figures).write_text(json.dumps(figures))
    accelerator.end_training()


def pad(texts: list[Tensor]) -> dict[str, Any]:
    """Return a batch, as long as the longest of its texts."""
    inputs = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return {
        "input_ids": inputs,
        "attention_mask": (inputs != 0).long(),
        "labels": inputs.masked_fill(inputs == 0, IGNORED),
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=8, help="of all processes together")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=2, help="updates until the learning rate is reached")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--figures", required=True, help="where to write losses and learning rates")
    return parser.parse_args()


if __name__ == "__main__":
    main()
