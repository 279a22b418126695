"""Trains one model per fold with one Accelerator, and averages the predictions for held-out images."""

import argparse

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.model_selection import StratifiedKFold
from torch.utils.data import DataLoader, Subset

from tests.accelerate_scripts.local_data import Accuracy, Images, image_model
from tests.accelerate_scripts.record import record


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    accelerator = Accelerator(cpu=args.cpu)
    metric = Accuracy()
    set_seed(42)
    train, test = Images(0, 64), Images(200, 237)
    test_predictions = []
    for train_idxs, valid_idxs in StratifiedKFold(n_splits=2).split(np.zeros(len(train)), train.labels):
        order = torch.Generator().manual_seed(1) if accelerator.num_processes > 1 else None
        train_dataloader = DataLoader(Subset(train, train_idxs), shuffle=True, batch_size=4, generator=order)
        eval_dataloader = DataLoader(Subset(train, valid_idxs), shuffle=False, batch_size=8)
        test_dataloader = DataLoader(test, shuffle=False, batch_size=8)
        model = image_model().to(accelerator.device)
        optimizer = torch.optim.AdamW(params=model.parameters(), lr=0.01)
        model, optimizer, train_dataloader, eval_dataloader, test_dataloader = accelerator.prepare(
            model, optimizer, train_dataloader, eval_dataloader, test_dataloader
        )
        for _ in range(2):
            model.train()
            for batch in train_dataloader:
                loss = torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])
                record("loss", loss)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            model.eval()
            for batch in eval_dataloader:
                with torch.no_grad():
                    predictions = model(batch["image"]).argmax(dim=-1)
                metric.add_batch(*accelerator.gather_for_metrics((predictions, batch["label"])))
            record("metric", metric.compute()["accuracy"])
        fold_predictions = []
        for batch in test_dataloader:
            with torch.no_grad():
                predictions = model(batch["image"])
            predictions, references = accelerator.gather_for_metrics((predictions, batch["label"]))
            fold_predictions.append(predictions.cpu())
            metric.add_batch(predictions=predictions.argmax(dim=-1), references=references)
        record("metric", metric.compute()["accuracy"])
        test_predictions.append(torch.cat(fold_predictions, dim=0))
        record("weights", accelerator.unwrap_model(model).state_dict())
        accelerator.free_memory()
    predictions = torch.stack(test_predictions, dim=0).sum(dim=0).div(2)
    record("predictions", predictions)
    accelerator.print("Average:", metric.compute(predictions=predictions.argmax(dim=-1), references=test.labels))
    accelerator.end_training()


if __name__ == "__main__":
    main()
