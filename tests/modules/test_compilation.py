"""Compilation in place: names, classes and weights stay, and calls run what torch traced."""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer_lib.modules.compilation import compile_model, compile_regions, eager_view, undo_compilation
from trainer_lib.modules.unwrapping import extract_model_from_parallel, has_compiled_regions, is_compiled_module
from trainer_lib.options.compile_options import TorchDynamoPlugin

# torch hides this warning of its own while it traces, and cannot where warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

INPUTS = torch.linspace(-1, 1, 16).reshape(2, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm: nn.Module = nn.BatchNorm1d(8)
        self.drop: nn.Module = nn.Dropout(0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.drop(self.norm(inputs + self.linear(inputs).tanh()))


class Stack(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = self.first(inputs)
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


class Graphs:
    """A backend of torch.compile that runs what was traced as it is, and counts."""

    def __init__(self) -> None:
        self.made = 0
        self.run = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.made += 1

        def run(*arguments: Any) -> Any:
            self.run += 1
            return graph.forward(*arguments)

        return run


@pytest.fixture
def graphs() -> Iterator[Graphs]:
    torch.compiler.reset()
    yield Graphs()
    torch.compiler.reset()


def test_a_whole_model_is_one_graph_under_its_own_names(graphs: Graphs) -> None:
    model = Stack().eval()
    names, expected = list(model.state_dict()), model(INPUTS)
    compile_model(model, TorchDynamoPlugin(graphs))
    torch.testing.assert_close(model(INPUTS), expected, rtol=0, atol=0)
    assert (graphs.made, graphs.run) == (1, 1)
    assert list(model.state_dict()) == names
    assert type(model) is Stack
    assert is_compiled_module(model)
    assert not has_compiled_regions(model)


def test_all_blocks_of_a_model_share_one_compilation(graphs: Graphs) -> None:
    model = Stack(blocks=12).eval()
    names, expected = list(model.state_dict()), model(INPUTS)
    compile_model(model, TorchDynamoPlugin(graphs, use_regional_compilation=True, fullgraph=True))
    torch.testing.assert_close(model(INPUTS), expected, rtol=0, atol=0)
    assert (graphs.made, graphs.run) == (1, 12)
    assert list(model.state_dict()) == names
    assert has_compiled_regions(model)
    assert not is_compiled_module(model)


def test_a_model_without_repeated_blocks_is_compiled_whole(graphs: Graphs) -> None:
    model = compile_regions(Block().eval(), backend=graphs)
    model(INPUTS)
    assert is_compiled_module(model)
    assert graphs.run == 1


@pytest.mark.parametrize("use_regional_compilation", [False, True])
def test_modules_of_torch_itself_are_compiled_too(graphs: Graphs, use_regional_compilation: bool) -> None:
    """Where `nn.Module.compile()` would do nothing."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    expected = model(INPUTS[None])
    compile_model(model, TorchDynamoPlugin(graphs, use_regional_compilation=use_regional_compilation, fullgraph=True))
    torch.testing.assert_close(model(INPUTS[None]), expected)
    assert graphs.run == (3 if use_regional_compilation else 1)


def test_many_models_of_one_class_are_all_compiled(graphs: Graphs) -> None:
    """torch counts by code, and gives up at 8 without an error."""
    models = [nn.Sequential(nn.Linear(8, size)) for size in range(1, 13)]
    for model in models:
        compile_model(model, TorchDynamoPlugin(graphs))
        model(INPUTS)
    assert graphs.run == 12


def test_nothing_happens_where_nothing_is_asked_for() -> None:
    model = Stack()
    for plugin in (TorchDynamoPlugin(), TorchDynamoPlugin("inductor", disable=True)):
        compile_model(model, plugin)
        assert not is_compiled_module(model)


@pytest.mark.parametrize("use_regional_compilation", [False, True])
def test_compilation_comes_off_again(graphs: Graphs, use_regional_compilation: bool) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))
    before = [dict(vars(module)) for module in model.modules()]
    compile_model(model, TorchDynamoPlugin(graphs, use_regional_compilation=use_regional_compilation))
    undo_compilation(model)
    model(INPUTS)
    assert graphs.made == 0
    after = [{k: v for k, v in vars(module).items() if k != "_compiled_call_impl"} for module in model.modules()]
    assert after == before


def test_another_engine_compiles_anew(graphs: Graphs) -> None:
    model, second = Stack(), Graphs()
    compile_model(model, TorchDynamoPlugin(graphs, use_regional_compilation=True))
    compile_model(model, TorchDynamoPlugin(second))
    model(INPUTS)
    assert (graphs.made, second.run) == (0, 1)


def compiled_outside(model: nn.Module, graphs: Graphs) -> nn.Module:
    return torch.compile(model, backend=graphs)  # type: ignore[return-value]


def compiled_inside(model: nn.Module, graphs: Graphs) -> nn.Module:
    model.compile(backend=graphs)
    return model


def compiled_in_part(model: nn.Module, graphs: Graphs) -> nn.Module:
    assert isinstance(model, Stack)
    model.layers[1] = compiled_outside(model.layers[1], graphs)
    return model


COMPILED_BY_ITS_AUTHOR = pytest.mark.parametrize("by_author", [compiled_outside, compiled_inside, compiled_in_part])


@COMPILED_BY_ITS_AUTHOR
def test_what_its_author_compiled_stays_so_and_that_is_said(
    by_author: Any, graphs: Graphs, caplog: pytest.LogCaptureFixture
) -> None:
    model, other = by_author(Stack(), graphs), Graphs()
    compile_model(model, TorchDynamoPlugin(other))
    assert "is compiled already, so the options of dynamo_plugin are ignored" in caplog.text
    undo_compilation(model)
    model(INPUTS)
    assert (graphs.run, other.made) == (1, 0)


# -- without compilation ---------------------------------------------------------------------------------------------


@COMPILED_BY_ITS_AUTHOR
def test_an_eager_view_runs_eagerly_and_leaves_the_model_compiled(by_author: Any, graphs: Graphs) -> None:
    model = by_author(Stack(), graphs).eval()
    eager = eager_view(model)
    assert isinstance(eager, Stack)
    expected = eager(INPUTS)
    assert graphs.run == 0
    torch.testing.assert_close(model(INPUTS), expected, rtol=0, atol=0)
    assert graphs.run == 1
    assert list(eager.state_dict()) == list(Stack().state_dict())


@pytest.mark.parametrize("use_regional_compilation", [False, True])
def test_a_view_shares_weights_buffers_and_modes(graphs: Graphs, use_regional_compilation: bool) -> None:
    model = Stack()
    compile_model(model, TorchDynamoPlugin(graphs, use_regional_compilation=use_regional_compilation))
    eager = eager_view(model)
    assert (type(eager).__name__, type(eager).__module__) == (Stack.__name__, Stack.__module__)
    mine, its = (list(module.state_dict(keep_vars=True).values()) for module in (eager, model))
    assert all(first is second for first, second in zip(mine, its, strict=True))
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()}, assign=True)
    assert not any(value.any() for value in eager.state_dict().values())
    eager.eval()
    assert [module.training for module in model.modules()] == [False] * len(list(model.modules()))
    model.layers[0].train()
    assert [layer.training for layer in eager.layers] == [True, False, False]  # type: ignore[union-attr]
    assert eager_view(eager) is eager
    assert graphs.made == 0


def test_a_model_that_is_not_compiled_is_its_own_view() -> None:
    model = Stack()
    assert eager_view(model) is model


def test_a_module_that_is_there_twice_has_one_view(graphs: Graphs) -> None:
    shared = nn.Linear(8, 8)
    model = nn.ModuleDict({"one": shared, "other": shared})
    shared.compile(backend=graphs)
    eager: Any = eager_view(model)
    assert eager["one"] is eager["other"] is not shared


def test_a_slice_of_a_view_is_a_list_of_its_own(graphs: Graphs) -> None:
    model = compile_regions(Stack(), backend=graphs)
    layers: Any = eager_view(model).get_submodule("layers")
    some = layers[:2]
    assert isinstance(some, nn.ModuleList)
    assert list(some) == list(layers)[:2]
    some.eval()
    assert not layers[0].training
    assert layers.training
    assert len(copy.deepcopy(some)) == 2


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda view: pickle.loads(pickle.dumps(view))])
def test_copies_of_a_view_are_plain_models_of_their_own(graphs: Graphs, duplicate: Any) -> None:
    model = Stack().eval()
    compile_model(model, TorchDynamoPlugin(graphs))
    twin = duplicate(eager_view(model))
    assert type(twin) is Stack
    torch.testing.assert_close(twin(INPUTS), model(INPUTS))
    nn.init.zeros_(twin.first.weight)
    twin.train()
    assert not model.training
    assert model.first.weight.any()


# -- inside wrappers -------------------------------------------------------------------------------------------------


def test_wrappers_come_off() -> None:
    model = Stack()
    assert extract_model_from_parallel(nn.DataParallel(model)) is model
    assert extract_model_from_parallel(nn.DataParallel(nn.DataParallel(model))) is model
    assert extract_model_from_parallel(model) is model


def test_wrappers_around_parts_come_off_where_asked_for() -> None:
    part = Block()
    model = nn.ModuleDict({"part": nn.DataParallel(part), "rest": nn.Linear(2, 2)})
    assert extract_model_from_parallel(model) is model
    bare: Any = extract_model_from_parallel(nn.DataParallel(model), recursive=True)
    assert bare["part"] is part
    assert bare["rest"] is model["rest"]
    assert isinstance(model["part"], nn.DataParallel)


def test_compilation_inside_of_wrappers_is_seen(graphs: Graphs) -> None:
    model = Stack()
    wrapped = nn.DataParallel(model)
    assert not is_compiled_module(wrapped)
    model.compile(backend=graphs)
    assert is_compiled_module(wrapped)
    assert not has_compiled_regions(wrapped)
    assert extract_model_from_parallel(wrapped) is model
    assert extract_model_from_parallel(wrapped, keep_torch_compile=False) is not model
    around = compiled_outside(nn.DataParallel(Stack()), graphs)
    assert is_compiled_module(around)
    assert isinstance(extract_model_from_parallel(around), Stack)
