"""Replication: what travels with the gradients arrives, whatever the gradients are."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.accelerator import toy
from tests.worlds import run_world
from trainer_lib import (
    Accelerator,
    ConfigurationError,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    PreparationError,
)

# Sums that 16-bit floats cannot tell from their neighbours.
_VALUES = (100_001.0, 3.0)


def _carried(dtype: torch.dtype, options: dict[str, Any], layers: int = 2) -> tuple[list[float], list[Tensor]]:
    """Carry values with three backwards; return the last averages and gradients."""
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**options)])
    network = nn.Sequential(*[nn.Linear(300, 300) for _ in range(layers)]).to(dtype)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(0.001)
    network = accelerator.prepare(network)
    averages: list[float] = []
    for _ in range(3):
        network.zero_grad()
        loss = network(torch.full((1, 300), float(1 + accelerator.process_index), dtype=dtype)).sum()
        accelerator.strategy.send_with_gradients([value + accelerator.process_index for value in _VALUES])
        accelerator.backward(loss)
        averages = [float(value) for value in accelerator.strategy.received_averages()]
    return averages, [g.float() for g in toy.gradients(network)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_cap_mb": 0.1},  # many buckets, of which the first takes the cargo
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_values_and_gradients_arrive(dtype: torch.dtype, options: dict[str, Any]) -> None:
    (alone,) = run_world(_carried, (dtype, options), 1, timeout=60)
    results = run_world(_carried, (dtype, options), 2, timeout=60)
    for averages, gradients in results:
        assert averages == [value + 0.5 for value in _VALUES]
        toy.assert_same(gradients, results[0][1], rtol=0)
        # One process is fed 1 and two are fed 1 and 2, so what is averaged is 1.5 times as much.
        torch.testing.assert_close(gradients[0], alone[1][0] * 1.5, rtol=2e-2, atol=0)


class _WithWhole(nn.Module):
    """A model of which FSDP leaves a weight without dimensions and an embedding with sparse gradients whole."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.tensor(1.0)), nn.Linear(4, 4)
        self.embedding = nn.Embedding(8, 4, sparse=True)

    def forward(self, tokens: Tensor, uses_scale: bool) -> Tensor:
        loss = self.inner(self.embedding(tokens)).square().sum()
        return loss + self.scale * 0.0 if uses_scale else loss


def _whole_weights() -> tuple[float, Tensor, bool]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(ignored_modules="embedding"))
    network, rank = _WithWhole(), accelerator.process_index
    rows = (
        torch.tensor([[1, 2, 3], [3, 4, 5]])[rank : rank + 1]
        if accelerator.num_processes > 1
        else torch.tensor([[1, 2, 3], [3, 4, 5]])
    )
    network = accelerator.prepare(network)
    optimizer = accelerator.prepare(torch.optim.AdamW([network.scale], lr=0.1, weight_decay=0.5))
    accelerator.backward(network(rows[:, : 3 - rank], uses_scale=rank == 0) * accelerator.num_processes)
    optimizer.step()
    gradient = network.embedding.weight.grad
    return network.scale.item(), gradient.to_dense(), gradient.is_sparse


def test_a_weight_of_which_one_rank_has_zeros_and_another_no_gradient_stays_the_same_on_both() -> None:
    first, second = run_world(_whole_weights, (), 2, timeout=60)
    assert first[0] == second[0] == pytest.approx(0.95)


def test_sparse_gradients_of_whole_weights_are_averaged_row_by_row() -> None:
    torch.manual_seed(0)
    network = _WithWhole()
    for tokens in ([1, 2, 3], [3, 4]):
        network(torch.tensor(tokens), False).backward()
    expected = network.embedding.weight.grad
    assert expected is not None
    for _, gradient, is_sparse in run_world(_whole_weights, (), 2, timeout=60):
        torch.testing.assert_close(gradient, expected.to_dense())
        assert is_sparse


def _kept_weights() -> list[bool]:
    accelerator = Accelerator(cpu=True)
    network = accelerator.prepare(nn.Linear(2, 2, dtype=torch.complex64))
    with torch.no_grad():
        network.module.weight.add_(accelerator.process_index)
    kept = network.module.weight.detach().clone()
    with accelerator.strategy.averaged_weights([network]):
        inside = network.module.weight.detach().clone()
    return [torch.equal(inside, kept), torch.equal(network.module.weight.detach(), kept)]


def test_complex_weights_are_a_ranks_own_again_after_a_mean() -> None:
    assert run_world(_kept_weights, (), 2, timeout=60) == [[False, True]] * 2


def _wrapped_with(how: str) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    assert accelerator.ddp_handler is None
    if how == "a handler":
        accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True, comm_hook="bf16")
    else:
        accelerator.free_memory()
        accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs()])
        assert accelerator.ddp_handler is not None
        accelerator.ddp_handler.find_unused_parameters = True
        accelerator.ddp_handler.comm_hook = "bf16"
    network = accelerator.prepare(nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        network.module.weight.fill_(1.0)
    accelerator.backward(network(torch.full((1, 1), 1 + 1e-4)).sum())
    return {"unused": network.find_unused_parameters, "gradient": network.module.weight.grad.item()}


@pytest.mark.parametrize("how", ["a handler", "an attribute of it"])
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_options_set_before_prepare_count(how: str) -> None:
    # In bf16 1.0001 is 1.
    assert run_world(_wrapped_with, (how,), 2, timeout=60) == [{"unused": True, "gradient": 1.0}] * 2


def test_options_of_ddp_are_checked_and_told_where_they_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True)
    options = DistributedDataParallelKwargs()
    accelerator.ddp_handler = options
    assert accelerator.ddp_handler is options
    with pytest.raises(ConfigurationError, match="ddp_handler must be DistributedDataParallelKwargs"):
        accelerator.ddp_handler = {"static_graph": True}  # pyright: ignore[reportAttributeAccessIssue]
    accelerator.free_memory()
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    accelerator.ddp_handler = options
    assert "DistributedDataParallelKwargs are ignored" in caplog.text


def _carried_without_a_bucket() -> list[float]:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    stranger = nn.Linear(2, 2)
    accelerator.strategy.send_with_gradients([float(accelerator.process_index)])
    accelerator.backward(stranger(torch.ones(1, 2)).sum())
    return [float(value) for value in accelerator.strategy.received_averages()]


def test_values_travel_alone_if_no_gradient_does() -> None:
    assert run_world(_carried_without_a_bucket, (), 2, timeout=60) == [[0.5], [0.5]]


def _restored() -> bool:
    accelerator = Accelerator(cpu=True)
    network = accelerator.prepare(toy.model())
    inputs, targets, _ = toy.data()
    mine = slice(accelerator.process_index * 4, accelerator.process_index * 4 + 4)
    with accelerator.no_sync(network):
        with accelerator.trigger_sync_in_backward(network):
            accelerator.backward(toy.losses(network, inputs[mine], targets[mine]).mean())
        network.zero_grad()
        accelerator.backward(toy.losses(network, inputs[mine], targets[mine]).mean())
    both = accelerator.gather(toy.gradients(network)[0].flatten()[None])
    return torch.equal(both[0], both[1])


def test_a_forced_reduction_is_over_with_its_block() -> None:
    assert run_world(_restored, (), 2, timeout=60) == [False, False]


def _outlives_free_memory() -> bool:
    accelerator = Accelerator(cpu=True)
    network = toy.model()
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
    with accelerator.accumulate(network):
        accelerator.backward(network(torch.ones(1, 8)).sum())
    inside = weakref.ref(network.module)
    network, optimizer = accelerator.free_memory(network, optimizer)
    gc.collect()
    return inside() is not None


def test_models_are_let_go() -> None:
    assert run_world(_outlives_free_memory, (), 2, timeout=60) == [False, False]


def _unfit() -> list[str]:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    sharded = accelerator.prepare(nn.Linear(4, 3))
    accelerator.free_memory()
    accelerator = Accelerator(cpu=True)
    messages: list[str] = []
    for model in (sharded, nn.LazyLinear(3)):
        with pytest.raises(PreparationError) as caught:
            accelerator.prepare(model)
        messages.append(str(caught.value))
    return messages


def test_what_is_not_whole_is_refused() -> None:
    for sharded, lazy in run_world(_unfit, (), 2, timeout=60):
        assert sharded.startswith("weight is sharded already (a DTensor), by fully_shard or by an earlier prepare()")
        assert lazy.startswith("weight has no shape yet (a lazy module). Call the model once with a batch")


def _accumulated(options: dict[str, Any], weighted: bool) -> list[list[Tensor]]:
    """Return the gradients of two windows of three micro-batches."""
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=3, kwargs_handlers=[DistributedDataParallelKwargs(**options)]
    )
    network = toy.model()
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.0))
    inputs, targets, weights = toy.data()
    windows: list[list[Tensor]] = []
    for start in range(0, 48, 8):
        samples = torch.arange(start, start + 8)[accelerator.process_index :: accelerator.num_processes]
        with accelerator.accumulate(network):
            each = toy.losses(network, inputs[samples], targets[samples])
            if weighted:
                accelerator.backward((each * weights[samples]).sum(), weight=weights[samples].sum())
            else:
                accelerator.backward(each.mean())
            optimizer.step()
            if accelerator.sync_gradients:
                windows.append(toy.gradients(network))
            optimizer.zero_grad()
    return windows


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"static_graph": True}, {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.0003}],
)
def test_a_static_graph_accumulates(options: dict[str, Any], weighted: bool) -> None:
    """DDP learns the graph from a first backward that is shared, which is the first of a window of three."""
    for windows in run_world(_accumulated, (options, weighted), 2, timeout=60):
        for ours, start in zip(windows, (0, 24), strict=True):
            samples = list(range(start, start + 24))
            toy.assert_same(ours, toy.mean_gradients(samples, toy.data()[2] if weighted else None))


def _own_hook() -> tuple[float, list[Tensor]]:
    accelerator = Accelerator(cpu=True)
    network = accelerator.prepare(toy.model())
    network.register_comm_hook(None, _doubled)
    accelerator.strategy.send_with_gradients([float(accelerator.process_index)])
    accelerator.backward(network(torch.ones(1, 8)).sum())
    (average,) = accelerator.strategy.received_averages()
    return float(average), toy.gradients(network)


def _doubled(state: None, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
    del state
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer() * 2)
    return future


def test_a_hook_of_the_users_own_stays() -> None:
    network = toy.model()
    network(torch.ones(1, 8)).sum().backward()
    for average, ours in run_world(_own_hook, (), 2, timeout=60):
        assert average == 0.5
        toy.assert_same(ours, [gradient * 2 for gradient in toy.gradients(network)])


def _of_one_rank() -> tuple[str, bool, bool]:
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 2)
    return accelerator.distributed_type.value, accelerator.prepare(model) is model, accelerator.use_distributed


def test_one_rank_of_a_launcher_trains_without_ddp() -> None:
    assert run_world(_of_one_rank, (), 1) == [("MULTI_CPU", True, False)]
