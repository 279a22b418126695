"""Pipelines that are cut by tracing: models whose blocks do not run in a plain row, with the numbers of one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import pipe_split
from torch.nn.functional import cross_entropy

from tests.strategies.pipelines import assert_windows_are_one_process
from tests.strategies.split import LENGTH, VOCABULARY, Plain, Split, assert_as_one_process, bert, gpt2, llama, model_of
from tests.worlds import run_world
from trainer_lib import (
    Accelerator,
    ConfigurationError,
    MemoryKwargs,
    ParallelismConfig,
    PreparationError,
    UnsupportedError,
)
from trainer_lib.options.parallel.pipeline_options import SPLIT_BACKWARD
from trainer_lib.state import PartialState
from trainer_lib.utils import TorchPipelineParallelConfig

TOKENS = torch.zeros(2, LENGTH, dtype=torch.long)
EXAMPLE = {"input_ids": TOKENS, "labels": TOKENS}


class Skips(nn.Module):
    """Two halves, of which the second takes what each block of the first one has computed, and a mask."""

    calls_split = False

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.rises = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])  # registered first, and run last
        self.falls = nn.ModuleList([nn.Sequential(nn.ReLU(inplace=True), nn.Linear(16, 16)) for _ in range(2)])
        self.head = nn.Linear(16, VOCABULARY)
        self.unused = nn.Linear(2, 2).requires_grad_(False)
        self.forwards: Tensor
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        mask = (input_ids > 3).float()[..., None]
        hidden, kept = self.embed(input_ids), list[Tensor]()
        self.forwards.add_(1)
        for block in self.falls:
            hidden = block(hidden) * mask
            kept.append(hidden)
        if self.calls_split:
            pipe_split()
        for block, other in zip(self.rises, reversed(kept), strict=True):
            hidden = block(hidden + other) * mask
        logits = self.head(hidden)
        loss = logits.mean() if labels is None else cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits, "kept": kept}


class Splits(Skips):
    """The same, cut by a call in its forward."""

    calls_split = True


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    options: dict[str, Any] = {"vocab_size": VOCABULARY, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**options, **sizes))


def traced(pp_size: int = 2, **options: Any) -> dict[str, Any]:
    """Return the sizes of a mesh for a model that is traced."""
    options.setdefault("example_inputs", EXAMPLE)
    return {"pp_size": pp_size, "pp_handler": TorchPipelineParallelConfig(**options)}


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        (Skips, 2),
        *(pytest.param(kind, 2, marks=pytest.mark.slow) for kind in (Splits, Plain, gpt2, llama, bert)),
        *(pytest.param(kind, 4, marks=pytest.mark.slow) for kind in (Skips, t5)),
    ],
)
def test_traced_stages_are_one_process(kind: Callable[[], nn.Module], ranks: int) -> None:
    # Some large models are traced once: their batches have the shape of the example.
    example = {name: TOKENS.repeat(2, 1) for name in EXAMPLE} if kind in (llama, bert, t5) else EXAMPLE
    case = Split(kind=kind, sizes=traced(ranks, example_inputs=example), weighted=kind is not bert)
    assert_as_one_process(case, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Skips, gpt2])
def test_replicas_of_traced_stages_are_one_process(kind: Callable[[], nn.Module]) -> None:
    sizes = {**traced(), "dp_replicate_size": 2}
    assert_as_one_process(Split(kind=kind, sizes=sizes, weighted=True, updates=20 if kind is Skips else 3), 4)


class Logits(Skips):
    """The same, without a loss."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        return super().forward(input_ids, labels)["logits"]


@pytest.mark.parametrize(
    "schedule",
    ["1F1B", *(pytest.param(name, marks=pytest.mark.slow) for name in ("Interleaved1F1B", *SPLIT_BACKWARD))],
)
def test_windows_of_traced_stages_are_one_process(schedule: str) -> None:
    assert_windows_are_one_process(Logits, schedule, 2, example=[TOKENS])


class Counts(nn.Module):
    """Blocks with running statistics, dropout, and a weight that both use."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.first = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.second = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.scale, self.same_scale = shared, shared

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs) * self.scale) * self.same_scale


def _counting_run(folder: Path, resumes: bool) -> Any:
    torch.manual_seed(3)
    is_spread = PartialState(cpu=True).num_processes > 1
    config = ParallelismConfig(**traced(example_inputs=[torch.zeros(4, 8)])) if is_spread else None
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    model = Counts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    if resumes:
        accelerator.load_state(folder)
    outputs = torch.zeros(())
    for step in range(1 if resumes else 2):
        if step == 1:
            accelerator.save_state(folder)
        outputs = model(torch.arange(32.0).reshape(4, 8))
        accelerator.backward(outputs.square().sum())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        outcome = [outputs.detach(), model(torch.arange(24.0).reshape(3, 8))]
    held: Any = accelerator.unwrap_model(model)
    return outcome, accelerator.get_state_dict(model), held.first[1].running_mean is None


def test_statistics_dropout_and_a_shared_weight_resume_bitwise(tmp_path: Path) -> None:
    runs = [run_world(_counting_run, (tmp_path / "c", resumes)) for resumes in (False, True)]
    for (expected, state, _), (actual, resumed, _) in zip(*runs, strict=True):
        assert all(map(torch.equal, expected, actual))
        torch.testing.assert_close(resumed, state, rtol=0, atol=0)
        if state:
            assert list(state) == list(Counts().state_dict()), "the names of the plain model, in its order"
            assert state["first.1.num_batches_tracked"] == state["second.1.num_batches_tracked"] == 2
            assert torch.equal(state["scale"], state["same_scale"])
    assert [lacks_first for _, _, lacks_first in runs[0]] == [False, True], "a rank holds what its stage uses"


@pytest.mark.slow
def test_a_checkpoint_of_traced_stages_resumes_on_one_process(tmp_path: Path) -> None:
    ((_, state, _), _) = run_world(_counting_run, (tmp_path / "c", False))
    ((_, alone, _),) = run_world(_counting_run, (tmp_path / "c", True), 1)  # other numbers are dropped
    assert list(alone) == list(state)
    assert alone["second.1.num_batches_tracked"] == 2


def test_a_row_of_blocks_begins_where_it_runs() -> None:
    def halves() -> list[list[str]]:
        model = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**traced())).prepare(model_of(Skips))
        return [sorted({name.partition(".")[0] for name, _ in model.module.named_parameters()}), list(model.stages)]

    first, second = run_world(halves)
    assert first == [["embed", "falls", "unused"], [0]]
    assert second == [["head", "rises"], [1]]


class Decides(nn.Module):
    """A module whose forward asks a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.sum() > 0:
            inputs = inputs + 1
        return self.blocks[1](self.blocks[0](inputs))


class Selects(Decides):
    """A module that passes on as many rows as it finds."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.blocks[0](inputs)
        return self.blocks[1](hidden[hidden[:, 0] > 0])


class Overwrites(Decides):
    """A module that passes on a value and a view of it, and then changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.blocks[0](inputs)
        first = hidden[0]
        return self.blocks[1](hidden) + first


class Ignores(Decides):
    """A module whose second block does not need the first one."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.blocks[0](inputs)
        return self.blocks[1](inputs)


class Twice(Decides):
    """A module that is cut by one call more than there are stages."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.blocks[0](inputs)
        pipe_split()
        hidden = self.blocks[1](hidden)
        pipe_split()
        return hidden + 1


class OnlyTraining(Decides):
    """A module whose evaluation uses a weight on another stage."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.blocks[1](self.blocks[0](inputs))
        return hidden if self.training else self.blocks[0](hidden)


def _text(function: Callable[[], object], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        function()
    return str(caught.value)


def _refused() -> list[str]:
    example: dict[str, Any] = {"example_inputs": [torch.zeros(2, 8)]}
    cases: list[tuple[nn.Module, dict[str, Any], type[Exception]]] = [
        (Decides(), {}, PreparationError),
        (Selects(), {"blocks": ["blocks.0", "blocks.1"]}, PreparationError),
        (Overwrites(), {"blocks": ["blocks.0", "blocks.1"]}, PreparationError),
        (Ignores(), {"blocks": ["blocks.0", "blocks.1"]}, PreparationError),
        (Twice(), {}, ConfigurationError),
        (Twice(), {"blocks": "blocks.*"}, ConfigurationError),
        (Skips(), {"blocks": ["embed", "unused"], "example_inputs": EXAMPLE}, ConfigurationError),
        (nn.Sequential(nn.Linear(8, 8)), {}, ConfigurationError),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {}, PreparationError),
    ]
    texts: list[str] = []
    for model, options, kind in cases:
        config = ParallelismConfig(**traced(**{**example, **options}))
        accelerator = Accelerator(cpu=True, parallelism_config=config)
        texts.append(_text(lambda a=accelerator, m=model: a.prepare(m), kind))
        accelerator.free_memory()
        accelerator.state._reset_state()
    with_checkpointing = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(**traced(**example)),
        kwargs_handlers=[MemoryKwargs(gradient_checkpointing=True)],
    )
    layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)]
    texts.append(_text(lambda: with_checkpointing.prepare(nn.Sequential(*layers)), UnsupportedError))
    return texts


def test_what_cannot_be_traced_is_refused_before_the_first_step() -> None:
    texts = run_world(_refused)[0]
    expected = [
        "Decides cannot be cut by tracing: it decides by the values of tensors, which tracing does not know",
        "would pass on a tensor whose shape depends on values (aten.index.Tensor)",
        "changes a value in place on stage 1 (aten.relu_.default in blocks.1.0), and passes views of it",
        "Stage 0 of the model computes nothing that a later stage needs",
        "calls pipe_split() 2 times, and 2 stages need 1 calls",
        "calls pipe_split(), and blocks='blocks.*' says where to cut it too",
        "names modules that the forward of Skips does not run with these example_inputs: unused",
        "2 stages need as many blocks, and Sequential has 1",
        "Sequential cannot be cut by tracing: ",
        "0 saves activation memory (gradient_checkpointing, activation_offload), which tracing loses",
    ]
    for text, part in zip(texts, expected, strict=True):
        assert part in text
    assert "if inputs.sum() > 0:" in texts[0]


def _other_weights() -> str:
    config = ParallelismConfig(**traced(example_inputs=[torch.zeros(2, 8)]))
    model = Accelerator(cpu=True, parallelism_config=config).prepare(OnlyTraining())
    assert model(torch.zeros(2, 8)).shape == (2, 8)
    model.eval()
    return _text(lambda: model(torch.zeros(2, 8)), PreparationError)


def test_a_call_that_uses_weights_of_another_stage_is_refused_on_all_ranks() -> None:
    for text in run_world(_other_weights):
        assert "Stage 1 uses blocks.0.weight in this call" in text


def _others(sizes: dict[str, Any]) -> str:
    config = ParallelismConfig(**traced(), **sizes)
    return _text(lambda: Accelerator(cpu=True, parallelism_config=config), UnsupportedError)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp_shard_size", "tp_size", "cp_size", "sp_size"])
def test_dimensions_that_split_modules_are_refused(name: str) -> None:
    assert f"and {name}=2 splits modules" in run_world(_others, ({name: 2},), 4)[0]


def test_options_of_tracing_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"a mapping or a sequence of inputs of the model \(got Tensor\)"):
        TorchPipelineParallelConfig(example_inputs=TOKENS)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="blocks_per_stage=2 does not work with example_inputs"):
        TorchPipelineParallelConfig(example_inputs=EXAMPLE, blocks_per_stage=2, schedule="LoopedBFS")
