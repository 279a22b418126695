"""Ends an epoch on all ranks as soon as one rank's loss has risen twice, and counts metrics by hand."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from tests.accelerate_scripts.local_data import Accuracy, image_loaders, image_model
from tests.accelerate_scripts.record import record


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.counter, self.lowest = patience, 0, float("inf")

    def check(self, loss):
        self.counter = 0 if loss <= self.lowest else self.counter + 1
        self.lowest = min(loss, self.lowest)
        return self.counter >= self.patience


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    accelerator = Accelerator(cpu=args.cpu)
    metric, stopping = Accuracy(), EarlyStopping(patience=2)
    set_seed(42)
    train_dataloader, eval_dataloader = image_loaders(accelerator, 4)
    model = image_model().to(accelerator.device)
    optimizer = torch.optim.SGD(params=model.parameters(), lr=0.3)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    for _ in range(3):
        model.train()
        for step, batch in enumerate(train_dataloader):
            loss = torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])
            record("loss", loss)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if stopping.check(loss.item()):
                accelerator.set_trigger()
            if accelerator.check_trigger():
                record("stopped", step)
                break
        model.eval()
        samples_seen = 0
        for step, batch in enumerate(eval_dataloader):
            with torch.no_grad():
                predictions = model(batch["image"]).argmax(dim=-1)
            predictions, references = accelerator.gather((predictions, batch["label"]))
            if accelerator.use_distributed:
                if step == len(eval_dataloader) - 1:
                    predictions = predictions[: len(eval_dataloader.dataset) - samples_seen]
                    references = references[: len(eval_dataloader.dataset) - samples_seen]
                else:
                    samples_seen += references.shape[0]
            metric.add_batch(predictions=predictions, references=references)
        eval_metric = metric.compute()
        record("metric", eval_metric["accuracy"])
        record("samples", eval_metric["samples"])
    record("weights", accelerator.unwrap_model(model).state_dict())
    accelerator.end_training()


if __name__ == "__main__":
    main()
