"""What can be sharded, in which order, and what is told when it cannot."""

import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerator import toy
from tests.strategies.sharded import Stack, Tied, stack
from tests.worlds import run_world
from trainer_lib import Accelerator, FullyShardedDataParallelPlugin, GradientAccumulationPlugin, TrainerLibError


def _sharding(**plugin: Any) -> Accelerator:
    return Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**plugin))


def _told(attempt: Callable[[Accelerator], Any], **plugin: Any) -> str:
    accelerator = _sharding(**plugin)
    try:
        attempt(accelerator)
    except TrainerLibError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        accelerator.free_memory()
    return "prepared"


class _WithoutReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))


def _on_meta(kind: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return kind()


def _with_state(accelerator: Accelerator) -> None:
    network = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    network(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    accelerator.prepare(network, optimizer)


def _with_loaded_state(accelerator: Accelerator) -> None:
    network = nn.Linear(2, 2)
    stepped = torch.optim.Adagrad(network.parameters())
    network(torch.ones(1, 2)).sum().backward()
    stepped.step()
    optimizer = torch.optim.Adagrad(network.parameters())
    optimizer.load_state_dict(stepped.state_dict())
    accelerator.prepare(network, optimizer)


def _mixed(accelerator: Accelerator) -> None:
    network = stack()
    accelerator.prepare(network, torch.optim.Adafactor(network.parameters(), foreach=True))


def _one_optimizer_for_two(accelerator: Accelerator) -> None:
    first, second = stack(), stack(Tied)
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], fused=True)
    accelerator.prepare(optimizer, first, second)
    assert sum(hasattr(p, "_local_tensor") for p in optimizer.param_groups[0]["params"]) == 22 + 18


def _other_models(accelerator: Accelerator) -> None:
    accelerator.prepare(nn.Linear(2, 2 + accelerator.process_index))


def _deeper_models(accelerator: Accelerator) -> None:
    accelerator.prepare(Stack(2 + accelerator.process_index))


def _sharded_already(accelerator: Accelerator) -> None:
    from torch.distributed.fsdp import fully_shard

    accelerator.prepare(fully_shard(nn.Linear(2, 2)))


def _stranger(accelerator: Accelerator) -> None:
    accelerator.prepare(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


def _two_types(accelerator: Accelerator) -> None:
    network = stack()
    network.get_submodule("blocks.1.inner").bfloat16()
    accelerator.prepare(network)


def _one_type_is_trained(accelerator: Accelerator) -> None:
    network = stack()
    network.get_submodule("blocks.1.inner").bfloat16().requires_grad_(False)
    network.get_submodule("last").bfloat16()  # stays whole
    accelerator.prepare(network)


def _optimizer_after_a_forward(accelerator: Accelerator) -> None:
    network: Any = accelerator.prepare(stack())
    network(toy.data()[0])
    made = torch.optim.SGD(network.parameters(), lr=0.1)
    assert sum(hasattr(p, "_local_tensor") for p in made.param_groups[0]["params"]) == 18, "the others are whole"
    accelerator.prepare(made)
    assert sum(hasattr(p, "_local_tensor") for p in made.param_groups[0]["params"]) == 22
    network(toy.data()[0])
    accelerator.prepare(torch.optim.SGD(made.param_groups[0]["params"], lr=0.1))


def _step_of_an_optimizer_that_was_not_prepared(accelerator: Accelerator) -> None:
    network = stack()
    optimizer = torch.optim.AdamW(network.parameters())
    network = accelerator.prepare(network)
    accelerator.backward(network(toy.data()[0]).sum())
    optimizer.step()


def _clipped_by_weights_from_before(accelerator: Accelerator) -> None:
    network = stack()
    before = list(network.parameters())
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(before, lr=0.1))
    accelerator.backward(network(toy.data()[0]).sum())
    norm = accelerator.clip_grad_norm_(before, 0.5)
    assert norm > 1
    assert torch.isclose(accelerator.clip_grad_norm_(network.parameters(), 0.5), torch.tensor(0.5))
    optimizer.step()
    other = nn.Parameter(torch.ones(2))
    torch.optim.SGD([other], lr=0.1).step()  # optimizers of other weights are left alone


def _no_blocks(accelerator: Accelerator) -> None:
    accelerator.prepare(nn.Linear(2, 2))


ATTEMPTS: list[tuple[Callable[[Accelerator], Any], dict[str, Any], str]] = [
    (
        lambda a: a.prepare(_on_meta(_WithoutReset)),
        {},
        "PreparationError: The model itself (_WithoutReset) is on the meta",
    ),
    (
        lambda a: a.prepare(_on_meta(Stack)),
        {"sync_module_states": False},
        "PreparationError: scale is on the meta device, and with sync_module_states=False",
    ),
    (_with_state, {}, "PreparationError: This SGD has a state for whole weights (it has stepped,"),
    (_with_loaded_state, {}, "PreparationError: This Adagrad has a state for whole weights (it has stepped,"),
    (
        _mixed,
        {"ignored_modules": "last"},
        "PreparationError: Adafactor(foreach=True) cannot update shards and whole weights in one parameter group. "
        "These weights stay whole: last.weight, last.bias.",
    ),
    (_one_optimizer_for_two, {}, "prepared"),
    (
        _other_models,
        {},
        "PreparationError: Rank 0 and rank 1 prepare different models: ('weight', (2, 2),",
    ),
    (_deeper_models, {}, "PreparationError: Rank 0 and rank 1 prepare different models:"),
    (_sharded_already, {}, "PreparationError: weight is sharded already (a DTensor), by fully_shard or by an earlier"),
    (lambda a: a.prepare(a.prepare(nn.Linear(2, 2))), {}, "prepared"),
    (lambda a: a.prepare(nn.LazyLinear(3)), {}, "PreparationError: weight has no shape yet (a lazy module). Call the"),
    (_stranger, {}, "PreparationError: 2 of the 2 parameters of this SGD are in no prepared model"),
    (_two_types, {}, "PreparationError: blocks.1.norm.weight is trained in torch.float32 and blocks.1.inner"),
    (_one_type_is_trained, {"ignored_modules": "last"}, "prepared"),
    (_optimizer_after_a_forward, {}, "prepared"),
    (
        _step_of_an_optimizer_that_was_not_prepared,
        {},
        "PreparationError: This AdamW holds the weights from before prepare(model), and FSDP has replaced them",
    ),
    (_clipped_by_weights_from_before, {}, "prepared"),
    (_no_blocks, {"activation_checkpointing": True}, "ConfigurationError: activation_checkpointing=True finds no repe"),
    (
        _no_blocks,
        {"auto_wrap_policy": ["Lienar"]},
        "ConfigurationError: This Linear has no module of the class 'Lienar'",
    ),
]


def test_what_cannot_be_sharded_is_told_on_all_processes() -> None:
    def attempt_all() -> list[str]:
        return [_told(attempt, **plugin) for attempt, plugin, _ in ATTEMPTS]

    for result in run_world(attempt_all, (), 2, timeout=60):
        for text, (_, _, words) in zip(result, ATTEMPTS, strict=True):
            assert text.replace("prepare failed on rank 0: ", "").startswith(words)


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        ("transformers.optimization", "Adafactor", "torch.optim.Adafactor"),
        ("bitsandbytes.optim", "AdamW8bit", "8-bit states of torchao"),
    ],
)
def test_optimizers_that_need_whole_weights_are_refused(module: str, name: str, instead: str) -> None:
    kind: Any = getattr(pytest.importorskip(module), name)

    def refused(accelerator: Accelerator) -> None:
        network = stack()
        accelerator.prepare(network, kind(network.parameters(), lr=0.1, **options))

    options = {"relative_step": False} if name == "Adafactor" else {}
    words = f"UnsupportedError: {name} updates whole weights, and FSDP shards or splits them. Use {instead}"
    assert _told(refused).startswith(words)


class _Sometimes(nn.Module):
    """Uses its head where it is told to, and has a weight without values."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Stack()
        self.head = nn.Linear(3, 3)
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, inputs: torch.Tensor, uses_head: bool) -> dict[str, torch.Tensor]:
        hidden = self.body(inputs) + self.nothing.sum()
        return {"outputs": self.head(hidden) if uses_head else hidden}


def test_optimizers_are_looked_at_until_all_old_weights_are_gone() -> None:
    def hooks() -> int:
        return len(vars(sys.modules["torch.optim.optimizer"])["_global_optimizer_pre_hooks"])

    accelerator, before = _sharding(), hooks()
    network = stack()
    accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
    assert hooks() == before, "steps of a script that prepares its optimizer call nothing"
    network = stack()
    weights = list(network.parameters())
    network = accelerator.prepare(network)
    assert hooks() == before + 1
    optimizer = accelerator.prepare(torch.optim.SGD(network.parameters(), lr=0.1))
    del weights
    accelerator.backward(network(toy.data()[0]).sum())
    optimizer.step()
    assert hooks() == before
    other = stack()
    weights = list(other.parameters())
    accelerator.prepare(other)
    assert hooks() == before + 1, "an optimizer may hold what the list holds"
    accelerator.free_memory()
    assert hooks() == before
    assert weights


def test_whole_weights_that_one_process_did_not_use_are_averaged() -> None:
    def body() -> Any:
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(ignored_modules="head"))
        network = accelerator.prepare(stack(_Sometimes))
        inputs = toy.data()[0][:4]
        accelerator.backward(network(inputs, accelerator.is_last_process)["outputs"].sum())
        accelerator.backward(network(inputs, False)["outputs"].sum())  # what is equal stays as it is
        return network.head.weight.grad, network.head.bias.grad, accelerator.get_state_dict(network)

    (weight, bias, state), (other, _, _) = run_world(body, (), 2, timeout=60)
    assert torch.equal(weight, other)
    assert bias.tolist() == [2.0, 2.0, 2.0], "4 samples on one of 2 processes"
    assert state["nothing"].shape == (0, 3)


class _Branches(nn.Module):
    """Uses one of two heads of one size, and never its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Stack()
        self.heads = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.never = nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](self.body(inputs))


# The heads that each of two ranks uses in the micro-batches of each update.
HEADS = [[(0, 0), (0, 0)], [(0, 1), (0, 0)], [(1, 1), (1, 0)], [(1, 1), (1, 1)], [(0, 1), (1, 0)]]


def _branches(sync_each_batch: bool, ranks: int, precision: str = "no") -> dict[str, Any]:
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_each_batch=sync_each_batch),
        fsdp_plugin=FullyShardedDataParallelPlugin() if ranks > 1 else None,
    )
    network = stack(_Branches)
    network, optimizer = accelerator.prepare(
        network, torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=0.5)
    )
    inputs = toy.data()[0]
    for update in HEADS:
        for heads in update:
            with accelerator.accumulate(network):
                here = range(2) if ranks == 1 else [accelerator.process_index]
                losses = [network(inputs[4 * rank : 4 * rank + 4], heads[rank]).square().mean() for rank in here]
                accelerator.backward(torch.stack(losses).mean())
                optimizer.step()
                optimizer.zero_grad()
    state = accelerator.get_state_dict(network)
    accelerator.free_memory()
    return state


@pytest.mark.parametrize("sync_each_batch", [False, True])
def test_weights_that_one_process_did_not_use_have_the_gradients_of_the_others(sync_each_batch: bool) -> None:
    expected = _branches(False, 1)
    actual, _ = run_world(_branches, (sync_each_batch, 2), 2, timeout=60)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


class _Heads(nn.Module):
    """The mean of some of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Stack()
        self.heads = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, inputs: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        return torch.stack([self.heads[head](self.body(inputs)) for head in used]).mean()


def _resumed_heads(folder: Path) -> list[dict[str, Any]]:
    """Return the weights after updates that use one head a rank, both, and one; and those of a run that resumed."""
    states: list[dict[str, Any]] = []
    for loads in (False, True):
        accelerator = _sharding()
        network = stack(_Heads)
        network, optimizer = accelerator.prepare(
            network, torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=0.5)
        )
        if loads:
            accelerator.load_state(folder)
        for update, used in list(enumerate([(accelerator.process_index,), (0, 1), (0,)]))[int(loads) :]:
            accelerator.backward(network(toy.data()[0][:4], used))
            optimizer.step()
            optimizer.zero_grad()
            if update == 0:
                accelerator.save_state(folder)
        states.append(accelerator.get_state_dict(network))
        accelerator.free_memory()
    return states


def test_weights_that_no_process_used_stay_as_they_are_after_a_resume_too(tmp_path: Path) -> None:
    (whole, resumed), _ = run_world(_resumed_heads, (tmp_path,), 2, timeout=60)
    assert whole
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_they_do_in_16_bits_where_other_weights_have_accumulated_gradients(precision: str) -> None:
    expected = _branches(False, 1, precision)
    actual, _ = run_world(_branches, (False, 2, precision), 2, timeout=60)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-2)


def test_layers_on_meta_start_as_they_would_have() -> None:
    class _Layers(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))

    def start() -> dict[str, Any]:
        accelerator = _sharding()
        torch.manual_seed(5)
        return accelerator.strategy.model_state(accelerator.prepare(_on_meta(_Layers)))

    main, _ = run_world(start, (), 2, timeout=60)
    torch.manual_seed(5)
    toy.assert_same(list(main.values()), list(_Layers().state_dict().values()), rtol=0)


def _notes() -> list[Any]:
    accelerator = _sharding()
    network: Any = stack(Tied)
    network.first.weight.weight_decay = 0.5
    network.blocks[0].inner.weight.requires_grad_(False)
    channels_last = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    expected = channels_last.weight.detach().clone().contiguous()
    channels_last = accelerator.prepare(channels_last)
    network = accelerator.prepare(network)
    noted = network.first.weight.weight_decay
    outputs = network(toy.data()[0][:4])
    reference = stack(Tied)(toy.data()[0][:4])
    accelerator.group.broadcast(expected)
    return [
        noted,
        network.last.weight is network.first.weight,
        network.blocks[1].inner.weight.requires_grad,
        torch.equal(outputs, reference),
        torch.equal(channels_last.weight.full_tensor(), expected),
    ]


def test_what_is_noted_on_weights_and_shared_stays() -> None:
    assert run_world(_notes, (), 2, timeout=60) == [[0.5, True, False, True, True]] * 2


def _own_weights() -> list[Any]:
    accelerator = _sharding(sync_module_states=False)
    layer = nn.Linear(2, 4)
    layer.requires_grad_(False)
    layer.weight.fill_(float(accelerator.process_index))
    layer.register_buffer("rank", torch.tensor(accelerator.process_index))
    prepared: Any = accelerator.prepare(layer)
    return [prepared.weight.full_tensor()[:, 0].tolist(), int(prepared.rank)]


def test_each_process_may_start_from_its_own_weights() -> None:
    assert run_world(_own_weights, (), 2, timeout=60) == [[[0.0, 0.0, 1.0, 1.0], 0], [[0.0, 0.0, 1.0, 1.0], 1]]


def _held_after_forward() -> list[Any]:
    values: list[Any] = []
    for plugin in (
        {},
        {"sharding_strategy": "SHARD_GRAD_OP"},
        {"reshard_after_forward": 2},
        {"forward_prefetch": True},
        {"cpu_offload": True},
    ):
        accelerator = _sharding(**plugin)
        network: Any = accelerator.prepare(stack())
        network(toy.data()[0])
        weight = network.blocks[0].inner.weight
        state, block = (module._get_fsdp_state() for module in (network, network.blocks[0]))
        ahead = [prefetched is block for prefetched in state._states_to_forward_prefetch]
        offloads = state._fsdp_param_groups[0].offload_policy
        values.append((list(getattr(weight, "_local_tensor", weight).shape), ahead, type(offloads).__name__))
        accelerator.free_memory()
    return values


@pytest.mark.slow
def test_what_is_held_between_forward_and_backward() -> None:
    """Of the 7 rows, a process of four has 2 or 1, one of two has 4 or 3."""
    results = run_world(_held_after_forward, (), 4, timeout=60)[0]
    plain = "OffloadPolicy"
    assert results == [
        ([2, 10], [], plain),
        ([7, 10], [], plain),
        ([4, 10], [], plain),
        ([2, 10], [True], plain),
        ([2, 10], [], "CPUOffloadPolicy"),
    ]


def _evaluation() -> list[Any]:
    accelerator = _sharding()
    network: Any = accelerator.prepare_model(stack(), evaluation_mode=True)
    inputs, _, _ = toy.data()
    reference = stack()(inputs)
    network.eval()
    with torch.no_grad():
        outputs = network(inputs)
    shards = all(hasattr(p, "_local_tensor") for name, p in network.named_parameters() if name != "scale")
    frozen = accelerator.prepare(stack().requires_grad_(False))
    return [torch.equal(outputs, reference), shards, torch.equal(frozen(inputs), reference)]


def test_models_that_are_only_evaluated_are_sharded_too() -> None:
    assert run_world(_evaluation, (), 2, timeout=60) == [[True, True, True]] * 2


def _kept_local() -> list[Any]:
    accelerator = _sharding(ignored_modules="last")
    network: Any = accelerator.prepare(stack())
    inputs, targets, _ = toy.data()

    def rows(step: int) -> slice:
        start = step * 8 + accelerator.process_index * 4
        return slice(start, start + 4)

    def gradients() -> dict[str, Any]:
        return {
            name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone()
            for name, p in network.named_parameters()
            if p.grad is not None
        }

    values: list[Any] = []
    with accelerator.no_sync(network):
        accelerator.backward(toy.losses(network, inputs[rows(0)], targets[rows(0)]).sum())
        values.append(sorted(gradients()))
        loss = toy.losses(network, inputs[rows(1)], targets[rows(1)]).sum()
        with accelerator.trigger_sync_in_backward(network):
            accelerator.backward(loss)
        values.append(gradients())
        network.zero_grad()
        accelerator.backward(toy.losses(network, inputs[rows(2)], targets[rows(2)]).sum())
        values.append(sorted(gradients()))
    accelerator.backward(toy.losses(network, inputs[rows(3)], targets[rows(3)]).sum())
    values.append(gradients())
    return values


def test_gradients_wait_for_the_reduction_that_is_asked_for() -> None:
    reference = stack()
    inputs, targets, _ = toy.data()

    def expected(*samples: int) -> dict[str, Any]:
        reference.zero_grad()
        toy.losses(reference, inputs[list(samples)], targets[list(samples)]).sum().div(2).backward()
        return {name: p.grad.clone() for name, p in reference.named_parameters() if p.grad is not None}

    whole = ["last.bias", "last.weight", "scale"]
    for before, reduced, waiting, last in run_world(_kept_local, (), 2, timeout=60):
        assert before == waiting == whole, "gradients of shards are not there before they are reduced"
        for ours, theirs in ((reduced, expected(*range(16))), (last, expected(*range(16, 32)))):
            assert ours.keys() == theirs.keys()
            toy.assert_same(list(ours.values()), list(theirs.values()), rtol=1e-5)  # sums in another order


def _memory() -> list[Any]:
    accelerator = _sharding()
    network = stack()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    old = [weakref.ref(p) for p in network.parameters() if p.dim()]
    network, optimizer = accelerator.prepare(network, optimizer)
    gc.collect()
    gone = all(reference() is None for reference in old)
    accelerator.backward(network(torch.ones(1, 8)).sum())
    optimizer.step()
    inside = weakref.ref(network)
    network, optimizer = accelerator.free_memory(network, optimizer)
    gc.collect()
    return [gone, inside() is None]


def test_whole_weights_and_models_are_let_go() -> None:
    assert run_world(_memory, (), 2, timeout=60) == [[True, True]] * 2


def _forgotten() -> bool:
    accelerator, network = _sharding(), stack()
    network.scale = nn.Parameter(torch.ones(()))  # which is not sharded, so that its gradient is averaged
    network = accelerator.prepare(network)
    accelerator.backward(network(torch.ones(1, 8)).sum() * network.scale)
    weight = weakref.ref(network.scale)
    del accelerator, network
    gc.collect()
    return weight() is None


def test_weights_without_references_are_let_go() -> None:
    assert run_world(_forgotten, (), 2, timeout=60) == [True, True]


def _losses_of_adagrad(accelerator: Accelerator) -> list[float]:
    """Adagrad's constructor makes a state for each weight, before the model is sharded."""
    network = stack()
    optimizer = torch.optim.Adagrad(network.parameters(), lr=0.1, initial_accumulator_value=0.5)
    network, optimizer = accelerator.prepare(network, optimizer)
    assert {name.shape for name in optimizer.state} == {weight.shape for weight in network.parameters()}
    losses: list[float] = []
    for _ in range(3):
        loss = network(toy.data()[0]).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_an_optimizer_whose_constructor_makes_a_state_trains_shards() -> None:
    expected = _losses_of_adagrad(Accelerator(cpu=True))
    assert run_world(lambda: _losses_of_adagrad(_sharding()), (), 2) == [pytest.approx(expected, rel=1e-6)] * 2


@pytest.mark.slow
def test_two_models_are_sharded_side_by_side() -> None:
    norms, names = _take_turns(Accelerator(cpu=True))
    main, other = run_world(lambda: _take_turns(_sharding()), (), 2, timeout=60)
    assert main[0] == pytest.approx(norms, rel=2e-6)
    assert other[0] == main[0]
    assert main[1] == names
    assert names[0].startswith("1.")


def _take_turns(accelerator: Accelerator) -> tuple[list[float], list[str]]:
    """Train two models by turns, each with an optimizer of its own."""
    models: Any = [stack(), stack(Tied)]
    optimizers: Any = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    first, second, *optimizers = accelerator.prepare(*models, *optimizers)
    models = [first, second]
    inputs, targets, weights = toy.data()
    size = 8 // accelerator.num_processes
    norms: list[float] = []
    for step in range(4):
        start = step * 8 + size * accelerator.process_index
        rows = slice(start, start + size)
        for model, optimizer in zip(models, optimizers, strict=True):
            loss = (toy.losses(model, inputs[rows], targets[rows]) * weights[rows]).sum()
            accelerator.backward(loss, weight=weights[rows].sum(), optimizer=optimizer)
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
    state = accelerator.strategy.optimizer_state(optimizers[1], models)
    return norms, list(state.get("state", ()))


class _Positions(nn.Module):
    """A weight, and a buffer that is not saved, in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 2))
        self.register_buffer("positions", torch.zeros(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        self.positions = torch.arange(4.0, device=self.weight.device)


def test_loaded_weights_stay_beside_a_buffer_that_is_still_on_meta() -> None:
    def prepared() -> list[list[float]]:
        accelerator, model = _sharding(), _on_meta(_Positions)
        model.load_state_dict({"weight": torch.full((4, 2), 3.0)}, assign=True)
        model = accelerator.prepare(model)
        weight: Any = model.get_parameter("weight")
        return [weight.full_tensor().flatten().tolist(), model.get_buffer("positions").tolist()]

    assert run_world(prepared, (), 2, timeout=60) == [[[3.0] * 8, [0.0, 1.0, 2.0, 3.0]]] * 2
