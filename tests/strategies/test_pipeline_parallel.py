"""Pipeline parallelism in an `Accelerator`: the numbers of one process, whatever stage a rank holds."""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.strategies.pipelines import assert_windows_are_one_process, window_batches
from tests.strategies.split import (
    LENGTH,
    VOCABULARY,
    WITH_LOGITS,
    WITH_VOCABULARY,
    Plain,
    Split,
    assert_as_one_process,
    bert,
    gpt2,
    llama,
    model_of,
)
from tests.worlds import run_world
from trainer_lib import (
    Accelerator,
    ConfigurationError,
    GradScalerKwargs,
    ParallelismConfig,
    PreparationError,
    UnsupportedError,
)
from trainer_lib.accelerator.weighted_backward import WeightedLoss
from trainer_lib.launchers import ProcessFailedError
from trainer_lib.options.parallel.pipeline_options import SPLIT_BACKWARD
from trainer_lib.state import AcceleratorState, PartialState
from trainer_lib.strategies.pipeline_parallel.stage_gates import Cut, StageGates
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


class _TiedEnds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return self.head(hidden)


def _frozen_after_prepare() -> bool:
    accelerator, model = _accelerator(), _TiedEnds()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), weight_decay=0.5))
    (tied,) = [p for p in model.parameters() if p.shape == (VOCABULARY, 8)]
    before = tied.detach().clone()
    tied.requires_grad_(False)
    accelerator.backward(model(torch.arange(8).view(2, 4)).square().mean())
    optimizer.step()
    return torch.equal(tied.detach(), before)


def test_a_tied_weight_that_is_frozen_later_stays() -> None:
    assert run_world(_frozen_after_prepare, timeout=60) == [True, True]


def _is_freed() -> bool:
    accelerator = _accelerator()
    model = accelerator.prepare(four_blocks())
    left = weakref.ref(model)
    del accelerator, model
    gc.collect()
    return left() is None


def test_a_model_is_freed_with_its_accelerator() -> None:
    assert run_world(_is_freed, timeout=60) == [True, True]


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
    assert_windows_are_one_process(_row, schedule, 2)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_windows_of_four_stages_and_tied_weights(schedule: str) -> None:
    # ZBVZeroBubble takes windows of seven micro-batches or more on four ranks, the others of four.
    assert_windows_are_one_process(_row, schedule, 4, steps=8 if schedule == "ZBVZeroBubble" else 4)
    if schedule in SPLIT_BACKWARD:
        assert_windows_are_one_process(partial(gpt2, 4), schedule, 2)
    else:
        assert_windows_are_one_process(partial(gpt2, 4), schedule, 4, tp_size=2)


def _gradients_of_equal_windows(schedule: str) -> list[Any]:
    handler = TorchPipelineParallelConfig(schedule=schedule)
    config = ParallelismConfig(pp_size=2, pp_handler=handler)
    accelerator = Accelerator(cpu=True, parallelism_config=config, gradient_accumulation_steps=5)
    model = accelerator.prepare(made := model_of(_row), torch.optim.SGD(made.parameters(), lr=0.1))[0]

    def loss_of(batch: Any) -> WeightedLoss:
        return WeightedLoss(cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum"), 1.0)

    gradients: list[Any] = []
    for _ in range(2):
        model.zero_grad()
        accelerator.backward_window(model, loss_of, window_batches(0, 5))
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    return gradients


@pytest.mark.parametrize(
    "schedule",
    [
        "LoopedBFS",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("1F1B", "GPipe", "Interleaved1F1B", "DualPipeV")),
    ],
)
def test_the_first_window_adds_gradients_in_the_order_of_the_next(schedule: str) -> None:
    # A resumed run learns the shapes again, from the first micro-batch of its first window.
    for first, second in run_world(_gradients_of_equal_windows, (schedule,)):
        assert all(map(torch.equal, first, second))


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
    compiled, world, nothing, short, inside, swaps, pairs = run_world(_refused)[0]
    assert "torch.compile does not work with pp_size=2" in compiled
    assert "there are 2. Start 3 processes, or the product of the sizes must divide 2, for example pp_size=2" in world
    assert "Linear has no list of repeated blocks" in nothing
    assert "2 stages need as many blocks, and Sequential has 1" in short
    assert "is on another rank of the pipeline. Call the model that prepare() returned" in inside
    assert "blocks.1 (Linear) is called on stage 0, and runs on stage 1" in swaps
    assert "blocks.0 (LSTM) returns a tuple, and a pipeline passes one tensor" in pairs


class NormAfter(nn.Module):
    """A module that holds its last norm before the blocks, and reads the type of its first layer, as ViT does."""

    def __init__(self, reads_type: bool) -> None:
        super().__init__()
        self.first, self.norm, self.reads_type = nn.Linear(2, 2), nn.LayerNorm(2), reads_type
        self.blocks = nn.ModuleList([nn.Linear(2, 2) for _ in range(2)])

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs.to(self.first.weight.dtype) if self.reads_type else inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm(hidden)


def _last_of_two_stages(reads_type: bool, blocks: list[str] | None = None) -> Tensor:
    model = NormAfter(reads_type)
    gates = StageGates(Cut.of(model, blocks, 2))
    gates.remove_others(model, [1])
    gates.install(model, [1])
    return gates.run(model, 1, (torch.ones(1, 2),), (torch.ones(1, 2),), {})


def test_a_module_held_before_the_blocks_that_runs_after_them_is_refused() -> None:
    with pytest.raises(PreparationError, match=r"norm \(LayerNorm\) is called on stage 1, and runs on stage 0"):
        _last_of_two_stages(False)
    _last_of_two_stages(False, ["blocks.0", "blocks.1", "norm"])  # as the error advises


class _Repeats(nn.Module):
    """Calls each block, or the whole row, twice."""

    def __init__(self, each: bool) -> None:
        super().__init__()
        self.blocks, self.each = nn.ModuleList([nn.Linear(2, 2) for _ in range(2)]), each

    def forward(self, inputs: Tensor) -> Tensor:
        first, second = self.blocks
        for block in (first, first, second, second) if self.each else (first, second, first, second):
            inputs = block(inputs)
        return inputs


@pytest.mark.parametrize("each", [True, False])
def test_a_block_at_the_end_of_a_stage_that_is_called_twice_is_refused(each: bool) -> None:
    def run() -> Any:
        return _accelerator().prepare(_Repeats(each))(torch.ones(1, 2))

    with pytest.raises(ProcessFailedError, match=r"blocks\.0 \(Linear\) is called on stage 1, .* in a row, each once"):
        run_world(run, timeout=60)


def test_what_a_model_reads_of_a_module_of_another_stage_is_named() -> None:
    with pytest.raises(AttributeError, match=r"first \(Linear\) is on another rank .* reads its 'weight' on this one"):
        _last_of_two_stages(True)


@pytest.mark.parametrize("option", ["output_router_logits", "output_hidden_states", "output_attentions"])
def test_outputs_that_all_blocks_record_are_refused(option: str) -> None:
    model: Any = llama()
    model.set_attn_implementation("eager")  # the others return no attention weights
    gates = StageGates(Cut.of(model, None, 2))
    with pytest.raises(PreparationError, match=f"LlamaForCausalLM with {option}=True uses what each of its blocks"):
        gates.run(model, 0, (), (), {option: True})
    inner = nn.ModuleDict({"model": model})
    setattr(model.config, option, True)
    for cut in (model, inner):
        with pytest.raises(PreparationError, match=rf"Cut the model by tracing .*, or set {option}=False"):
            Cut.of(cut, None, 2)


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


class Deep(nn.Module):
    """Two blocks, of which the first one has the larger gradients: it overflows where the second one does not."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Linear(8, 8) for _ in range(2)]
        blocks[0].weight.data /= 64
        self.blocks = nn.ModuleList(blocks)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](inputs * 64))


def _fp16_run(folder: Path, resumes: bool = False, sizes: dict[str, Any] = ALONE, **options: Any) -> Any:
    """Train; return the loss, the norm, whether it was skipped and the scale of each update, and the weights."""
    handler = TorchPipelineParallelConfig(**options)
    is_spread = PartialState(cpu=True).num_processes > 1
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp16",
        parallelism_config=ParallelismConfig(**sizes, pp_handler=handler) if is_spread else None,
        gradient_accumulation_steps=2,
        kwargs_handlers=[GradScalerKwargs(init_scale=2.0**11, growth_interval=2)],
    )
    model = model_of(Deep)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    if resumes:
        accelerator.load_state(folder)
    batches = torch.randn(8, 2, 4, 8, generator=torch.Generator().manual_seed(1))
    replica, replicas = accelerator.data_group.rank, accelerator.data_group.size
    updates: list[tuple[float, ...]] = []
    are_finite: list[bool] = []

    def loss_of(batch: Tensor) -> WeightedLoss:
        rows = batch.chunk(replicas)[replica]
        return WeightedLoss(model(rows).square().sum(), float(len(rows)))

    for step in range(4 if resumes else 0, 8):
        if step == 4 and not resumes:
            accelerator.save_state(folder)
        losses: list[WeightedLoss] = []
        for number, batch in enumerate(batches[step]):
            with accelerator.accumulate(model):
                if not accelerator.takes_windows(model):
                    losses.append(loss_of(batch))
                    accelerator.backward(losses[-1].loss, weight=losses[-1].weight)
                elif number == 1:
                    losses = accelerator.backward_window(model, loss_of, list(batches[step]))
        gradients: list[Any] = [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters()]
        are_finite.append(all(bool(gradient.isfinite().all()) for gradient in gradients))
        norm = float(accelerator.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
        loss = sum(float(part.loss.detach()) for part in losses) / sum(float(part.weight) for part in losses)
        updates.append((loss, norm, float(optimizer.step_was_skipped), accelerator.scaler.get_scale()))
    return updates, are_finite, accelerator.get_state_dict(model)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(
    ("sizes", "options", "tolerance"),
    [
        # The last bit of a norm may round a 16-bit weight to its neighbor.
        (ALONE, {}, 1e-3),
        (ALONE, {"schedule": "1F1B"}, 1e-3),
        (ALONE, {"example_inputs": [torch.zeros(4, 8)]}, 1e-3),
        # Each replica computes gradients of its rows in 16 bits.
        pytest.param(REPLICAS, {"schedule": "1F1B"}, 2e-2, marks=pytest.mark.slow),
        pytest.param(SHARDS, {"schedule": "1F1B"}, 2e-2, marks=pytest.mark.slow),
    ],
    ids=["alone", "in a schedule", "traced", "with replicas", "with shards"],
)
def test_fp16_skips_the_updates_that_one_process_skips(
    sizes: dict[str, Any], options: dict[str, Any], tolerance: float, tmp_path: Path
) -> None:
    ((expected, _, state),) = run_world(_fp16_run, (tmp_path / "one",), 1)
    losses, norms, skips, scales = zip(*expected, strict=True)
    assert 1 < sum(skips) < 6, "some updates overflow, and not the others"

    def run() -> Any:
        return _fp16_run(tmp_path / "several", False, sizes, **options)

    runs = run_world(run, (), 2 * len(sizes))
    for updates, _, weights in runs:
        actual = list(zip(*updates, strict=True))
        if len(sizes) == 1:
            assert actual[0][:5] == pytest.approx(losses[:5], rel=1e-6)
            assert actual[0] == pytest.approx(losses, rel=tolerance)
        assert actual[1] == pytest.approx(norms, rel=tolerance, nan_ok=True)
        assert (actual[2], actual[3]) == (skips, scales), "on all stages together"
        if weights:
            torch.testing.assert_close(weights, state, rtol=tolerance, atol=tolerance / 10)
    assert any(mine and skipped for mine, skipped in zip(runs[-1][1], skips, strict=True)), "for another's overflow"


def test_fp16_resumes_with_the_scale_on_stages_and_on_one_process(tmp_path: Path) -> None:
    ((updates, _, state), _) = run_world(_fp16_run, (tmp_path / "c",))
    for ranks in (2, 1):
        (resumed, _, weights), *_ = run_world(_fp16_run, (tmp_path / "c", True), ranks)
        assert [row[2:] for row in resumed] == [row[2:] for row in updates[4:]]
        torch.testing.assert_close(weights, state, rtol=1e-6, atol=1e-7)
