"""Pipeline parallelism in an `Accelerator`: the numbers of one process, whatever stage a rank holds."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.functional import cross_entropy

from tests.strategies.split import (
    LENGTH,
    VOCABULARY,
    WITH_LOGITS,
    WITH_VOCABULARY,
    Plain,
    Split,
    bert,
    gpt2,
    llama,
    model_of,
    train,
)
from tests.worlds import run_world
from trainer_lib import Accelerator, ConfigurationError, ParallelismConfig, PreparationError, UnsupportedError
from trainer_lib.accelerator.weighted_backward import WeightedLoss
from trainer_lib.options.pipeline_options import SPLIT_BACKWARD
from trainer_lib.state import AcceleratorState, PartialState
from trainer_lib.strategies.pipeline_parallel.stage_gates import Cut
from trainer_lib.utils import TorchPipelineParallelConfig, TorchTensorParallelConfig

ALONE, REPLICAS = {"pp_size": 2}, {"dp_replicate_size": 2, "pp_size": 2}
MATRICES: dict[str, Any] = {"tp_size": 2, "pp_size": 2}
SHARDS = {"dp_shard_size": 2, "pp_size": 2}


def four_blocks() -> nn.Module:
    """Four blocks, of which one is frozen, with more dropout in the first two."""
    layers: list[nn.Module] = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(rate)) for rate in (0.5, 0.5, 0.5, 0.0)]
    for parameter in layers[0].parameters():
        parameter.requires_grad = False
    return nn.Sequential(*layers)


def assert_as_one_process(case: Split, ranks: int) -> None:
    (expected,) = run_world(train, (case,), 1, timeout=90)
    for rank, actual in enumerate(run_world(train, (case,), ranks, timeout=90)):
        assert actual["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        assert actual["norms"] == pytest.approx(expected["norms"], rel=1e-6)
        assert actual["stored"] == expected["stored"], "no sample twice"
        if rank == 0:
            assert list(actual["state"]) == list(expected["state"])
            torch.testing.assert_close(actual["state"], expected["state"], rtol=1e-5, atol=1e-6)


def test_two_stages_are_one_process() -> None:
    assert_as_one_process(Split(sizes=ALONE, weighted=True), 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # a linear layer with bias returns a view
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [  # each model is cut in its own way, alone and with split matrices; a replica and a shard hold what was cut
        *((kind, sizes) for kind in (Plain, gpt2, llama, bert) for sizes in (ALONE, MATRICES)),
        *((kind, sizes) for kind in (Plain, gpt2) for sizes in (REPLICAS, SHARDS)),
    ],
    ids=lambda value: getattr(value, "__name__", None) or "-".join(value),
)
def test_stages_and_replicas_are_one_process(kind: Callable[[], nn.Module], sizes: dict[str, Any]) -> None:
    plan, ranks = (WITH_VOCABULARY if kind is Plain else None), 2 * len(sizes)
    assert_as_one_process(Split(kind=kind, sizes=sizes, plan=plan, weighted=kind is not bert), ranks)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_an_update_after_each_batch() -> None:
    assert_as_one_process(Split(kind=gpt2, sizes=ALONE, weighted=True, steps=1), 2)
    assert_as_one_process(Split(kind=gpt2, sizes=SHARDS, steps=1), 4)


@pytest.mark.slow
def test_stages_of_split_and_sharded_matrices_on_eight_ranks() -> None:
    assert_as_one_process(Split(kind=gpt2, sizes={**MATRICES, "dp_shard_size": 2}), 8)


def _accelerator(pp_size: int = 2, **options: Any) -> Accelerator:
    blocks = options.pop("blocks", None)
    config = ParallelismConfig(pp_size=pp_size, pp_handler=TorchPipelineParallelConfig(blocks=blocks))
    return Accelerator(cpu=True, parallelism_config=config, **options)


def _dropout_run(folder: Path, resumes: bool) -> list[Tensor]:
    torch.manual_seed(3)
    accelerator = _accelerator()
    model = four_blocks()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert sum(p.numel() for p in model.parameters()) == 2 * 72, "half of the layers"
    if resumes:
        accelerator.load_state(folder)
    outputs: list[Tensor] = []
    for step in range(1 if resumes else 2):
        if step == 1:
            accelerator.save_state(folder)
        for _ in range(2):  # without accumulate(): each backward reduces
            outputs.append(model(torch.ones(4, 8)))
            accelerator.backward(outputs[-1].square().sum())
        assert not torch.equal(outputs[-1], outputs[-2]), "each forward drops others"
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    draws = accelerator.gather(torch.rand(1))
    assert draws[0] == draws[1], "between forwards the generators are alike"
    model.eval()
    with torch.no_grad():
        return [outputs[-1].detach(), model(torch.ones(1, 8))]


def test_dropout_resumes_bitwise(tmp_path: Path) -> None:
    for expected, actual in zip(
        run_world(_dropout_run, (tmp_path / "c", False)), run_world(_dropout_run, (tmp_path / "c", True)), strict=True
    ):
        assert all(map(torch.equal, expected, actual))


def _row() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(nn.Embedding(VOCABULARY, 16), *blocks, nn.Linear(16, VOCABULARY))


def _window_batches(step: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return micro-batches with unlike numbers of ignored targets, in every third step one of them shorter."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randint(VOCABULARY - 1, (count, 2, LENGTH), generator=generator)
    targets = inputs.roll(1)
    targets[torch.rand(targets.shape, generator=generator) < 0.3] = -100
    batches = list(zip(inputs, targets, strict=True))
    if step % 3 == 2:
        batches[-1] = (batches[-1][0][:1], batches[-1][1][:1])
    return batches


def _train_windows(kind: Callable[[], nn.Module], schedule: str, tp_size: int = 1, steps: int = 4) -> Any:
    size = max(PartialState(cpu=True).num_processes // tp_size, 1)
    handler = TorchPipelineParallelConfig(schedule=schedule)
    config = ParallelismConfig(pp_size=size, tp_size=1 if size == 1 else tp_size, pp_handler=handler)
    accelerator = Accelerator(cpu=True, parallelism_config=config, gradient_accumulation_steps=steps)
    model = model_of(kind)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    def loss_of(batch: Any) -> WeightedLoss:
        outputs = model(batch[0])
        logits = getattr(outputs, "logits", outputs)
        loss = cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum")
        return WeightedLoss(loss, float((batch[1] != -100).sum()))

    def train_window(step: int) -> list[WeightedLoss]:
        batches, sums = _window_batches(step, steps), list[WeightedLoss]()
        for number in range(steps):
            with accelerator.accumulate(model):
                if not accelerator.takes_windows(model):
                    part = loss_of(batches[number])
                    accelerator.backward(part.loss, weight=part.weight)
                    sums.append(part._replace(loss=part.loss.detach()))
                elif number == steps - 1:
                    sums = accelerator.backward_window(model, loss_of, batches)
        return sums

    losses, norms = [], []
    with _counted_steps(get_schedule_class(schedule)) as runs:
        for step in range(4):  # the third has a shorter batch
            sums = train_window(step)
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(sum(part.loss for part in sums) / sum(part.weight for part in sums)))
    return losses, norms, accelerator.get_state_dict(model), runs


@contextmanager
def _counted_steps(kind: Any) -> Generator[list[int]]:
    """Note how many micro-batches each step of a schedule runs."""
    counts: list[int] = []
    step = kind.step

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts.append(len(kwargs["index"]))
        return step(self, *args, **kwargs)

    with patch.object(kind, "step", counted):
        yield counts


def _assert_windows_are_one_process(
    kind: Callable[[], nn.Module], schedule: str, ranks: int, tp_size: int = 1, steps: int = 4
) -> None:
    ((losses, norms, state, _),) = run_world(_train_windows, (kind, schedule, 1, steps), 1, timeout=90)
    for rank, actual in enumerate(run_world(_train_windows, (kind, schedule, tp_size, steps), ranks, timeout=90)):
        assert actual[0] == pytest.approx(losses, rel=1e-6)
        assert actual[1] == pytest.approx(norms, rel=1e-6)
        assert max(actual[3]) == steps, "whole windows ran in the schedule"
        if rank == 0:
            torch.testing.assert_close(actual[2], state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "schedule",
    [
        "1F1B",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("GPipe", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
        ),
    ],
)
def test_windows_in_schedules_are_one_process(schedule: str) -> None:
    _assert_windows_are_one_process(_row, schedule, 2)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_windows_of_four_stages_and_tied_weights(schedule: str) -> None:
    # ZBVZeroBubble takes windows of seven micro-batches or more on four ranks, the others of four.
    _assert_windows_are_one_process(_row, schedule, 4, steps=8 if schedule == "ZBVZeroBubble" else 4)
    if schedule in SPLIT_BACKWARD:
        _assert_windows_are_one_process(partial(gpt2, 4), schedule, 2)
    else:
        _assert_windows_are_one_process(partial(gpt2, 4), schedule, 4, tp_size=2)


class Swaps(nn.Module):
    """A module whose blocks run in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2) for _ in range(2)])

    def forward(self, inputs: Tensor) -> Tensor:
        return self.blocks[0](self.blocks[1](inputs))


class Pairs(nn.Module):
    """A module whose blocks return pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.LSTM(2, 2) for _ in range(2)])

    def forward(self, inputs: Tensor) -> Any:
        for block in self.blocks:
            inputs = block(inputs)[0]
        return inputs


def _text(function: Callable[[], object], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        function()
    return str(caught.value)


def _refused() -> list[str]:
    texts = [
        _text(lambda: _accelerator(mixed_precision="fp16"), UnsupportedError),
        _text(lambda: _accelerator(dynamo_backend="eager"), UnsupportedError),
        _text(lambda: _accelerator(pp_size=3), ConfigurationError),
    ]
    AcceleratorState._reset_state()
    accelerator = _accelerator()
    texts.append(_text(lambda: accelerator.prepare(nn.Linear(2, 2)), ConfigurationError))
    texts.append(_text(lambda: accelerator.prepare(nn.Sequential(nn.Linear(2, 2))), ConfigurationError))
    model, others = accelerator.prepare(Plain()), [accelerator.prepare(kind()) for kind in (Swaps, Pairs)]
    inside = accelerator.unwrap_model(model)
    assert accelerator.pipeline_parallel_rank == accelerator.process_index
    texts.append(_text(lambda: inside(torch.zeros(1, LENGTH, dtype=torch.long), None), PreparationError))
    if accelerator.is_main_process:
        texts += [_text(lambda other=other: other(torch.ones(1, 2)), PreparationError) for other in others]
    return texts


def test_what_cannot_be_a_pipeline_is_refused() -> None:
    fp16, compiled, world, nothing, short, inside, swaps, pairs = run_world(_refused)[0]
    assert "mixed_precision='fp16' does not work with pp_size=2" in fp16
    assert "torch.compile does not work with pp_size=2" in compiled
    assert "there are 2. Start 3 processes, or the product of the sizes must divide 2, for example pp_size=2" in world
    assert "Linear has no list of repeated blocks" in nothing
    assert "2 stages need as many blocks, and Sequential has 1" in short
    assert "is on another rank of the pipeline. Call the model that prepare() returned" in inside
    assert "blocks.1 (Linear) is called on stage 0, and runs on stage 1" in swaps
    assert "blocks.0 (LSTM) returns a tuple, and a pipeline passes one tensor" in pairs


def test_options_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"blocks must be a pattern or a list of module names \(got 3\)"):
        TorchPipelineParallelConfig(blocks=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"blocks='h.\*' names no modules of Plain"):
        Cut.of(Plain(), "h.*", 2)
    model = Plain()
    model.config = type("Config", (), {"is_encoder_decoder": True})  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match="Plain has an encoder and a decoder"):
        Cut.of(model, None, 2)


def _others(sizes: dict[str, Any], schedule: str) -> str:
    config = ParallelismConfig(pp_size=2, **sizes, pp_handler=TorchPipelineParallelConfig(schedule=schedule))
    return _text(lambda: Accelerator(cpu=True, parallelism_config=config), UnsupportedError)


def _split_logits() -> str:
    handler = TorchTensorParallelConfig(plan=WITH_LOGITS)
    config = ParallelismConfig(**MATRICES, tp_handler=handler)
    return _text(lambda: Accelerator(cpu=True, parallelism_config=config).prepare(Plain()), UnsupportedError)


@pytest.mark.slow
def test_a_loss_from_split_logits_is_refused() -> None:
    assert "Leave loss_parallel=True and the style" in run_world(_split_logits, (), 4)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp_shard_size", "tp_size"])
def test_a_zero_bubble_of_parts_of_weights_is_refused(name: str) -> None:
    text = run_world(_others, ({name: 2}, "InterleavedZeroBubble"), 4)[0]
    assert f"for whole weights only (got {name}=2). Choose 'Interleaved1F1B'" in text


def _loss_with(calls: int) -> str:
    accelerator = _accelerator(gradient_accumulation_steps=1)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def loss_of(batch: Tensor) -> WeightedLoss:
        outputs = [model(batch) for _ in range(calls)]
        return WeightedLoss(sum((output.sum() for output in outputs), start=torch.zeros(())), 1.0)

    if calls or accelerator.is_main_process:
        with accelerator.accumulate(model):
            try:
                accelerator.backward_window(model, loss_of, [torch.ones(1, 2)])
            except (PreparationError, RuntimeError) as error:
                return str(error)
    return ""


def test_a_loss_needs_one_call_of_the_model() -> None:
    assert "does not call the model, and a schedule of a pipeline needs one call" in run_world(_loss_with, (0,))[0]


def _without_pipeline() -> str:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    return _text(lambda: accelerator.backward_window(model, lambda batch: batch, []), ConfigurationError)


def test_windows_need_a_pipeline() -> None:
    assert "Call backward for each micro-batch" in run_world(_without_pipeline, (), 1)[0]
