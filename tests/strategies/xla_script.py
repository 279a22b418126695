"""A script for devices of torch_xla: windows of weighted losses, clipping, a checkpoint, and the collectives.

It writes what it computed into a file for each rank.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainer_lib import Accelerator, set_seed


class Tied(nn.Module):
    """Two layers with one weight between two others, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.middle = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)
        self.again.weight = self.middle.weight
        self.last = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return a value for each sample."""
        return self.last(self.again(self.middle(self.first(inputs).tanh()).tanh()).tanh())


def train(accelerator: Accelerator, folder: Path) -> dict[str, Any]:
    """Train for an epoch, save, load, and return what was computed."""
    set_seed(5)
    model = Tied()
    inputs = torch.randn(24, 3)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True), torch.randint(1, 4, (24, 1)).float())
    batch = 8 // accelerator.num_processes
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch))
    losses, norms = [], []
    for _ in range(2):
        for features, targets, weights in loader:
            with accelerator.accumulate(model):
                errors = (model(features) - targets).square() * weights
                accelerator.backward(errors.sum(), weight=weights.sum())
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(accelerator.reduce(errors.sum().detach())))
    accelerator.save_state(str(folder / "state"))
    state = {name: tensor.cpu().clone() for name, tensor in accelerator.get_state_dict(model).items()}
    with torch.no_grad():
        model.first.weight.zero_()
    accelerator.load_state(str(folder / "state"))
    loaded = accelerator.get_state_dict(model)
    assert all(torch.equal(loaded[name].cpu(), tensor) for name, tensor in state.items())
    accelerator.save_model(model, str(folder / "weights"))
    rank = torch.tensor([accelerator.process_index], device=accelerator.device)
    model.eval()
    with torch.no_grad():
        outputs = accelerator.gather_for_metrics(model(inputs[:4].to(accelerator.device))[:1])
    return {
        "kind": str(accelerator.distributed_type),
        "losses": losses,
        "norms": norms,
        "weights": {name: tensor.flatten().tolist() for name, tensor in state.items()},
        "outputs": outputs.flatten().tolist(),
        "ranks": accelerator.gather(rank).tolist(),
        "flags": accelerator.gather(rank > 0).tolist(),
        "last": accelerator.reduce(rank, "max").item(),
    }


def main() -> None:
    """Train on the devices that the environment names."""
    folder = Path(sys.argv[1])
    accelerator = Accelerator(gradient_accumulation_steps=2)
    figures = train(accelerator, folder)
    (folder / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
