"""A step of a language model of the size of GPT-2, in bf16: `python -m benchmarks.language_model --device cuda`.

What the other benchmarks leave out on purpose, arithmetic, is nearly all of it. All contestants train the same weights
on the same tokens, in turn, and have to come to the same loss. Time is the median of the rounds; memory is the peak of
what tensors take on the GPU.
"""

import argparse
import math
import os
import tempfile
from collections.abc import Callable
from importlib import import_module
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset

from benchmarks import machine
from benchmarks.contestants.base import around
from benchmarks.contestants.trainer_lib import forget_state
from benchmarks.devices import add_device
from benchmarks.isolation import isolated
from benchmarks.meters import Meter, Stopwatch

VOCABULARY, MAX_NORM, RATE = 50_304, 1.0, 1e-4
WARM = 4  # steps before the clock starts; the first one compiles


class Tokens(Dataset[Any]):
    """Random tokens, which are their own labels."""

    def __init__(self, rows: int, length: int) -> None:
        self.rows = torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class FromStep:
    """Starts a meter when the steps that warm up are over."""

    def __init__(self, meter: Meter) -> None:
        self.meter, self.step = meter, 0

    def __call__(self, *_: Any, **__: Any) -> None:
        """Count a step that begins."""
        if self.step == WARM:
            self.meter.start()
        self.step += 1


def by_hand(task: argparse.Namespace, meter: Meter) -> Any:
    """Train."""
    model = new_model(task).to(task.device)
    compiled = torch.compile(model) if task.compile else model
    optimizer = AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    begin = FromStep(meter)
    for batch in DataLoader(rows(task), task.batch, pin_memory=task.device != "cpu"):
        begin()
        batch = {name: value.to(task.device, non_blocking=True) for name, value in batch.items()}
        with torch.autocast(task.device, torch.bfloat16):
            loss = compiled(**batch).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    meter.stop()
    return model


def by_trainer(task: argparse.Namespace, meter: Meter) -> Any:
    """Train with this library's `Trainer`."""
    from trainer_lib import Trainer, TrainingArguments
    from trainer_lib.callbacks import LambdaCallback

    arguments = TrainingArguments(
        num_train_epochs=1,
        per_device_train_batch_size=task.batch,
        shuffle=False,
        mixed_precision="bf16",
        compile=task.compile,
        learning_rate=RATE,
        lr_scheduler="constant",
        weight_decay=0.0,
        max_grad_norm=MAX_NORM,
        log_every=task.steps,
        progress_bar=False,
        use_cpu=task.device == "cpu",
    )
    begin = FromStep(meter)
    callback = LambdaCallback(on_step_begin=begin, on_epoch_end=lambda _: meter.stop())
    model = new_model(task)
    trainer = Trainer(model, arguments, train_dataset=rows(task), callbacks=[callback])
    trainer.fit()
    trainer.accelerator.free_memory()
    forget_state()
    return model


def by_hugging_face(task: argparse.Namespace, meter: Meter) -> Any:
    """Train with the Trainer of transformers."""
    from benchmarks.contestants.accelerate import forget_state as forget_state_of_accelerate

    transformers: Any = import_module("transformers")
    begin = FromStep(meter)
    callback = type(
        "Around",
        (transformers.TrainerCallback,),
        {"on_step_begin": begin, "on_epoch_end": lambda *_, **__: meter.stop()},
    )()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            num_train_epochs=1,
            per_device_train_batch_size=task.batch,
            train_sampling_strategy="sequential",
            bf16=True,
            torch_compile=task.compile,
            optim="adamw_torch_fused",
            learning_rate=RATE,
            lr_scheduler_type="constant",
            max_grad_norm=MAX_NORM,
            logging_steps=task.steps,
            logging_nan_inf_filter=False,
            disable_tqdm=True,
            save_strategy="no",
            report_to="none",
            use_cpu=task.device == "cpu",
        )
        model = new_model(task)
        transformers.Trainer(model, arguments, train_dataset=rows(task), callbacks=[callback]).train()
    forget_state_of_accelerate()
    return model


def by_lightning(task: argparse.Namespace, meter: Meter) -> Any:
    """Train with Lightning's Trainer, which clips no gradients for an optimizer that is fused."""
    lightning: Any = import_module("lightning")
    module = lightning.LightningModule()
    module.model = new_model(task)
    compiled = torch.compile(module.model) if task.compile else module.model
    optimizer = AdamW(module.model.parameters(), lr=RATE, weight_decay=0.0)
    module.configure_optimizers = lambda: optimizer
    module.training_step = lambda batch: compiled(**batch).loss
    begin = FromStep(meter)
    callback = around(lightning.Callback, "on_train_batch_start", "on_train_epoch_end", meter)
    type(callback).on_train_batch_start = begin
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator=task.device,
        devices=1,
        precision="bf16-mixed",
        gradient_clip_val=MAX_NORM,
        log_every_n_steps=task.steps,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(rows(task), task.batch, pin_memory=task.device != "cpu"))
    return module.model


CONTESTANTS: dict[str, Callable[[argparse.Namespace, Meter], Any]] = {
    "by hand": by_hand,
    "by hand, again": by_hand,
    "trainer_lib": by_trainer,
    "Hugging Face Trainer": by_hugging_face,
    "Lightning Trainer": by_lightning,
}


def new_model(task: argparse.Namespace) -> Any:
    """Return a GPT-2, always with the same weights."""
    transformers: Any = import_module("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=task.length,
        n_embd=task.width,
        n_layer=task.layers,
        n_head=task.width // 64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config).train()


def rows(task: argparse.Namespace) -> Tokens:
    """Return the data."""
    return Tokens((WARM + task.steps) * task.batch, task.length)


def loss_after(task: argparse.Namespace, model: Any) -> float:
    """Return the loss of the first batch after training."""
    tokens = rows(task).rows[: task.batch].to(task.device)
    with torch.no_grad(), torch.autocast(task.device, torch.bfloat16):
        return float(model.to(task.device)(input_ids=tokens, labels=tokens).loss)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.language_model", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often each contestant trains (default: 3)")
    parser.add_argument("--steps", type=int, default=20, help="steps that are measured (default: 20)")
    parser.add_argument("--layers", type=int, default=12, help="(default: 12)")
    parser.add_argument("--width", type=int, default=768, help="(default: 768)")
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step (default: 16)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence (default: 1024)")
    parser.add_argument("--compile", action="store_true", help="compile the model")
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS), metavar="NAME")
    add_device(parser)
    task = parser.parse_args()
    print(f"{machine.describe()}; load {os.getloadavg()[0]:.1f}")
    watches: dict[str, list[Stopwatch]] = {name: [] for name in task.only}
    losses: dict[str, float] = {}
    for index in range(task.rounds):
        start = index % len(task.only)
        for name in task.only[start:] + task.only[:start]:
            watches[name].append(Stopwatch())
            with isolated():
                losses[name] = loss_after(task, CONTESTANTS[name](task, watches[name][-1]))
            if not math.isclose(losses[name], losses[task.only[0]], rel_tol=1e-3):
                raise RuntimeError(
                    f"{name} came to a loss of {losses[name]}, and {task.only[0]} to {losses[task.only[0]]}"
                )
    print(f"| | time a step | ratio | CPU | tokens a second | peak of memory | loss |\n|---|{'---:|' * 6}")
    first = watches[task.only[0]]
    for name, runs in watches.items():
        time, cpu = (median(getattr(run, kind) for run in runs) / task.steps for kind in ("wall", "cpu"))
        ratio = median(run.wall / floor.wall for run, floor in zip(runs, first, strict=True))
        print(
            f"| {name} | {time * 1e3:.1f} ms | {ratio:.3f} | {cpu * 1e3:.1f} ms | "
            f"{task.batch * task.length / time:,.0f} | {max(run.memory for run in runs) / 1e9:.2f} GB | "
            f"{losses[name]:.5f} |"
        )


if __name__ == "__main__":
    main()
