"""Makes the checkpoints beside this file with the libraries that they are of, and notes what these do when they go on.

Run by hand, with transformers and accelerate: `python tests/data/foreign/make.py`. The tests read what it wrote.
"""

import contextlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import set_seed
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

HERE = Path(__file__).resolve().parent
STEPS, SAVED_AT = 10, 7  # 5 updates a pass


def language_model() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=1, n_head=2))


def texts() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(40, (40, 8), generator=torch.Generator().manual_seed(1))
    # The first label of a row is predicted by none; transformers would count it.
    return [{"input_ids": row, "labels": torch.cat([torch.tensor([-100]), row[1:]])} for row in tokens]


class Noting(Trainer):
    """Notes the loss of each update."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.losses: list[float] = []

    def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
        loss = super().training_step(*arguments, **options)
        self.losses.append(loss.item())
        return loss


def transformers_trainer(folder: str, resume: str | None = None) -> list[float]:
    args = TrainingArguments(
        output_dir=folder,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        weight_decay=0.1,
        warmup_steps=3,
        lr_scheduler_type="cosine",
        train_sampling_strategy="sequential",
        save_steps=SAVED_AT,
        logging_steps=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Noting(model=language_model(), args=args, train_dataset=texts())
    trainer.train(resume_from_checkpoint=resume)
    return trainer.losses


def accelerate_loop(folder: Path, resume: bool) -> list[float]:
    set_seed(3)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    # No dropout: on its resumption Accelerate draws a seed for the loader first, so that masks are others than before.
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(3))
    data = torch.utils.data.TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses: list[float] = []
    done = 0
    if resume:
        accelerator.load_state(str(folder))
        done = SAVED_AT
    while done < STEPS:
        for batch, targets in skip_first_batches(loader, done % 5):
            loss = torch.nn.functional.cross_entropy(model(batch), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            done += 1
            if done == SAVED_AT and not resume:
                accelerator.save_state(str(folder))
                return losses
    return losses


def main() -> None:
    """Make them."""
    for name in ("transformers", "accelerate"):
        shutil.rmtree(HERE / name, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):  # paths are noted in what is saved
        whole = transformers_trainer("run")
        checkpoint = f"run/checkpoint-{SAVED_AT}"
        resumed = transformers_trainer("again", checkpoint)
        shutil.copytree(checkpoint, HERE / "transformers")
    accelerate_loop(HERE / "accelerate", resume=False)
    assert resumed == whole[2 * SAVED_AT :]
    # Each is of two micro-batches, of which transformers tells the parts.
    noted = {"transformers": [sum(pair) for pair in zip(resumed[::2], resumed[1::2], strict=True)]}
    noted["accelerate"] = accelerate_loop(HERE / "accelerate", resume=True)
    (HERE / "losses.json").write_text(json.dumps(noted, indent=1) + "\n")


if __name__ == "__main__":
    main()
