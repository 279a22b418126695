"""Sends gradients in 16 bits or by PowerSGD, inside a profile."""

import argparse

import torch
from accelerate import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs
from accelerate.utils import ProfileKwargs, set_seed

from tests.accelerate_scripts.local_data import image_loaders, image_model
from tests.accelerate_scripts.record import record


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument(
        "--ddp_comm_hook", choices=["no", "fp16", "bf16", "power_sgd", "batched_power_sgd"], default="no"
    )
    args = parser.parse_args()
    ddp_kwargs = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType(args.ddp_comm_hook))
    profile_kwargs = ProfileKwargs(activities=["cpu"], record_shapes=True)
    accelerator = Accelerator(cpu=args.cpu, kwargs_handlers=[ddp_kwargs, profile_kwargs])
    set_seed(42)
    train_dataloader, _ = image_loaders(accelerator, 16)
    model = image_model().to(accelerator.device)
    optimizer = torch.optim.SGD(params=model.parameters(), lr=0.1)
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    model.train()
    with accelerator.profile() as prof:
        for batch in train_dataloader:
            loss = torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])
            record("loss", loss)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    record("convolutions", sum(row.count for row in prof.key_averages() if row.key == "aten::conv2d"))
    record("weights", accelerator.unwrap_model(model).state_dict())
    accelerator.end_training()


if __name__ == "__main__":
    main()
