"""Compiled training beside eager training: the same numbers, under the same names, traced once."""

import importlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.modules.test_compilation import Block, Graphs, Stack
from tests.worlds import run_world
from trainer_lib import Accelerator, ConfigurationError, DistributedDataParallelKwargs
from trainer_lib.options.compile_options import TorchDynamoPlugin
from trainer_lib.state import AcceleratorState
from trainer_lib.testing import reset_states
from trainer_lib.utils import FullyShardedDataParallelPlugin, has_compiled_regions, is_compiled_module

# torch hides this warning of its own while it traces, and cannot where warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
NEEDS_A_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")
TOLERANCE = 1e-6


@pytest.fixture(autouse=True)
def traced_afresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def batches(steps: int, rank: int = 0, size: int = 1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    both = torch.randn(2, steps, 4 * size, 8, generator=generator)
    return [(both[0, step, rank::size], both[1, step, rank::size]) for step in range(steps)]


def make_model() -> Stack:
    torch.manual_seed(0)
    model = Stack()
    for layer in model.layers:
        assert isinstance(layer, Block)
        layer.drop, layer.norm = nn.Identity(), nn.LayerNorm(8)
    return model


def train(
    plugin: TorchDynamoPlugin | None, precision: str = "no", weighted: bool = False, **arguments: Any
) -> tuple[list[float], list[Tensor]]:
    """Train on windows of two micro-batches; return the losses and the weights."""
    accelerator = Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=2, dynamo_plugin=plugin, **arguments
    )
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    losses: list[float] = []
    for inputs, targets in batches(8, accelerator.process_index, accelerator.num_processes):
        with accelerator.accumulate(model):
            error = (model(inputs) - targets).square()
            if weighted:
                accelerator.backward(error.sum(), weight=error.numel())
            else:
                accelerator.backward(error.mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(error.mean().item())
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    accelerator.free_memory()
    return losses, weights


def assert_same(compiled: tuple[list[float], list[Tensor]], eager: tuple[list[float], list[Tensor]]) -> None:
    assert compiled[0] == pytest.approx(eager[0], rel=TOLERANCE)
    for first, second in zip(compiled[1], eager[1], strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)


# Each precision and each way to weigh a loss, and then the other way round.
CASES = [("no", True), ("bf16", False), ("fp16", True)]
OTHER_CASES = [(precision, not weighted) for precision, weighted in CASES]


def compare_cases(cases: list[tuple[str, bool]]) -> list[tuple[int, int]]:
    """Compare compiled with eager training in each case, and return how many graphs were made and run."""
    seen: list[tuple[int, int]] = []
    for precision, weighted in cases:
        eager = train(None, precision, weighted)
        for regional in (False, True):
            graphs = Graphs()
            plugin = TorchDynamoPlugin(graphs, use_regional_compilation=regional)
            assert_same(train(plugin, precision, weighted), eager)
            seen.append((graphs.made, graphs.run))
    return seen


@pytest.mark.parametrize(
    ("processes", "cases"),
    [
        pytest.param(2, CASES, id="two processes"),
        pytest.param(2, OTHER_CASES, id="two processes, other cases", marks=pytest.mark.slow),
        pytest.param(1, CASES + OTHER_CASES, id="one process", marks=pytest.mark.slow),
    ],
)
def test_compiled_training_equals_eager_training_and_is_traced_once(
    processes: int, cases: list[tuple[str, bool]]
) -> None:
    """Micro-batches that stay here and ones that are reduced run one graph: nothing is traced again in between."""
    for seen in run_world(compare_cases, (cases,), processes, timeout=60):
        assert seen == [(1, 8), (1, 24)] * len(cases)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=NEEDS_A_COMPILER)])
def test_torchs_own_backends_train_alike(backend: str) -> None:
    # Compiled headers would be kept in the session's folder. They, processes that compile, and finding out by a
    # compilation which instructions the machine has, take seconds; what is compiled here does without the latter.
    settings = {"cpp_cache_precompile_headers": False, "compile_threads": 1, "cpp.vec_isa_ok": True, "cpp.simdlen": 1}
    with importlib.import_module("torch._inductor.config").patch(**settings):
        assert_same(train(TorchDynamoPlugin(backend, use_regional_compilation=True)), train(None))


@pytest.mark.slow
def test_the_graph_is_cut_by_the_buckets_of_ddp() -> None:
    """So that the first buckets travel while the rest of backward computes."""

    def body() -> list[int]:
        graphs = Graphs()
        accelerator = Accelerator(
            cpu=True, dynamo_backend=graphs, kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=1)]
        )
        model = accelerator.prepare(nn.Sequential(*(nn.Linear(400, 400) for _ in range(4))))
        for _ in range(2):
            accelerator.backward(model(torch.ones(1, 400)).sum())
        return [graphs.made, graphs.run]

    for made, run in run_world(body, timeout=60):
        assert made > 1
        assert run == 2 * made


def test_buckets_too_small_for_torch_to_cut_by_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"bucket_cap_mb must be at least 1 with torch.compile \(got 0.5\)"):
        Accelerator(
            cpu=True,
            dynamo_backend="eager",
            kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=0.5)],  # type: ignore[arg-type]
        )


@pytest.mark.slow
def test_sharded_models_are_compiled_between_the_gathering_of_weights() -> None:
    def plugin(**options: Any) -> FullyShardedDataParallelPlugin:
        return FullyShardedDataParallelPlugin(
            auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap=["Block"], **options
        )

    def body() -> list[list[int]]:
        seen: list[list[int]] = []
        for precision, options in (("no", {}), ("bf16", {"activation_checkpointing": True})):
            eager = train(None, precision, fsdp_plugin=plugin(**options))
            for regional in (False, True):
                graphs = Graphs()
                how = TorchDynamoPlugin(graphs, use_regional_compilation=regional, fullgraph=regional)
                compiled = train(how, precision, fsdp_plugin=plugin(**options))
                assert_same(*((losses, [w.full_tensor() for w in weights]) for losses, weights in (compiled, eager)))  # type: ignore[attr-defined]
                seen.append([graphs.made, graphs.run])
        return seen

    for seen in run_world(body, timeout=60):
        # Whole under bf16: what comes before and after the blocks is traced too.
        assert seen == [[1, 24], [1, 24], [3, 40], [1, 24]]


def test_one_graph_of_a_whole_sharded_model_is_refused() -> None:
    def body() -> str:
        with pytest.raises(ConfigurationError) as error:
            Accelerator(
                cpu=True,
                fsdp_plugin=FullyShardedDataParallelPlugin(),
                dynamo_plugin=TorchDynamoPlugin("eager", fullgraph=True),
            )
        return str(error.value)

    assert all("use_regional_compilation=True" in message for message in run_world(body, timeout=60))


class Dropping(torch.nn.Module):
    """Its gradient times its weight is its output, if the same numbers are dropped both times."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Module()
        self.weight = torch.nn.Parameter(torch.full((64,), 2.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(inputs * self.weight, 0.5)


@pytest.mark.slow
def test_activations_computed_again_drop_what_the_forward_dropped() -> None:
    def body() -> tuple[float, list[float]]:
        plugin = FullyShardedDataParallelPlugin(activation_checkpointing=True)
        with pytest.raises(ConfigurationError, match=r"'eager'.* wrong gradients"):
            Accelerator(cpu=True, fsdp_plugin=plugin, dynamo_backend="eager")
        reset_states()
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, dynamo_backend="aot_eager")
        model = accelerator.prepare(torch.nn.Sequential(Dropping(), Dropping()))
        outputs = model(torch.rand(8, 64)).sum()
        accelerator.backward(outputs)
        weighed = [(parameter.grad * parameter.detach()).full_tensor().sum() for parameter in model.parameters()]  # type: ignore[operator]
        return float(outputs.detach()), [float(value) for value in weighed]

    ((outputs, weighed),) = run_world(body, num_processes=1, timeout=60)
    assert weighed == [pytest.approx(outputs, rel=1e-5)] * 2


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_prepared_model_stays_itself(precision: str) -> None:
    graphs, model = Graphs(), make_model()
    accelerator = Accelerator(cpu=True, mixed_precision=precision, dynamo_backend=graphs)
    prepared = accelerator.prepare(model)
    assert prepared is model
    assert is_compiled_module(prepared)
    assert list(prepared.state_dict()) == list(make_model().state_dict())
    accelerator.free_memory()
    assert not is_compiled_module(model)
    assert "forward" not in vars(model)


def test_models_for_evaluation_are_compiled_too() -> None:
    graphs = Graphs()
    accelerator = Accelerator(cpu=True, dynamo_backend=graphs)
    model = accelerator.prepare_model(make_model().eval(), evaluation_mode=True)
    with torch.no_grad():
        model(batches(1)[0][0])
    assert graphs.run == 1


@pytest.mark.slow
def test_an_unwrapped_model_is_compiled_or_eager_as_asked() -> None:
    def body() -> list[Any]:
        graphs = Graphs()
        accelerator = Accelerator(cpu=True, mixed_precision="bf16", dynamo_backend=graphs)
        inside = make_model()
        prepared = accelerator.prepare(inside)
        inputs = batches(1)[0][0]
        assert accelerator.unwrap_model(prepared) is inside
        eager = accelerator.unwrap_model(prepared, keep_torch_compile=False)
        outputs = eager(inputs)
        runs = [graphs.run]
        torch.testing.assert_close(prepared(inputs), outputs, rtol=0, atol=0)
        runs.append(graphs.run)
        # The view gives up mixed precision by itself.
        plain = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False, keep_torch_compile=False)
        torch.testing.assert_close(plain(inputs), make_model()(inputs), rtol=0, atol=0)
        torch.testing.assert_close(prepared(inputs), outputs, rtol=0, atol=0)
        return [*runs, is_compiled_module(prepared)]

    assert run_world(body, timeout=60) == [[0, 1, True]] * 2


def test_the_launcher_may_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "true")
    assert has_compiled_regions(Accelerator(cpu=True).prepare(make_model()))


def test_settings_are_those_of_the_first_engine_until_it_is_released() -> None:
    accelerator = Accelerator(cpu=True, dynamo_backend="eager")
    assert Accelerator(cpu=True).state.dynamo_plugin == TorchDynamoPlugin("eager")
    with pytest.raises(ConfigurationError, match=r"AOT_EAGER.* came too late"):
        Accelerator(cpu=True, dynamo_backend="aot_eager")
    accelerator.free_memory()
    assert not Accelerator(cpu=True).state.dynamo_plugin.is_active


@pytest.mark.parametrize("arguments", [{"dynamo_backend": "inducter"}, {"dynamo_plugin": "eager"}])
def test_what_cannot_be_meant_is_said_before_a_model_is_touched(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Accelerator(cpu=True, **arguments)
    assert not AcceleratorState._shared_state
