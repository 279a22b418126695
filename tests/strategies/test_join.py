"""Joining: processes whose data ends early change nothing in what the others learn, and end up with the same model."""

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.accelerator import toy
from tests.worlds import run_world
from trainer_lib import (
    Accelerator,
    ConfigurationError,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    LocalSGD,
    PreparationError,
    UnsupportedError,
)

BATCH = 4


def _batches(lengths: Sequence[int]) -> list[list[list[int]]]:
    """Return for each process its batches of samples; no two have a sample in common, and the last are smaller."""
    samples = iter(range(toy.SAMPLES))
    return [[[next(samples) for _ in range(BATCH - index % 2)] for index in range(length)] for length in lengths]


def _optimizer(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9)


def _windows(batches: list[list[list[int]]], steps: int, closes_last: bool = False) -> list[list[list[int]]]:
    """Return the micro-batches of each update: windows go by rounds, in which each process has a batch or none."""
    rounds = max(len(rank_batches) for rank_batches in batches)
    whole = rounds if closes_last else rounds // steps * steps
    return [
        [
            rank_batches[index]
            for rank_batches in batches
            for index in range(start, min(start + steps, rounds))
            if index < len(rank_batches)
        ]
        for start in range(0, whole, steps)
    ]


def _by_hand(batches: list[list[list[int]]], steps: int, weighted: bool, closes_last: bool = False) -> list[Tensor]:
    """Return the weights after the updates that one process makes of all batches, and one more of all samples."""
    inputs, targets, weights = toy.data()
    network = toy.model()
    optimizer = _optimizer(network)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    rounds = max(len(rank_batches) for rank_batches in batches)
    for number, window in enumerate(_windows(batches, steps, closes_last)):
        size = min(steps, rounds - number * steps)
        optimizer.zero_grad()
        for batch in window:
            each = toy.losses(network, inputs[batch], targets[batch])
            ((each * weights[batch]).sum() if weighted else each.mean()).backward()
        divisor = sum(float(weights[batch].sum()) for batch in window) if weighted else size * len(batches)
        for parameter in network.parameters():
            assert parameter.grad is not None
            parameter.grad /= divisor
        optimizer.step()
        schedule.step()
    optimizer.zero_grad()
    toy.losses(network, inputs, targets).mean().backward()
    optimizer.step()
    return toy.parameters(network)


def _train(
    batches: Any,
    steps: int,
    weighted: bool,
    options: dict[str, Any] | None = None,
    even_batches: bool | None = None,
    dispatch: bool = False,
) -> list[Tensor]:
    """Train inside the block on batches of samples, or on a loader of all; then make one more update on all samples."""
    handlers = [DistributedDataParallelKwargs(**(options or {}))]
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=steps, kwargs_handlers=handlers, dispatch_batches=dispatch
    )
    inputs, targets, weights = toy.data()
    network = toy.model()
    optimizer = _optimizer(network)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    network, optimizer, schedule = accelerator.prepare(network, optimizer, schedule)
    if isinstance(batches, DataLoader):
        mine = batches = accelerator.prepare(batches)
    else:
        mine = [torch.tensor(batch) for batch in batches[accelerator.process_index]]
    if options and options.get("static_graph"):
        accelerator.backward(network(inputs).sum() * 0)
        optimizer.zero_grad()
    filters = list(warnings.filters)
    with accelerator.join_uneven_inputs([network], even_batches=even_batches):
        for samples in mine:
            with accelerator.accumulate(network):
                each = toy.losses(network, inputs[samples], targets[samples])
                if weighted:
                    accelerator.backward((each * weights[samples]).sum(), weight=weights[samples].sum())
                else:
                    accelerator.backward(each.mean())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    assert warnings.filters == filters
    accelerator.gradient_accumulation_steps = 1
    half = torch.arange(toy.SAMPLES)[accelerator.process_index :: accelerator.num_processes]
    accelerator.backward(toy.losses(network, inputs[half], targets[half]).mean())
    optimizer.step()
    return toy.parameters(network)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("lengths", "steps", "options"),
    [
        ((3, 4), 1, {}),
        ((0, 2), 1, {}),
        ((4, 1, 0), 1, {"bucket_cap_mb": 0.0003}),
        ((4, 1, 0), 1, {"gradient_as_bucket_view": True}),
        ((3, 4), 2, {}),  # the first process ends within a window
        ((1, 0, 6), 3, {"bucket_cap_mb": 0.0003, "gradient_as_bucket_view": True}),
        ((3, 1), 1, {"find_unused_parameters": True}),
        ((3, 4), 2, {"find_unused_parameters": True}),
        ((3, 0), 1, {"static_graph": True}),
        ((3, 4), 2, {"static_graph": True}),
    ],
)
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_updates_are_those_of_the_batches_there_are(
    lengths: tuple[int, ...], steps: int, options: dict[str, Any], weighted: bool
) -> None:
    batches = _batches(lengths)
    expected = _by_hand(batches, steps, weighted)
    results = run_world(_train, (batches, steps, weighted, options), len(lengths), timeout=60)
    for ours in results:
        toy.assert_same(ours, expected, rtol=3e-6)
        toy.assert_same(ours, results[0], rtol=0)


class _Numbers(IterableDataset[Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        return iter(torch.arange(self.length))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("kind", ["map", "iterable", "dispatched"])
def test_prepared_loaders_read_each_sample_once(kind: str, steps: int, weighted: bool) -> None:
    """With 2 processes: 7 rounds and a half of 3 samples each. The first process alone ends the last window."""
    samples = list(range(39 if steps == 1 else 45))
    data: Any = _Numbers(len(samples)) if kind == "iterable" else torch.arange(len(samples))
    loader = DataLoader(data, batch_size=3)
    batches = [[samples[i : i + 3] for i in range(3 * rank, len(samples), 6)] for rank in range(2)]
    assert len(batches[0]) == len(batches[1]) + 1
    expected = _by_hand(batches, steps, weighted, closes_last=True)

    def train() -> list[Tensor]:
        return _train(loader, steps, weighted, even_batches=False, dispatch=kind == "dispatched")

    for ours in run_world(train, (), 2, timeout=60):
        toy.assert_same(ours, expected, rtol=3e-6)


def _in_two_blocks(lengths: tuple[int, ...], steps: int) -> list[Tensor]:
    """End the first block within a window; the second block completes it."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    inputs, targets, weights = toy.data()
    network = toy.model()
    network, optimizer = accelerator.prepare(network, _optimizer(network))
    rank_batches = _batches(lengths)[accelerator.process_index]
    for batches in (rank_batches[:-1], rank_batches[-1:]):
        with accelerator.join_uneven_inputs([network]):
            for batch in batches:
                with accelerator.accumulate(network):
                    each = toy.losses(network, inputs[batch], targets[batch])
                    accelerator.backward((each * weights[batch]).sum(), weight=weights[batch].sum())
                    optimizer.step()
                    optimizer.zero_grad()
    return toy.parameters(network)


@pytest.mark.parametrize("lengths", [(2, 3), (4, 3, 1)])
def test_a_window_that_nobody_completed_goes_on_after_the_block(lengths: tuple[int, ...]) -> None:
    inputs, targets, weights = toy.data()
    network = toy.model()
    optimizer = _optimizer(network)
    steps = max(lengths)
    samples = [sample for rank_batches in _batches(lengths) for batch in rank_batches for sample in batch]
    (
        (toy.losses(network, inputs[samples], targets[samples]) * weights[samples]).sum() / weights[samples].sum()
    ).backward()
    optimizer.step()
    for ours in run_world(_in_two_blocks, (lengths, steps), len(lengths), timeout=60):
        toy.assert_same(ours, toy.parameters(network), rtol=3e-6)


@pytest.mark.parametrize("options", [{"comm_hook": "fp16"}, {"comm_hook": "power_sgd"}])
def test_compressed_gradients_are_joined_too(options: dict[str, Any]) -> None:
    if options["comm_hook"] == "power_sgd":
        state = {"start_powerSGD_iter": 2, "matrix_approximation_rank": 16, "min_compression_rate": 0.01}
        options = {**options, "comm_state_option": state}
    batches = _batches((1, 6, 3))
    expected = _by_hand(batches, 2, weighted=True)
    results = run_world(_train, (batches, 2, True, options), 3, timeout=60)
    for ours in results:
        toy.assert_same(ours, expected, rtol=2e-3)
        toy.assert_same(ours, results[0], rtol=0)


class _Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body = nn.BatchNorm1d(8), toy.model()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(self.norm(inputs))


def _after_the_block(lengths: tuple[int, ...], precision: str = "no") -> dict[str, Any]:
    """Train with what has states of its own; return these states."""
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    network = _Normalized()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    network, optimizer, schedule = accelerator.prepare(network, optimizer, schedule)
    inputs, targets, _ = toy.data()
    evaluations = 0
    with accelerator.join_uneven_inputs([network]):
        for batch in _batches(lengths)[accelerator.process_index]:
            with accelerator.accumulate(network):
                accelerator.backward(toy.losses(network, inputs[batch], targets[batch]).mean())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            with torch.no_grad():  # which shares nothing, and has no backward
                network(inputs)
            evaluations += 1
    assert evaluations == lengths[accelerator.process_index]
    assert accelerator.sync_gradients
    return {
        "gradients": toy.gradients(network),
        "weights": [*toy.parameters(network), *[buffer.clone() for buffer in network.buffers()]],
        "moments": [value for state in optimizer.state.values() for value in state.values()],
        "steps": [float(state["step"]) for state in optimizer.state.values()],
        "rate": schedule.get_last_lr(),
        "scale": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
    }


@pytest.mark.parametrize(("lengths", "precision"), [((0, 4), "no"), ((6, 3, 1), "no"), ((3, 6), "fp16")])
def test_all_processes_go_on_alike(lengths: tuple[int, ...], precision: str) -> None:
    results = run_world(_after_the_block, (lengths, precision), len(lengths), timeout=60)
    for result in results:
        toy.assert_same(result["weights"], results[0]["weights"], rtol=0)
        toy.assert_same(result["moments"], results[0]["moments"], rtol=0)
        assert result["steps"] == results[0]["steps"]
        assert len(result["steps"]) == 6
        assert result["gradients"] == [], "they went into an update"
        assert result["rate"] == results[0]["rate"]
        assert result["scale"] == results[0]["scale"]


def _in_turns(lengths: tuple[int, ...], steps: int) -> list[Tensor]:
    """Train two models one after the other on each batch, with losses that weigh different things."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    networks = [toy.model(0), toy.model(1)]
    made = [torch.optim.SGD(network.parameters(), lr=0.02) for network in networks]
    *networks, first, second = accelerator.prepare(*networks, *made)
    inputs, targets, weights = toy.data()
    with accelerator.join_uneven_inputs(networks):
        for batch in _batches(lengths)[accelerator.process_index]:
            with accelerator.accumulate(*networks):
                for network, optimizer in zip(networks, (first, second), strict=True):
                    each = toy.losses(network, inputs[batch], targets[batch])
                    weight = weights[batch] if optimizer is first else torch.ones(len(batch))
                    accelerator.backward((each * weight).sum(), weight=weight.sum(), optimizer=optimizer)
                    optimizer.step()
                    optimizer.zero_grad()
    return [*toy.parameters(networks[0]), *toy.parameters(networks[1])]


def test_two_models_in_turns_keep_their_weights_apart() -> None:
    inputs, targets, all_weights = toy.data()
    batch = [sample for rank_batches in _batches((1, 2)) for batch in rank_batches for sample in batch]
    expected: list[Tensor] = []
    for seed, weights in ((0, all_weights), (1, torch.ones(toy.SAMPLES))):
        network = toy.model(seed)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.02)
        ((toy.losses(network, inputs[batch], targets[batch]) * weights[batch]).sum() / weights[batch].sum()).backward()
        optimizer.step()
        expected += toy.parameters(network)
    for ours in run_world(_in_turns, ((1, 2), 2), 2, timeout=60):
        toy.assert_same(ours, expected, rtol=3e-6)


def _messages(act: str) -> str:
    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(static_graph=act == "static graph")]
    )
    network, stranger = toy.model(), toy.model()
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
    joinables: Any = [network]
    try:
        match act:
            case "not prepared":
                joinables = [network, stranger]
            case "no list":
                joinables = network
            case "empty":
                joinables = []
            case "optimizer":
                joinables = [network, optimizer]
            case "sharded states":
                from torch.distributed.optim import ZeroRedundancyOptimizer

                accelerator.prepare(ZeroRedundancyOptimizer(network.parameters(), torch.optim.SGD, lr=0.1))
            case "evenness":
                accelerator.join_uneven_inputs([network], even_batches=1).__enter__()  # type: ignore[arg-type]
            case "each batch":
                accelerator.gradient_state.plugin.num_steps = 2
                accelerator.gradient_state.plugin.sync_each_batch = True
            case "own hook":
                accelerator.gradient_state.plugin.num_steps = 2
                network.register_comm_hook(None, lambda state, bucket: bucket.buffer())
            case "workers":
                accelerator.gradient_state.plugin.num_steps = 2
                accelerator.prepare(DataLoader(_Numbers(5), num_workers=1))
                accelerator.join_uneven_inputs([network], even_batches=False).__enter__()
            case _:
                pass
        with accelerator.join_uneven_inputs(joinables):
            loss = network(torch.ones(1, 8)).sum()
            if act == "nested":
                accelerator.join_uneven_inputs([network]).__enter__()
            if act == "late":
                accelerator.trigger_sync_in_backward(network)
            if act == "stranger":
                accelerator.backward(stranger(torch.ones(1, 8)).sum(), weight=1)
            accelerator.backward(loss)
    except (ConfigurationError, PreparationError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("act", "words"),
    [
        ("not prepared", "PreparationError: join_uneven_inputs got a Sequential that is not prepared"),
        ("no list", "ConfigurationError: joinables must be a list of the prepared models that you train (got a "),
        ("empty", "ConfigurationError: joinables must be a list of the prepared models that you train (got an empty"),
        (
            "optimizer",
            "ConfigurationError: join_uneven_inputs takes prepared models only (got a AcceleratedOptimizer).",
        ),
        ("sharded states", "UnsupportedError: ZeroRedundancyOptimizer sends weights in its steps"),
        ("evenness", "ConfigurationError: even_batches must be True or False, got 1."),
        ("each batch", "ConfigurationError: sync_each_batch=True reduces gradients after each micro-batch"),
        ("own hook", "UnsupportedError: This model has a communication hook of your own"),
        (
            "workers",
            "ConfigurationError: join_uneven_inputs with gradient accumulation does not work with this iterable",
        ),
        ("nested", "ConfigurationError: join_uneven_inputs was called inside join_uneven_inputs."),
        ("late", "ConfigurationError: trigger_sync_in_backward does not work inside join_uneven_inputs"),
        (
            "stranger",
            "ConfigurationError: backward(loss, weight=…) inside join_uneven_inputs reduced no gradients of "
            "a joined model",
        ),
        (
            "static graph",
            "UnsupportedError: static_graph=True does not work with join_uneven_inputs before the first update",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_what_cannot_be_joined_is_said(act: str, words: str) -> None:
    for result in run_world(_messages, (act,), 2, timeout=60):
        assert result.startswith(words)


def test_one_process_checks_the_models_and_reads_as_told() -> None:
    accelerator = Accelerator(cpu=True)
    network = accelerator.prepare(toy.model())
    loader = accelerator.prepare(DataLoader(TensorDataset(*toy.data()[:2]), batch_size=5))
    with accelerator.join_uneven_inputs([network], even_batches=False):
        assert loader.even_batches is False
        assert sum(len(inputs) for inputs, _ in loader) == toy.SAMPLES
    assert loader.even_batches is True
    with pytest.raises(PreparationError, match="not prepared"), accelerator.join_uneven_inputs([toy.model()]):
        pass


def _evaluated(averaged_first: bool) -> list[int]:
    accelerator = Accelerator(cpu=True)
    network, averaged = accelerator.prepare(toy.model()), toy.model().eval()
    loader = accelerator.prepare(DataLoader(TensorDataset(*toy.data()[:2]), batch_size=10))
    network.eval()
    rows = []
    joinables = [averaged, network] if averaged_first else [averaged]
    with accelerator.join_uneven_inputs(joinables, even_batches=False), torch.no_grad():
        for inputs, _ in loader:
            for model in joinables:
                assert len(model(inputs)) == len(inputs)
            rows.append(len(inputs))
    return rows


@pytest.mark.parametrize("averaged_first", [True, False])
def test_a_model_that_is_only_evaluated_need_not_be_prepared(averaged_first: bool) -> None:
    ranks = run_world(_evaluated, (averaged_first,), 2, timeout=60)
    assert ranks == [[10, 10, 8], [10, 10]]
    assert _evaluated(averaged_first) == [10, 10, 10, 10, 8]


def _left_by_an_error() -> list[Any]:
    accelerator = Accelerator(cpu=True)
    network = accelerator.prepare(toy.model())
    loader = accelerator.prepare(DataLoader(TensorDataset(*toy.data()[:2]), batch_size=5))
    with pytest.raises(KeyError), accelerator.join_uneven_inputs([network], even_batches=False):
        raise KeyError
    accelerator.backward(network(torch.ones(1, 8)).sum())
    hooks = len(network._forward_pre_hooks) + len(network._forward_hooks)
    return [loader.even_batches, network._join_config.enable, accelerator.window.waits_for_all, hooks]


def test_an_error_inside_leaves_everything_as_it_was() -> None:
    assert run_world(_left_by_an_error, (), 2, timeout=60) == [[True, False, False, 0]] * 2


def _sharded() -> list[str]:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(auto_wrap_policy="no_wrap"))
    network = accelerator.prepare(toy.model())
    messages: list[str] = []
    for refused in (
        lambda: accelerator.join_uneven_inputs([network]).__enter__(),
        lambda: LocalSGD(accelerator, network, 2),
    ):
        try:
            refused()
        except UnsupportedError as error:
            messages.append(str(error))
    LocalSGD(accelerator, network, 2, enabled=False)
    return messages


def test_shards_cannot_be_joined_nor_stay_local() -> None:
    for join, local in run_world(_sharded, (), 2, timeout=60):
        assert join.startswith("join_uneven_inputs needs a whole model on each rank, and FSDP shards it.")
        assert local.startswith("LocalSGD needs a whole model on each rank, and FSDP shards it.")
