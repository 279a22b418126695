"""Pipelines: losses, gradient norms and weights equal those of one process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from tests.worlds import run_world
from trainer_lib import ParallelismConfig
from trainer_lib.foundation.errors import ConfigurationError, PreparationError
from trainer_lib.options.parallel.pipeline_options import TorchPipelineParallelConfig, check_micro_batches
from trainer_lib.pipeline import Pipeline
from trainer_lib.pipeline.stages import cut

VOCABULARY, LENGTH, STEPS = 32, 6, 6


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.tanh(self.linear(self.norm(inputs)))


def _model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "sequential":
        blocks = [_Block() for _ in range(6)]
        return nn.Sequential(nn.Embedding(VOCABULARY, 16), *blocks, nn.Linear(16, VOCABULARY))
    import transformers

    hf: Any = transformers
    if kind == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 16}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCABULARY, **sizes, **dropout))
    config = hf.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return hf.LlamaForCausalLM(config)


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")


def _windows(size: int, replicas: int, steps: int = STEPS) -> list[list[list[tuple[Tensor, Tensor]]]]:
    """Return for each step the windows of the replicas, with unlike numbers of ignored targets; the last is short."""
    generator = torch.Generator().manual_seed(1)
    windows = []
    for step in range(steps):
        count = size // 2 if step == steps - 1 else size
        inputs = torch.randint(VOCABULARY, (replicas, count, 2, LENGTH), generator=generator)
        targets = (inputs * 3 + 1) % VOCABULARY
        targets[torch.rand(targets.shape, generator=generator) < 0.3] = -100
        windows.append([list(zip(*pair, strict=True)) for pair in zip(inputs, targets, strict=True)])
    return windows


def _alone(kind: str, size: int, replicas: int) -> tuple[list[float], list[float], dict[str, Tensor], Tensor]:
    model = _model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)  # rounding of zero gradients stays small
    losses, norms, pairs = [], [], []
    for step in _windows(size, replicas):
        pairs = [pair for window in step for pair in window]
        items = sum(int((targets != -100).sum()) for _, targets in pairs)
        loss = torch.zeros(())
        for inputs, targets in pairs:
            outputs = model(inputs)
            loss = loss + _loss(getattr(outputs, "logits", outputs), targets) / items
        loss.backward()
        norms.append(clip_grad_norm_(model.parameters(), 0.5).item())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        outputs = model(torch.cat([inputs for inputs, _ in pairs]))
    return losses, norms, model.state_dict(), getattr(outputs, "logits", outputs)


def _train(kind: str, config: dict[str, Any], size: int, **options: Any) -> tuple[Any, ...]:
    sizes = ParallelismConfig(**config)
    pipeline = Pipeline(_model(kind), _loss, sizes, **options)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2, eps=1e-3)  # rounding of zero gradients stays small
    replicas = config.get("dp_replicate_size", 1)
    replica = pipeline.dp_group.rank() if pipeline.dp_group is not None else 0
    losses, norms = [], []
    steps = _windows(size, replicas)
    for step in steps:
        losses.append(pipeline.step(step[replica]).item())
        norms.append(pipeline.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    inputs = [inputs for window in steps[-1] for inputs, _ in window]
    outputs = pipeline.forward(inputs, broadcast=True)
    only_last = pipeline.forward(inputs)
    assert (only_last is not None) == pipeline.is_last
    return losses, norms, pipeline.state_dict(), outputs, pipeline.optimizer_state_dict(optimizer)


def _check(kind: str, world: int, size: int = 8, **options: Any) -> None:
    replicas = options.pop("replicas", 1)
    config = {"pp_size": world // replicas, "dp_replicate_size": replicas}
    losses, norms, state, outputs = _alone(kind, size, replicas)
    for result in run_world(lambda: _train(kind, config, size, **options), (), world, timeout=240):
        torch.testing.assert_close(result[0], losses, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(result[1], norms, rtol=1e-6, atol=1e-6)
        assert list(result[2]) == list(state)
        torch.testing.assert_close(result[2], dict(state), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(result[3], outputs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "kind", ["sequential", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gpt2", "llama"))]
)
def test_two_stages_equal_one_process(kind: str) -> None:
    _check(kind, 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sequential", "gpt2"])
def test_replicas_of_pipelines_equal_one_process(kind: str) -> None:
    _check(kind, 4, replicas=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    ["GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble"],
)
def test_each_schedule_equals_one_process(schedule: str) -> None:
    _check("gpt2", 2, schedule=schedule)


@pytest.mark.slow
def test_four_stages_equal_one_process() -> None:
    _check("llama", 4)


def _resumed(kind: str, pp_size: int, states: tuple[Any, Any], steps: int) -> list[float]:
    pipeline = Pipeline(_model(kind), _loss, ParallelismConfig(pp_size=pp_size))
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
    pipeline.load_state_dict(states[0])
    pipeline.load_optimizer_state_dict(optimizer, states[1])
    losses = []
    for step in _windows(8, 1)[:steps]:
        losses.append(pipeline.step(step[0]).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.slow
def test_weights_and_optimizer_resume_at_another_size() -> None:
    _, _, state, _, optimizer = run_world(lambda: _train("gpt2", {"pp_size": 2}, 8), (), 2, timeout=240)[0]
    states = (state, optimizer)
    alone, two, four = (
        run_world(lambda size=size: _resumed("gpt2", size, states, 4), (), size, timeout=240)[0] for size in (1, 2, 4)
    )
    torch.testing.assert_close(two, alone, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(four, alone, rtol=1e-6, atol=1e-6)


class _TiedRow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList([_Block() for _ in range(3)])
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def _tied_in_double() -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    pipeline = Pipeline(_TiedRow().double(), _loss, ParallelismConfig(pp_size=3), "GPipe", blocks="blocks.*")
    (window, *_), *_ = _windows(2, 1)
    return float(pipeline.step(window)), {name: w.grad for name, w in pipeline.named_parameters() if w.grad is not None}


def test_a_stage_without_a_tied_weight_sums_its_gradient_in_the_type_of_the_weight() -> None:
    torch.manual_seed(0)
    model = _TiedRow().double()
    (window, *_), *_ = _windows(2, 1)
    tokens, targets = (torch.cat(part) for part in zip(*window, strict=True))
    loss = _loss(model(tokens), targets) / (targets != -100).sum()
    loss.backward()
    for found, gradients in run_world(_tied_in_double, (), 3, timeout=120):
        assert found == pytest.approx(float(loss.detach()), rel=1e-12)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad)


def _frozen_tie() -> list[bool]:
    torch.manual_seed(0)
    model = _TiedRow()
    model.embedding.weight.requires_grad_(False)
    pipeline = Pipeline(model, _loss, ParallelismConfig(pp_size=2), "GPipe", blocks="blocks.*")
    optimizer = torch.optim.SGD([weight for weight in pipeline.parameters() if weight.requires_grad], lr=0.1)
    for window, *_ in _windows(2, 1)[:2]:
        pipeline.step(window)
        optimizer.step()
        optimizer.zero_grad()
    return [weight.grad is None for weight in pipeline.parameters()]


def test_a_frozen_tied_weight_gets_no_gradient() -> None:
    assert all(all(found) for found in run_world(_frozen_tie, (), 2, timeout=120))


def test_what_cannot_be_a_pipeline_is_refused() -> None:
    one = ParallelismConfig()
    with pytest.raises(ConfigurationError, match=r"has no list of repeated blocks .* nn.ModuleList"):
        Pipeline(nn.Linear(2, 2), _loss, one)
    with pytest.raises(ConfigurationError, match=r"9 stages need as many blocks, and Sequential has 8"):
        Pipeline(_model("sequential"), _loss, one, schedule="LoopedBFS", stages_per_rank=9)
    with pytest.raises(ConfigurationError, match=r"Unknown schedule 'zigzag'\. Known: GPipe"):
        Pipeline(_model("sequential"), _loss, one, schedule="zigzag")
    with pytest.raises(ConfigurationError, match=r"ZBVZeroBubble takes stages_per_rank=2 \(got 3\)"):
        TorchPipelineParallelConfig(schedule="zbvzerobubble", stages_per_rank=3)
    with pytest.raises(ConfigurationError, match="A Pipeline cannot evaluate with the schedule ZBVZeroBubble"):
        Pipeline(_model("sequential"), _loss, one, schedule="zbvzerobubble")
    with pytest.raises(ConfigurationError, match=r"DualPipeV with pp_size=2 needs at least 4 micro-batches \(got 3\)"):
        check_micro_batches("DualPipeV", 3, 2)
    with pytest.raises(ConfigurationError, match=r"1F1B takes stages_per_rank=1 \(got 2\)"):
        Pipeline(_model("sequential"), _loss, one, stages_per_rank=2)
    with pytest.raises(ConfigurationError, match=r"blocks='h.\*' names no modules"):
        Pipeline(_model("sequential"), _loss, one, blocks="h.*")
    pipeline = Pipeline(_model("sequential"), _loss, one)
    inputs = torch.zeros(2, LENGTH, dtype=torch.long)
    with pytest.raises(ConfigurationError, match=r"loss after the last stage, not in the model \(got labels\)"):
        pipeline.step([(inputs, inputs)], labels=inputs)
    with pytest.raises(ConfigurationError, match="need equal shapes"):
        pipeline.step([(inputs, inputs), (inputs[:1], inputs[:1])])
    with pytest.raises(ConfigurationError, match="does not fit the model: missing"):
        pipeline.load_state_dict({})


class _NormFirst(nn.Module):
    """Holds its last norm before the blocks, and may use its last dropout before them too."""

    def __init__(self, drops_twice: bool) -> None:
        super().__init__()
        self.norm, self.drops_twice = nn.LayerNorm(2), drops_twice
        self.blocks = nn.ModuleList([nn.Linear(2, 2) for _ in range(4)])
        self.dropout = nn.Dropout(0.0)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.dropout(inputs) if self.drops_twice else inputs
        for block in self.blocks:
            hidden = block(hidden)
        return self.dropout(self.norm(hidden))


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(("drops_twice", "name"), [(False, "norm"), (True, "blocks.0")])
def test_a_module_that_runs_elsewhere_than_it_is_held_is_refused(drops_twice: bool, name: str, index: int) -> None:
    model = _NormFirst(drops_twice)
    names = [f"blocks.{number}" for number in range(4)]
    with pytest.raises(PreparationError, match=f"{name} runs after modules that the model holds after it"):
        cut(model, names, [0, 2, 4], index)(torch.ones(1, 2))
    assert torch.equal(cut(model, names, [0, 4], 0)(torch.ones(1, 2)), model(torch.ones(1, 2)))
    if not drops_twice:  # as the error advises
        first, second = (cut(model, [*names, "norm"], [0, 2, 5], stage) for stage in (0, 1))
        assert torch.equal(second(first(torch.ones(1, 2))), model(torch.ones(1, 2)))
