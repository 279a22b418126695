"""Parameters that are updated in the backward: the numbers of an ordinary step, and no gradients that stay."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from tests.strategies.sharded import stack
from tests.strategies.split import WITH_VOCABULARY, Plain, data, model_of
from tests.worlds import run_world
from trainer_lib import (
    Accelerator,
    ConfigurationError,
    FullyShardedDataParallelPlugin,
    MemoryKwargs,
    ParallelismConfig,
    StateError,
    UnsupportedError,
)
from trainer_lib.utils import TorchTensorParallelConfig

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
}


def _network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2))


def _groups(model: Any) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.01}]


def _prepared(in_backward: bool, name: str = "adamw", **options: Any) -> tuple[Accelerator, Any, Any]:
    handlers = [MemoryKwargs(optimizer_in_backward=in_backward)]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers, **options)
    model = _network()
    return accelerator, *accelerator.prepare(model, OPTIMIZERS[name](_groups(model)))


def _step(accelerator: Accelerator, model: Any, optimizer: Any, seed: int, weighted: bool = False) -> float:
    generator = torch.Generator().manual_seed(seed * 10 + accelerator.process_index)
    losses = model(torch.randn(4, 6, generator=generator)).square().sum(dim=1)
    if weighted:  # weights that differ from the nominal one, and between ranks and steps
        accelerator.backward(losses[: 1 + seed + accelerator.process_index].sum(), weight=1 + seed)
    else:
        accelerator.backward(losses.mean())
    kept = [parameter for parameter in model.parameters() if parameter.grad is not None]
    optimizer.step()
    optimizer.zero_grad()
    return float(losses.detach().sum()) + 1000 * len(kept)


def _weights(model: Any) -> list[Tensor]:
    return [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]


def _trained(in_backward: bool, name: str, weighted: bool, **options: Any) -> tuple[list[Tensor], list[float]]:
    accelerator, model, optimizer = _prepared(in_backward, name, **options)
    losses = [_step(accelerator, model, optimizer, seed, weighted) for seed in range(3)]
    weights = _weights(model)
    accelerator.free_memory()
    return weights, losses


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_are_those_of_an_ordinary_step(name: str, weighted: bool) -> None:
    weights, losses = _trained(True, name, weighted)
    expected, with_gradients = _trained(False, name, weighted)
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    assert [loss + 6000 for loss in losses] == pytest.approx(with_gradients), "no gradient stays"


def test_shards_are_those_of_an_ordinary_step() -> None:
    def body() -> bool:
        equal: list[bool] = []
        for weighted in (False, True):
            results = [
                _trained(is_on, "adamw", weighted, fsdp_plugin=FullyShardedDataParallelPlugin())[0]
                for is_on in (True, False)
            ]
            equal += [torch.equal(a, b) for a, b in zip(*results, strict=True)]
        return all(equal) and len(equal) > 6

    assert run_world(body, (), 2, timeout=120) == [True, True]


def _on_mesh(in_backward: bool, sizes: dict[str, Any], plugin: FullyShardedDataParallelPlugin | None) -> list[Tensor]:
    config = ParallelismConfig(**sizes, tp_handler=TorchTensorParallelConfig(plan=WITH_VOCABULARY))
    handlers = [MemoryKwargs(optimizer_in_backward=in_backward)]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers, parallelism_config=config, fsdp_plugin=plugin)
    model: Any = model_of(Plain)
    model, optimizer = accelerator.prepare(model, OPTIMIZERS["adamw"](model.parameters()))
    first = 4 * accelerator.data_group.rank
    for _ in range(2):
        batch = default_collate(data(8)[first : first + 4])
        parts = [*batch.values()]
        with accelerator.maybe_context_parallel(parts, [1] * len(parts), set(parts)):
            accelerator.backward(model(**batch)["loss"])
        assert [p for p in model.parameters() if p.grad is not None] == [] or not in_backward
        optimizer.step()
        optimizer.zero_grad()
    weights = _weights(model)
    accelerator.free_memory()
    return weights


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # a linear layer with bias returns a view
@pytest.mark.parametrize(
    ("sizes", "shards"),
    [
        ({"tp_size": 2}, False),
        ({"cp_size": 2}, True),
        pytest.param({"sp_size": 2, "dp_shard_size": 2}, True, marks=pytest.mark.slow),
        pytest.param({"tp_size": 2, "dp_shard_size": 2}, True, marks=pytest.mark.slow),
    ],
)
def test_parts_of_matrices_and_of_sequences_are_those_of_an_ordinary_step(sizes: dict[str, Any], shards: bool) -> None:
    def body() -> bool:
        plugin = FullyShardedDataParallelPlugin() if shards else None
        pairs = zip(_on_mesh(True, sizes, plugin), _on_mesh(False, sizes, plugin), strict=True)
        return all(torch.equal(actual, expected) for actual, expected in pairs)

    ranks = 2 * len(sizes)
    assert run_world(body, (), ranks, timeout=120) == [True] * ranks


@pytest.mark.slow
@pytest.mark.parametrize("other", ["dp_replicate_size", "cp_size"])
def test_split_matrices_that_are_averaged_after_the_backward_are_refused(other: str) -> None:
    def body() -> str:
        with pytest.raises(UnsupportedError) as refused:
            _on_mesh(True, {"tp_size": 2, other: 2}, None)
        return str(refused.value)

    for text in run_world(body, (), 4, timeout=60):
        assert "weights that are not sharded are averaged after it: " in text
        assert "Shard all weights over all ranks (dp_shard_size)" in text


def test_gradients_that_are_averaged_later_are_refused() -> None:
    def body() -> list[str]:
        handlers = [MemoryKwargs(optimizer_in_backward=True)]
        parallelism = ParallelismConfig(pp_size=2)
        accelerator = Accelerator(cpu=True, kwargs_handlers=handlers, parallelism_config=parallelism)
        model = _network()
        with pytest.raises(UnsupportedError) as stages:
            accelerator.prepare(model, OPTIMIZERS["sgd"](_groups(model)))
        accelerator.free_memory()
        accelerator = Accelerator(cpu=True, kwargs_handlers=handlers, fsdp_plugin=FullyShardedDataParallelPlugin())
        model = accelerator.prepare(stack())  # has a scalar, which FSDP2 does not shard
        with pytest.raises(UnsupportedError) as whole:
            accelerator.prepare(OPTIMIZERS["sgd"](_groups(model)))
        accelerator.free_memory()
        with pytest.raises(UnsupportedError) as replicated:
            _prepared(True)
        return [str(replicated.value), str(whole.value), str(stages.value)]

    for ddp, whole, stages in run_world(body, (), 2, timeout=60):
        assert "DDP reduces gradients in buckets that stay in memory" in ddp
        assert "fsdp=True" in ddp
        assert "weights that are not sharded are averaged after it: scale. Shard all weights" in whole
        assert "a pipeline sums the gradients of shared weights after it, and adds up those of micro-batches" in stages


def test_checkpoints_are_those_of_the_ordinary_optimizer(tmp_path: Path) -> None:
    accelerator, model, optimizer = _prepared(True)
    for seed in range(2):
        _step(accelerator, model, optimizer, seed)
    accelerator.save_state(tmp_path / "state")
    for seed in range(2, 4):
        _step(accelerator, model, optimizer, seed)
    uninterrupted = _weights(model)
    accelerator.free_memory()
    for in_backward in (False, True):
        accelerator, model, optimizer = _prepared(in_backward)
        accelerator.load_state(tmp_path / "state")
        for seed in range(2, 4):
            _step(accelerator, model, optimizer, seed)
        torch.testing.assert_close(_weights(model), uninterrupted, rtol=0, atol=0)
        accelerator.free_memory()


def test_schedules_and_hooks_run_once_an_update() -> None:
    accelerator, model, optimizer = _prepared(True)
    steps: list[int] = []
    optimizer.optimizer.register_step_post_hook(lambda *call: steps.append(len(steps)))
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1))
    for seed in range(2):
        _step(accelerator, model, optimizer, seed)
        scheduler.step()
    assert steps == [0, 1]
    assert scheduler.get_last_lr()[0] == pytest.approx(0.001)


def test_what_needs_gradients_is_refused() -> None:
    accelerator, model, optimizer = _prepared(True)
    accelerator.backward(model(torch.ones(2, 6)).sum())
    for use in (
        lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0),
        lambda: accelerator.clip_grad_value_(model.parameters(), 1.0),
        accelerator.unscale_gradients,
    ):
        with pytest.raises(UnsupportedError, match="frees each gradient in the backward"):
            use()
    with pytest.raises(StateError, match="got a second gradient in one update"):
        accelerator.backward(model(torch.ones(2, 6)).sum())
    optimizer.step()
    optimizer.zero_grad()
    accelerator.backward(model(torch.ones(2, 6)).sum())
    accelerator.gradient_accumulation_steps = 2
    with accelerator.accumulate(), pytest.raises(ConfigurationError, match=r"gradient_accumulation_steps=2\)"):
        accelerator.backward(model(torch.ones(2, 6)).sum())


def test_a_gradient_that_is_not_finite_changes_no_weight() -> None:
    accelerator, model, optimizer = _prepared(True)
    before = _weights(model)
    model[0].weight.register_hook(lambda gradient: gradient * float("inf"))
    accelerator.backward(model(torch.ones(2, 6)).sum())
    after = _weights(model)
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[2], after[2])
    assert not torch.isfinite(optimizer.gradient_norm())
    optimizer.step()
    torch.testing.assert_close(_weights(model), after, rtol=0, atol=0)


@pytest.mark.parametrize("through", ["step", "closure"])
def test_a_loss_that_is_not_finite_changes_no_weight(through: str) -> None:
    accelerator, model, optimizer = _prepared(True)
    before = _weights(model)

    def backward() -> None:
        accelerator.backward(model(torch.ones(2, 6)).sum() * float("nan"))

    if through == "closure":
        optimizer.step(backward)
    else:
        backward()
        optimizer.zero_grad()  # nothing was applied
        backward()
        optimizer.step()
    torch.testing.assert_close(_weights(model), before, rtol=0, atol=0)
    optimizer.zero_grad()
    _step(accelerator, model, optimizer, 0)
    assert not torch.equal(_weights(model)[0], before[0])


def test_a_loss_that_reaches_parameters_of_another_optimizer_is_an_error() -> None:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[MemoryKwargs(optimizer_in_backward=True)])
    generator, critic = nn.Linear(3, 3), nn.Linear(3, 1)
    makers = [OPTIMIZERS["sgd"](model.parameters()) for model in (generator, critic)]
    generator, critic, of_generator, of_critic = accelerator.prepare(generator, critic, *makers)
    for is_frozen in (True, False):
        of_critic.zero_grad()
        accelerator.backward(critic(generator(torch.ones(2, 3)).detach()).sum())
        of_critic.step()
        of_generator.zero_grad()
        critic.requires_grad_(not is_frozen)
        accelerator.backward(-critic(generator(torch.ones(2, 3))).sum())
        critic.requires_grad_(True)
        of_generator.step()
    with pytest.raises(StateError, match=r"already applied: a loss reached parameters of SGD, .*freeze these"):
        of_critic.zero_grad()


class _Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize(
    ("made", "options", "message"),
    [
        (torch.optim.LBFGS, {}, "does not work with LBFGS, which needs all gradients at once"),
        (torch.optim.SGD, {"mixed_precision": "fp16"}, "does not work with mixed_precision='fp16'"),
        (_Counting, {}, "does not work with _Counting, which changes count of a whole parameter group"),
    ],
)
def test_optimizers_that_need_all_gradients_are_refused(made: Any, options: Any, message: str) -> None:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[MemoryKwargs(optimizer_in_backward=True)], **options)
    model = _network()

    def train() -> None:
        prepared, _ = accelerator.prepare(model, made(model.parameters()))
        accelerator.backward(prepared(torch.ones(2, 6)).sum())

    with pytest.raises(UnsupportedError, match=message):
        train()


def test_hooks_leave_with_the_accelerator() -> None:
    accelerator, model, _ = _prepared(True)
    accelerator.free_memory()
    model(torch.ones(2, 6)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
