"""Trains with an optimizer that has modes, as schedule-free optimizers have."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import is_schedulefree_available, set_seed

from tests.accelerate_scripts.local_data import Accuracy, image_loaders, image_model
from tests.accelerate_scripts.record import record

is_schedulefree_available()  # scripts ask; the optimizer below stands for the package's


class AveragedSGD(torch.optim.SGD):
    """Evaluates the mean of the weights so far."""

    def train(self):
        self._exchange("current")

    def eval(self):
        self._exchange("mean")

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            count = state["count"] = state.get("count", 0) + 1
            state["mean"] = torch.lerp(state.get("mean", parameter.detach()), parameter.detach(), 1 / count)

    @torch.no_grad()
    def _exchange(self, name):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if name == "mean":
                state["current"] = parameter.clone()
            if name in state:
                parameter.copy_(state[name])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    accelerator = Accelerator(cpu=args.cpu)
    metric = Accuracy()
    set_seed(42)
    train_dataloader, eval_dataloader = image_loaders(accelerator, 16)
    model = image_model().to(accelerator.device)
    optimizer = AveragedSGD(model.parameters(), lr=0.1)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    for _ in range(2):
        model.train()
        optimizer.train()
        for batch in train_dataloader:
            loss = torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])
            record("loss", loss)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        optimizer.eval()
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(batch["image"]).argmax(dim=-1)
            metric.add_batch(*accelerator.gather_for_metrics((predictions, batch["label"])))
        record("metric", metric.compute()["accuracy"])
    record("weights", accelerator.unwrap_model(model).state_dict())
    accelerator.end_training()


if __name__ == "__main__":
    main()
