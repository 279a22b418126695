"""Accumulated gradients survive the next run of a CUDA graph, which overwrites those of the run before."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer_lib import Accelerator
from trainer_lib.accelerator.cuda_graphs import keep_gradients
from trainer_lib.utils import TorchDynamoPlugin


def trained(keeps: bool, overwrites: bool, weighted: bool) -> list[Tensor]:
    """Return the weights after updates of three micro-batches; a graph may overwrite the gradients of the first."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model: Any = nn.Linear(4, 2)
    model.unused = nn.Parameter(torch.ones(2))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1))
    if keeps:
        accelerator.window.on_second_micro_batch = lambda: keep_gradients(accelerator.prepared.optimizers)
    of_graph: list[Tensor] = []
    for step in range(6):
        with accelerator.accumulate(model):
            for gradient in of_graph if overwrites else ():
                gradient.fill_(math.nan)
            losses = model(torch.full((5, 4), float(step))).square().sum(1)
            accelerator.backward(losses.sum(), weight=5) if weighted else accelerator.backward(losses.mean())
            of_graph = [model.weight.grad, model.bias.grad] if step % 3 == 0 else []
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(model.unused.detach(), torch.ones(2)), "weight decay needs a gradient"
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_are_copied_before_the_next_run(weighted: bool) -> None:
    expected = trained(keeps=False, overwrites=False, weighted=weighted)
    for found, whole in zip(trained(keeps=True, overwrites=True, weighted=weighted), expected, strict=True):
        assert torch.equal(found, whole)


def test_without_the_copies_they_are_lost() -> None:
    assert trained(keeps=False, overwrites=True, weighted=False)[1].isnan().any()


@pytest.mark.parametrize(
    ("options", "replays"),
    [
        ({"backend": "inductor", "mode": "reduce-overhead"}, True),
        ({"backend": "inductor", "mode": "max-autotune"}, True),
        ({"backend": "inductor", "mode": "max-autotune-no-cudagraphs"}, False),
        ({"backend": "inductor"}, False),
        ({"backend": "inductor", "options": {"triton.cudagraphs": True}}, True),
        ({"backend": "cudagraphs"}, True),
        ({"backend": "cudagraphs", "disable": True}, False),
        ({"backend": "no"}, False),
    ],
)
def test_options_say_whether_graphs_are_replayed(options: dict[str, Any], replays: bool) -> None:
    assert TorchDynamoPlugin(**options).replays_cuda_graphs is replays


def test_nothing_is_copied_on_the_cpu() -> None:
    plugin = TorchDynamoPlugin(backend="inductor", mode="reduce-overhead")
    assert Accelerator(cpu=True, dynamo_plugin=plugin).window.on_second_micro_batch is None
