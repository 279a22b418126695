"""Averages the weights of all ranks every few steps instead of their gradients at each step."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed
from torch import nn

from tests.accelerate_scripts.local_data import image_loaders
from tests.accelerate_scripts.record import record


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    args = parser.parse_args()
    accelerator = Accelerator(cpu=args.cpu, gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(42)
    train_dataloader, _ = image_loaders(accelerator, 4, 64)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.2), nn.Linear(16, 10)).to(accelerator.device)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=0.01)
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    for _ in range(2):
        model.train()
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=3, enabled=True) as local_sgd:
            for batch in train_dataloader:
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
                    record("loss", loss)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    local_sgd.step()
        record("weights", accelerator.unwrap_model(model).state_dict())
    accelerator.end_training()


if __name__ == "__main__":
    main()
