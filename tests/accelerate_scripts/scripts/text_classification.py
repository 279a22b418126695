"""Fine-tunes a BERT on text pairs, with tracking, checkpoints and a resume in mid-epoch."""

import argparse
import os

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.tracking import GeneralTracker
from accelerate.utils import set_seed
from transformers import get_linear_schedule_with_warmup

from tests.accelerate_scripts.local_data import Accuracy, classifier, text_loaders
from tests.accelerate_scripts.record import record

calls = []


class RecordTracker(GeneralTracker):
    name = "record"
    requires_logging_directory = False

    @property
    def tracker(self):
        return None

    def store_init_configuration(self, values):
        calls.append(str(values))

    def log(self, values, step=None, **kwargs):
        calls.append([step, *(float(value) for value in values.values())])


def training_function(config, args):
    loading = DataLoaderConfiguration(use_seedable_sampler=args.seedable)
    if args.with_tracking:
        accelerator = Accelerator(
            cpu=args.cpu,
            mixed_precision=args.mixed_precision,
            dataloader_config=loading,
            log_with=RecordTracker("run") if args.own_tracker else "all",
            project_dir=args.output_dir,
        )
    else:
        accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision, dataloader_config=loading)
    if args.checkpointing_steps is None or args.checkpointing_steps == "epoch":
        checkpointing_steps = args.checkpointing_steps
    else:
        checkpointing_steps = int(args.checkpointing_steps)
    if args.with_tracking:
        accelerator.init_trackers("text", config)
    accumulation = 1
    batch_size = config["batch_size"]
    if batch_size > 8:
        accumulation, batch_size = batch_size // 8, 8
    set_seed(config["seed"])
    train_dataloader, eval_dataloader = text_loaders(accelerator, batch_size)
    metric = Accuracy()
    model = classifier()
    model = model.to(accelerator.device)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=config["lr"])
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=3,
        num_training_steps=(len(train_dataloader) * config["num_epochs"]) // accumulation,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    overall_step = starting_epoch = 0
    resume_step = None
    if args.resume_from_checkpoint:
        accelerator.print(f"Resumed from checkpoint: {args.resume_from_checkpoint}")
        accelerator.load_state(args.resume_from_checkpoint)
        done = os.path.splitext(os.path.basename(args.resume_from_checkpoint))[0]
        if "epoch" in done:
            starting_epoch = int(done.replace("epoch_", "")) + 1
        else:
            resume_step = int(done.replace("step_", ""))
            starting_epoch = resume_step // len(train_dataloader)
            resume_step -= starting_epoch * len(train_dataloader)
            overall_step = starting_epoch * len(train_dataloader)
    for epoch in range(starting_epoch, config["num_epochs"]):
        model.train()
        total_loss = 0
        active_dataloader = train_dataloader
        if args.resume_from_checkpoint and epoch == starting_epoch and resume_step is not None:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
            overall_step += resume_step
        for step, batch in enumerate(active_dataloader):
            batch.to(accelerator.device)
            outputs = model(**batch)
            loss = outputs.loss
            record("loss", loss)
            loss = loss / accumulation
            total_loss += loss.detach().float()
            accelerator.backward(loss)
            if step % accumulation == 0:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                record("rate", lr_scheduler.get_last_lr()[0])
            overall_step += 1
            if isinstance(checkpointing_steps, int) and overall_step % checkpointing_steps == 0:
                output_dir = f"step_{overall_step}"
                if args.output_dir is not None:
                    output_dir = os.path.join(args.output_dir, output_dir)
                accelerator.save_state(output_dir)
        model.eval()
        for batch in eval_dataloader:
            batch.to(accelerator.device)
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            metric.add_batch(predictions=predictions, references=references)
        eval_metric = metric.compute()
        record("metric", eval_metric["accuracy"])
        record("samples", eval_metric["samples"])
        accelerator.print(f"epoch {epoch}:", eval_metric)
        if args.with_tracking:
            accelerator.log(
                {
                    "accuracy": eval_metric["accuracy"],
                    "train_loss": total_loss.item() / len(train_dataloader),
                    "epoch": epoch,
                },
                step=epoch,
            )
        if checkpointing_steps == "epoch":
            accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))
    record("weights", accelerator.get_state_dict(model))
    accelerator.end_training()
    for call in calls:
        record("tracked", call)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", default=None, choices=["no", "fp16", "bf16"])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--checkpointing_steps", default=None)
    parser.add_argument("--output_dir", default=".")
    parser.add_argument("--resume_from_checkpoint", default=None)
    parser.add_argument("--with_tracking", action="store_true")
    parser.add_argument("--own_tracker", action="store_true")
    parser.add_argument("--seedable", action="store_true")
    parser.add_argument("--batch_size", type=int, default=8)
    args = parser.parse_args()
    training_function({"lr": 1e-2, "num_epochs": 2, "seed": 42, "batch_size": args.batch_size}, args)


if __name__ == "__main__":
    main()
