"""Trains the head of an image network under a one-cycle schedule, with checkpoints."""

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim.lr_scheduler import OneCycleLR

from tests.accelerate_scripts.local_data import image_loaders, image_model
from tests.accelerate_scripts.record import record


def training_function(config, args):
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    set_seed(config["seed"])
    train_dataloader, eval_dataloader = image_loaders(accelerator, config["batch_size"])
    model = image_model().to(accelerator.device)
    for parameter in model[0].parameters():
        parameter.requires_grad = False
    optimizer = torch.optim.Adam(params=model.parameters(), lr=config["lr"] / 25)
    lr_scheduler = OneCycleLR(
        optimizer=optimizer, max_lr=config["lr"], epochs=config["num_epochs"], steps_per_epoch=len(train_dataloader)
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    starting_epoch, resume_step = 0, None
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        resume_step = int(os.path.basename(args.resume_from_checkpoint).replace("step_", ""))
        starting_epoch = resume_step // len(train_dataloader)
        resume_step -= starting_epoch * len(train_dataloader)
    overall_step = starting_epoch * len(train_dataloader)
    for epoch in range(starting_epoch, config["num_epochs"]):
        model.train()
        active_dataloader = train_dataloader
        if resume_step is not None and epoch == starting_epoch:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
            overall_step += resume_step
        for batch in active_dataloader:
            batch = {k: v.to(accelerator.device) for k, v in batch.items()}
            inputs = (batch["image"] - 0.3) / 0.4
            outputs = model(inputs)
            loss = torch.nn.functional.cross_entropy(outputs, batch["label"])
            record("loss", loss)
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            record("rate", lr_scheduler.get_last_lr()[0])
            overall_step += 1
            if args.checkpointing_steps and overall_step % args.checkpointing_steps == 0:
                accelerator.save_state(os.path.join(args.output_dir, f"step_{overall_step}"))
        model.eval()
        accurate = num_elems = 0
        for batch in eval_dataloader:
            inputs = (batch["image"] - 0.3) / 0.4
            with torch.no_grad():
                outputs = model(inputs)
            predictions = outputs.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["label"]))
            accurate_preds = predictions == references
            num_elems += accurate_preds.shape[0]
            accurate += accurate_preds.long().sum()
        record("samples", num_elems)
        record("metric", accurate.item() / num_elems)
        accelerator.print(f"epoch {epoch}: {100 * accurate.item() / num_elems:.2f}")
    record("weights", accelerator.unwrap_model(model).state_dict())
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", default=None, choices=["no", "fp16", "bf16"])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--checkpointing_steps", type=int, default=None)
    parser.add_argument("--output_dir", default=".")
    parser.add_argument("--resume_from_checkpoint", default=None)
    args = parser.parse_args()
    training_function({"lr": 3e-2, "num_epochs": 3, "seed": 42, "batch_size": 16}, args)


if __name__ == "__main__":
    main()
