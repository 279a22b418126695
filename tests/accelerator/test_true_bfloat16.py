"""bfloat16 throughout: what is cast and what is not, and that it is the loop which one writes by hand."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.worlds import run_world
from trainer_lib import Accelerator, FullyShardedDataParallelPlugin, TrainingArguments, UnsupportedError
from trainer_lib.options.enums import PrecisionType

BF16 = torch.bfloat16
UNIT = 2.0**-8  # what rounding to bfloat16 changes a number by, at most
RATE = 0.25


class Network(nn.Module):
    """Has running statistics, a buffer that is cast, one of integers, and a complex weight that stays as it is."""

    seen: tuple[Any, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.register_buffer("shift", torch.full((3,), 0.25))
        self.register_buffer("order", torch.arange(3))

    def forward(self, batch: dict[str, Any], scale: Tensor | None = None) -> dict[str, Any]:
        inputs, numbers = batch["inputs"], batch["numbers"]
        outputs = self.last(torch.tanh(self.norm(self.first(inputs)))) + self.shift
        self.seen = (inputs.dtype, numbers[0].dtype, outputs.dtype, None if scale is None else scale.dtype)
        return {"scores": outputs[:, self.order], "numbers": numbers[0]}


def test_floating_tensors_are_cast_and_others_are_not() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16-true")
    model = Network()
    model.wave = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    before = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if not p.is_complex()], lr=1e-2)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    inputs = torch.ones(4, 6)
    outputs = prepared({"inputs": inputs, "numbers": [torch.arange(4)]}, scale=torch.ones(1, dtype=torch.float64))
    assert model.seen == (BF16, torch.int64, BF16, BF16)
    assert (outputs["scores"].dtype, outputs["numbers"].dtype, inputs.dtype) == (
        torch.float32,
        torch.int64,
        inputs.dtype,
    )
    accelerator.backward(outputs["scores"].square().sum())
    optimizer.step()
    assert dict(model.named_parameters()) == before, "optimizers know them"
    assert {p.dtype for p in before.values()} == {BF16, torch.complex64}
    assert before["last.weight"].grad is not None
    assert before["last.weight"].grad.dtype is BF16
    assert {b.dtype for b in model.buffers()} == {BF16, torch.int64}
    states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    assert {value.dtype for value in states} == {BF16}


def test_a_model_whose_shapes_a_first_batch_tells_is_cast_too() -> None:
    model = Accelerator(cpu=True, mixed_precision="bf16-true").prepare(nn.LazyLinear(3))
    assert model(torch.ones(2, 5)).dtype is torch.float32
    assert model.weight.dtype is BF16


def test_autocast_is_there_for_what_is_computed_beside_the_model() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16-true")
    model = accelerator.prepare(nn.Sequential(nn.Linear(4, 4), nn.Softmax(dim=1)))
    with pytest.raises(RuntimeError, match="dtype"):
        model[0](torch.ones(1, 4))  # beside the model's own forward
    with accelerator.autocast():
        assert model[0](torch.ones(1, 4)).dtype is BF16
        assert model(torch.ones(1, 4)).dtype is torch.float32


def test_the_model_keeps_its_type_when_the_engine_lets_go_of_it() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16-true")
    model = accelerator.prepare(nn.Linear(4, 4))
    accelerator.free_memory()
    assert model(torch.ones(1, 4, dtype=BF16)).dtype is BF16


def _batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(16):
        inputs = torch.randn(8, 6, generator=generator)
        yield inputs, inputs[:, :3].argmax(dim=1)


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def _by_hand(dtype: torch.dtype, kind: Any) -> tuple[list[float], list[Tensor]]:
    model = _network().to(dtype)
    optimizer = kind(model.parameters(), lr=RATE)
    losses: list[float] = []
    for number, (inputs, targets) in enumerate(_batches(), start=1):
        loss = cross_entropy(model(inputs.to(dtype)).float(), targets)
        (loss / 2).backward()
        losses.append(loss.item())
        if number % 2 == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return losses, [p.detach() for p in model.parameters()]


def _by_engine(sharded: bool = False, kind: Any = torch.optim.SGD) -> tuple[list[float], list[Tensor]]:
    plugin = FullyShardedDataParallelPlugin() if sharded else None
    accelerator = Accelerator(cpu=True, mixed_precision="bf16-true", gradient_accumulation_steps=2, fsdp_plugin=plugin)
    model = _network()
    model, optimizer = accelerator.prepare(model, kind(model.parameters(), lr=RATE))
    rows = 8 // accelerator.num_processes
    local_rows = slice(accelerator.process_index * rows, accelerator.process_index * rows + rows)
    losses: list[float] = []
    for inputs, targets in _batches():
        with accelerator.accumulate(model):
            loss = cross_entropy(model(inputs[local_rows]), targets[local_rows])
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    state = accelerator.strategy.model_state(model)
    weights = [value.detach().clone() for value in state.values()]
    accelerator.free_memory()
    return losses, weights


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_one_process_is_the_loop_by_hand_to_the_bit(kind: Any) -> None:
    losses, weights = _by_engine(kind=kind)
    expected_losses, expected = _by_hand(BF16, kind)
    assert losses == expected_losses
    assert all(torch.equal(first, second) for first, second in zip(weights, expected, strict=True))
    assert losses != _by_hand(torch.float32, kind)[0], "the loop would see another type"


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp"])
def test_two_processes_stay_as_near_to_one_as_rounding_lets_them(sharded: bool) -> None:
    """Sums over two processes are rounded otherwise: by a unit of the gradient, and so of each update."""
    losses, weights = _by_hand(BF16, torch.optim.SGD)
    start = [p.detach() for p in _network().parameters()]
    ranks = run_world(_by_engine, (sharded,), 2, timeout=60)
    assert all(actual == pytest.approx(losses, rel=UNIT) for actual, _ in ranks)
    for left, other, first in zip(ranks[0][1], weights, start, strict=True):  # the main process has whole ones
        assert left.dtype is BF16
        spacing = 2.0 ** (other.float().abs().max().log2().floor() - 7)
        # Each of eight updates may end on the neighbouring number; as signs are random, not all the same way.
        assert float((left.float() - other.float()).abs().max()) <= 3 * spacing
        assert float((left.float() - first).abs().max()) > 12 * spacing, "it has learned more than that"


def _gradient() -> float:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16-true", fsdp_plugin=FullyShardedDataParallelPlugin())
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    gradient_of_rank = [1024.0, 1.0, -1024.0, 1.0][accelerator.process_index]
    accelerator.backward(model(torch.tensor([[gradient_of_rank]])).sum())
    gradient: Any = next(model.parameters()).grad
    assert gradient.dtype is BF16
    return float(gradient.full_tensor())


def test_sharded_gradients_are_summed_in_float32() -> None:
    # 1024 + 1 has no bfloat16: summed in it, a one would be lost.
    assert run_world(_gradient, (), 4, timeout=60) == [0.5] * 4


@pytest.mark.parametrize(
    "make",
    [lambda name: Accelerator(cpu=True, mixed_precision=name), lambda name: TrainingArguments(mixed_precision=name)],
)
def test_other_names_are_refused_with_the_name_to_give(make: Any) -> None:
    with pytest.raises(
        UnsupportedError, match=r"'fp16-true' is not supported by this version: gradients below 6e-8.* Use 'bf16-true'"
    ):
        make("fp16-true")
    with pytest.raises(UnsupportedError, match="'16-true' is not supported by this version: gradients below 6e-8"):
        make("16-true")
    with pytest.raises(ValueError, match="mixed_precision='bf16-mixed' is called 'bf16' in this library"):
        make("bf16-mixed")
    assert make(PrecisionType.BF16_TRUE).mixed_precision == make("BF16-True").mixed_precision == "bf16-true"
