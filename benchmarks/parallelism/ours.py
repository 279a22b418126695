"""This library on each mesh: your own loop with an `Accelerator`, and a `Trainer`."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.parallelism.task import MAX_NORM, Mesh, Shape, llama, optimizer_of, rows

AfterStep = Callable[[], None]


def with_accelerator(mesh: Mesh, shape: Shape, steps: int, after_step: AfterStep) -> None:
    """Train in your own loop; `after_step` is called after each optimizer step."""
    from trainer_lib import Accelerator, ParallelismConfig

    config = ParallelismConfig(**mesh.sizes)
    accelerator = Accelerator(cpu=True, parallelism_config=config, gradient_accumulation_steps=mesh.micro_batches)
    bare = llama(shape)
    data: Any = _data(mesh, shape, steps)
    loader: Any = DataLoader(data, batch_size=shape.rows)
    model, optimizer, loader = accelerator.prepare(bare, optimizer_of(bare.parameters()), loader)
    window: list[Any] = []
    for batch in loader:
        with accelerator.accumulate(model):
            if mesh.name in ("cp", "sp"):
                _backward_on_parts(accelerator, model, batch)
            elif accelerator.takes_windows(model):
                window.append(batch)
                if accelerator.sync_gradients:
                    accelerator.backward_window(model, lambda batch: _weighted_loss(model, batch), window)
                    window = []
            else:
                accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            after_step()


def with_trainer(mesh: Mesh, shape: Shape, steps: int, after_step: AfterStep) -> None:
    """Train with a `Trainer`; `after_step` is called after each optimizer step."""
    from trainer_lib import ParallelismConfig, Trainer, TrainingArguments
    from trainer_lib.events import Callback, Run

    class AfterEachStep(Callback):
        def on_step_end(self, run: Run) -> None:
            del run
            after_step()

    bare = llama(shape)
    args = TrainingArguments(
        max_steps=steps, per_device_train_batch_size=shape.rows, gradient_accumulation_steps=mesh.micro_batches,
        max_grad_norm=MAX_NORM, parallelism=ParallelismConfig(**mesh.sizes), log_every=10**6, use_cpu=True,
        progress_bar=False, shuffle=False,
    )  # fmt: skip
    optimizer = optimizer_of(bare.parameters())
    Trainer(bare, args, train_dataset=_data(mesh, shape, steps), optimizer=optimizer, callbacks=[AfterEachStep()]).fit()


def _data(mesh: Mesh, shape: Shape, steps: int) -> list[dict[str, Tensor]]:
    replicas = mesh.sizes.get("dp_shard_size", 1)
    first = [rows(shape, shape.rows, replica) for replica in range(replicas)]
    in_turn = [sample for of_replica in first for sample in of_replica]
    return in_turn * (steps * mesh.micro_batches)


def _backward_on_parts(accelerator: Any, model: Any, batch: dict[str, Tensor]) -> None:
    tokens = batch["input_ids"]
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    positions = torch.arange(labels.shape[1]).repeat(len(labels), 1)
    buffers = [tokens, labels, positions]
    with accelerator.maybe_context_parallel(buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)):
        logits = model(input_ids=tokens, position_ids=positions).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        accelerator.backward(loss, weight=(labels != -100).sum())


def _weighted_loss(model: Any, batch: dict[str, Tensor]) -> Any:
    from trainer_lib.accelerator.weighted_backward import WeightedLoss

    logits = model(input_ids=batch["input_ids"]).logits
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return WeightedLoss(loss, float((labels != -100).sum()))


OURS: dict[str, Callable[[Mesh, Shape, int, AfterStep], None]] = {
    "Accelerator": with_accelerator,
    "Trainer": with_trainer,
}
