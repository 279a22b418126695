"""Finds a batch size that fits, and accumulates gradients to keep the number of samples of an update."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size, set_seed

from tests.accelerate_scripts.local_data import Accuracy, image_loaders, image_model
from tests.accelerate_scripts.record import record


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--images", type=int, default=64)
    args = parser.parse_args()
    accelerator = Accelerator(cpu=args.cpu)
    metric = Accuracy()

    @find_executable_batch_size(starting_batch_size=16)
    def inner_training_loop(batch_size):
        nonlocal accelerator
        record("batch size", batch_size)
        accelerator.gradient_accumulation_steps = 16 // batch_size
        accelerator.free_memory()
        set_seed(42)
        model = image_model().to(accelerator.device)
        optimizer = torch.optim.AdamW(params=model.parameters(), lr=0.01)
        train_dataloader, eval_dataloader = image_loaders(accelerator, batch_size, args.images)
        lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=10)
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
            model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
        )
        if batch_size > 8:
            raise RuntimeError("CUDA out of memory.")
        for _ in range(2):
            model.train()
            for batch in train_dataloader:
                with accelerator.accumulate(model):
                    output = model(batch["image"])
                    loss = torch.nn.functional.cross_entropy(output, batch["label"])
                    record("loss", loss)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        record("norm", accelerator.clip_grad_norm_(model.parameters(), 1.0))
                    optimizer.step()
                    lr_scheduler.step()
                    optimizer.zero_grad()
                    record("rate", lr_scheduler.get_last_lr()[0])
            model.eval()
            for batch in eval_dataloader:
                with torch.no_grad():
                    predictions = model(batch["image"]).argmax(dim=-1)
                metric.add_batch(*accelerator.gather_for_metrics((predictions, batch["label"])))
            record("metric", metric.compute()["accuracy"])
        record("weights", accelerator.unwrap_model(model).state_dict())

    inner_training_loop()
    accelerator.end_training()


if __name__ == "__main__":
    main()
