"""torch.compile and CUDA graphs on a GPU: the same numbers, and graphs that are replayed."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from tests.gpu.training import train
from tests.trainer.tasks import arguments, network, points, trainer
from trainer_lib.utils import TorchDynamoPlugin

pytestmark = pytest.mark.gpu

GRAPHS = TorchDynamoPlugin(backend="inductor", mode="reduce-overhead")


@pytest.fixture(autouse=True)
def nothing_is_compiled_before() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_training_has_the_same_numbers(mode: str, accumulation: int) -> None:
    expected = train(gradient_accumulation_steps=accumulation)
    plugin = TorchDynamoPlugin(backend="inductor", mode=mode)
    report = train(dynamo_plugin=plugin, gradient_accumulation_steps=accumulation)
    assert report.losses == pytest.approx(expected.losses, rel=1e-4)
    assert report.norms == pytest.approx(expected.norms, rel=1e-4)


def test_reduce_overhead_replays_cuda_graphs() -> None:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        train(dynamo_plugin=GRAPHS, steps=16)
    launches = [event.count for event in recorded.key_averages() if event.key == "cudaGraphLaunch"]
    assert sum(launches) >= 16, "a forward and a backward in each step, after the first ones"


class ReturnsLoss(nn.Module):
    """Returns its loss, as models of transformers do: the memory of a graph's output is used again by the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        logits = self.inner(inputs)
        return {"loss": cross_entropy(logits, targets), "logits": logits}


def fitted(**options: Any) -> list[float]:
    inputs, targets = points(64)
    rows = [{"inputs": first, "targets": second} for first, second in zip(inputs, targets, strict=True)]
    args = arguments(use_cpu=False, max_steps=12, log_every=4, eval_every=6, shuffle=False, **options)
    fit = trainer(args, model=ReturnsLoss(), train_dataset=rows, eval_dataset=rows, loss_fn=None)
    history = fit.fit().history
    fit.accelerator.free_memory()
    return [value for entry in history for name, value in entry.items() if name in ("loss", "eval_loss")]


def test_a_trainer_reads_the_loss_before_the_graph_runs_again() -> None:
    """Values that are logged after several steps, and evaluations in between."""
    expected = fitted()
    assert fitted(compile=GRAPHS) == pytest.approx(expected, rel=1e-4)


def test_a_capturable_update_can_be_a_graph() -> None:
    """A prepared optimizer steps inside `torch.cuda.graph` if torch's can."""
    from trainer_lib import Accelerator

    accelerator = Accelerator()
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        optimizer.step()  # makes its states
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    graph.replay()
    torch.cuda.synchronize()
    assert all(bool((old - new > 5e-3).all()) for old, new in zip(before, model.parameters(), strict=True))
