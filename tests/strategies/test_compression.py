"""Compression: what arrives is the average within the rounding of what was sent, and the same everywhere."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from tests.accelerator import toy
from tests.worlds import run_world
from trainer_lib import Accelerator, ConfigurationError, DistributedDataParallelKwargs

FULL_RANK = {"matrix_approximation_rank": 16, "start_powerSGD_iter": 2, "min_compression_rate": 0.01}
HOOKS = ["fp16", "bf16", "power_sgd", "batched_power_sgd"]


class _Network(nn.Module):
    """Has a scalar, a vector, matrices and a tensor of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.body = toy.model()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.mix = nn.Parameter(torch.ones(2, 3, 3) / 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs) @ self.mix.sum(dim=0) * self.scale


def _gradients(options: dict[str, Any], updates: int = 5, ddp: dict[str, Any] | None = None) -> list[list[Tensor]]:
    """Return the gradients of a few updates of a model that stays as it is, on data that stays too."""
    handlers = [DistributedDataParallelKwargs(**options, **(ddp or {}))]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    network = accelerator.prepare(_Network())
    inputs, targets, _ = toy.data()
    samples = torch.arange(48)[accelerator.process_index :: accelerator.num_processes]
    seen: list[list[Tensor]] = []
    for _ in range(updates):
        network.zero_grad()
        accelerator.backward(toy.losses(network, inputs[samples], targets[samples]).mean())
        seen.append(toy.gradients(network))
    return seen


def _uncompressed() -> list[Tensor]:
    return _gradients({}, 1)[0]


@pytest.mark.parametrize(
    ("processes", "name", "ddp"),
    [
        (2, "comm_hook", {}),
        (3, "comm_hook", {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0003}),
        (2, "comm_hook", {"static_graph": True}),
        (2, "comm_wrapper", {}),
    ],
)
def test_16_bits_round_and_do_nothing_else(processes: int, name: str, ddp: dict[str, Any]) -> None:
    plain = _uncompressed()
    for kind, digits in (("fp16", 10), ("bf16", 7)):
        results = run_world(_gradients, ({name: kind}, 2, ddp), processes, timeout=60)
        for ours in results:
            toy.assert_same(ours[-1], results[0][-1], rtol=0)
            toy.assert_same(ours[-1], plain, rtol=2.0**-digits)
        rounded = torch.cat([gradient.reshape(-1) for gradient in results[0][-1]])
        expected = torch.cat([gradient.reshape(-1) for gradient in plain])
        assert not torch.equal(rounded, expected), "nothing was compressed"
        assert torch.equal(rounded, rounded.to(torch.float16 if kind == "fp16" else torch.bfloat16).float())


@pytest.mark.parametrize(
    ("hook", "ddp"),
    [
        ("power_sgd", {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0003}),
        ("batched_power_sgd", {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0003}),
        ("batched_power_sgd", {}),
    ],
)
def test_power_sgd_of_full_rank_loses_nothing(hook: str, ddp: dict[str, Any]) -> None:
    """Many small buckets, whose messages must not mix, and one large one."""
    plain = _uncompressed()
    options = {"comm_hook": hook, "comm_state_option": FULL_RANK}
    results = run_world(_gradients, (options, 5, ddp), 2, timeout=60)
    for ours in results:
        toy.assert_same(ours[-1], results[0][-1], rtol=0)
        toy.assert_same(ours[-1], plain, rtol=1e-4)


@pytest.mark.parametrize(
    ("hook", "wrapper"),
    [("power_sgd", "no"), pytest.param("power_sgd", "fp16", marks=pytest.mark.slow), ("batched_power_sgd", "bf16")],
)
def test_power_sgd_makes_up_for_what_it_lost(hook: str, wrapper: str) -> None:
    """Of rank 1 the first compressed gradient is far off; what it lost comes later, so that the sum is near."""
    options = {
        "comm_hook": hook,
        "comm_wrapper": wrapper,
        "comm_state_option": {"start_powerSGD_iter": 2, "min_compression_rate": 0.5},
    }
    plain = _uncompressed()
    results = run_world(_gradients, (options, 62), 2, timeout=60)
    far = near = 0.0
    for index, expected in enumerate(plain):
        for ours in results:
            assert torch.equal(ours[-1][index], results[0][-1][index])
        compressed = [update[index] for update in results[0][2:]]
        far = max(far, float((compressed[0] - expected).norm() / expected.norm()))
        near = max(near, float((torch.stack(compressed).mean(dim=0) - expected).norm() / expected.norm()))
    assert far > 0.2
    assert near < far / 3


@pytest.mark.parametrize("options", [{}, {"comm_wrapper": "fp16"}])
def test_power_sgd_of_no_gradient_is_no_gradient(options: dict[str, Any]) -> None:
    for ours in run_world(_nothing_to_learn, (options,), 2, timeout=60):
        for gradient in ours:
            assert torch.equal(gradient, torch.zeros_like(gradient))


def _nothing_to_learn(options: dict[str, Any]) -> list[Tensor]:
    state = {"start_powerSGD_iter": 2, "min_compression_rate": 0.5}
    handlers = [DistributedDataParallelKwargs(comm_hook="power_sgd", comm_state_option=state, **options)]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    network = accelerator.prepare(toy.model())
    for _ in range(4):
        network.zero_grad()
        accelerator.backward(network(torch.ones(2, 8)).sum() * 0)
    return toy.gradients(network)


def _weighted(options: dict[str, Any]) -> list[Tensor]:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**options)])
    network = toy.model()
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.0))
    inputs, targets, weights = toy.data()
    rank = accelerator.process_index
    samples = torch.arange(0, 5) if rank == 0 else torch.arange(5, 24)
    for _ in range(4):
        optimizer.zero_grad()
        loss = (toy.losses(network, inputs[samples], targets[samples]) * weights[samples]).sum()
        accelerator.backward(loss, weight=weights[samples].sum())
        optimizer.step()
    return toy.gradients(network)


@pytest.mark.parametrize("hook", ["bf16", "power_sgd"])
def test_what_losses_weigh_is_not_rounded(hook: str) -> None:
    options = {"comm_hook": hook, "comm_state_option": FULL_RANK if "power" in hook else {}}
    expected = toy.mean_gradients(list(range(24)), toy.data()[2])
    for ours in run_world(_weighted, (options,), 2, timeout=60):
        toy.assert_same(ours, expected, rtol=1e-4 if "power" in hook else 2.0**-7)


def _trained(options: dict[str, Any]) -> tuple[list[Tensor], float]:
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[DistributedDataParallelKwargs(**options)]
    )
    network = toy.model()
    network, optimizer = accelerator.prepare(network, torch.optim.AdamW(network.parameters(), lr=1e-2))
    inputs, targets, _ = toy.data()
    samples = torch.arange(48)[accelerator.process_index :: accelerator.num_processes]
    for step in range(60):
        chosen = samples[step % 2 :: 2]
        with accelerator.accumulate(network):
            accelerator.backward(toy.losses(network, inputs[chosen], targets[chosen]).mean())
            optimizer.step()
            optimizer.zero_grad()
    return toy.parameters(network), float(toy.losses(network, inputs, targets).mean().detach())


@pytest.mark.slow
@pytest.mark.parametrize("hook", HOOKS)
def test_compressed_training_learns_as_well(hook: str) -> None:
    state = {"start_powerSGD_iter": 3, "min_compression_rate": 1} if "power" in hook else {}
    _, plain = _trained({})
    results = run_world(_trained, ({"comm_hook": hook, "comm_state_option": state},), 2, timeout=60)
    for weights, loss in results:
        assert loss == pytest.approx(plain, rel=0.2 if hook == "batched_power_sgd" else 0.1)
        toy.assert_same(weights, results[0][0], rtol=0)


def _sparse(hook: str) -> list[Tensor]:
    state = {"start_powerSGD_iter": 2, "min_compression_rate": 0.5} if "power" in hook else {}
    handlers = [DistributedDataParallelKwargs(comm_hook=hook, comm_state_option=state)]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    torch.manual_seed(0)
    network = accelerator.prepare(nn.Sequential(nn.Embedding(6, 8, sparse=True), nn.Linear(8, 8)))
    for _ in range(4):
        network.zero_grad()
        accelerator.backward(network(torch.tensor([1 + accelerator.process_index, 3])).square().sum())
    return [parameter.grad.to_dense().clone() for parameter in network.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("hook", ["fp16", "power_sgd"])
def test_sparse_gradients_travel_as_they_are(hook: str) -> None:
    expected = run_world(_sparse, ("no",), 2, timeout=60)[0]
    results = run_world(_sparse, (hook,), 2, timeout=60)
    for ours in results:
        toy.assert_same([ours[0]], [expected[0]])
        toy.assert_same(ours, results[0], rtol=0)


def _half_model() -> list[Tensor]:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(comm_hook="fp16")])
    network = accelerator.prepare(nn.Linear(8, 3, dtype=torch.bfloat16))
    # 1e6 is beyond fp16.
    accelerator.backward(network(torch.full((1, 8), 1e6, dtype=torch.bfloat16)).sum())
    return [gradient.float() for gradient in toy.gradients(network)]


def test_16_bits_are_not_sent_as_other_16_bits() -> None:
    for ours in run_world(_half_model, (), 2, timeout=60):
        assert all(bool(gradient.isfinite().all()) for gradient in ours)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"comm_hook": "zip"}, "Unknown comm_hook 'zip'. Known: batched_power_sgd, bf16, fp16, no, power_sgd."),
        ({"comm_wrapper": "power_sgd"}, "Unknown comm_wrapper 'power_sgd'. Known: bf16, fp16, no."),
        ({"comm_hook": "fp16", "comm_wrapper": "bf16"}, "comm_hook=fp16 and comm_wrapper=bf16 name two types"),
        ({"comm_hook": "power_sgd", "comm_state_option": 3}, "comm_state_option must be a dict of PowerSGDState's"),
        ({"comm_hook": "fp16", "comm_state_option": {"warm_start": True}}, r"\(got 'fp16'\)"),
        ({"comm_state_option": {"warm_start": True}}, r"\(got 'no'\)"),
        (
            {"comm_hook": "power_sgd", "comm_state_option": {"warmstart": True}},
            "Unknown option in comm_state_option 'warmstart'.*Did you mean 'warm_start'",
        ),
        (
            {"comm_hook": "power_sgd", "comm_state_option": {"matrix_approximation_rank": 0}},
            "matrix_approximation_rank must be a whole number of at least 1, got 0",
        ),
        (
            {"comm_hook": "power_sgd", "comm_state_option": {"orthogonalization_epsilon": -1e-8}},
            "orthogonalization_epsilon must be a finite number of at least 0, got -1e-08",
        ),
        (
            {"comm_hook": "power_sgd", "comm_state_option": {"start_powerSGD_iter": 1}},
            "start_powerSGD_iter must be at least 2 with use_error_feedback or warm_start",
        ),
    ],
)
def test_what_cannot_be_meant_is_said(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        DistributedDataParallelKwargs(**options)


def test_kinds_are_taken_in_any_case() -> None:
    options = DistributedDataParallelKwargs(comm_hook="POWER_SGD", comm_wrapper="FP16")
    assert (options.comm_hook, options.comm_wrapper) == ("power_sgd", "fp16")
    assert options.to_kwargs() == {}, "these are not DDP's"


def test_power_sgd_takes_every_option_of_torchs() -> None:
    for name, parameter in inspect.signature(PowerSGDState).parameters.items():
        if name != "process_group":
            DistributedDataParallelKwargs(comm_hook="power_sgd", comm_state_option={name: parameter.default})
