"""Split layers: outputs and gradients of the whole layer, for each kind of layer and style, in graphs too."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize
from torch.utils.data import default_collate

from benchmarks.parallelism.messages import Messages
from tests.strategies.split import LLAMA_SEQUENCES, Split, accelerator_for, data, llama, model_of
from tests.worlds import run_world
from trainer_lib.strategies.tensor_parallel.split_layers import is_known
from trainer_lib.strategies.tensor_parallel.styles import STYLES
from trainer_lib.utils import TorchDynamoPlugin

TOKENS = torch.tensor([[1, 2, 5, 6], [6, 0, 5, 1]])


class Normalized(nn.Linear):
    """A linear layer whose rows have length 1, whatever part of them a rank has."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, normalize(self.weight, dim=1), self.bias)


class Scaled(nn.Embedding):
    """An embedding with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return 3.0 * super().forward(input)


class Gated(nn.Module):
    """Layers with one input, which is changed in place before the last of them if they do not train."""

    def __init__(self, is_frozen: bool = False) -> None:
        super().__init__()
        self.gate, self.up, self.late = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.is_frozen = is_frozen
        for weight in (*self.gate.parameters(), *self.up.parameters(), *self.late.parameters()):
            weight.requires_grad_(not is_frozen)

    def forward(self, inputs: Tensor) -> Tensor:
        given = inputs + 1.0
        gated = self.gate(given).tanh() * self.up(given)
        given = given.mul_(2.0) if self.is_frozen else given
        return self.down(gated + self.late(given).sin())


def conv1d(inputs: int, outputs: int) -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    module = Conv1D(outputs, inputs)
    nn.init.normal_(module.bias)  # type: ignore[arg-type]  # it is a Parameter
    return module


def rms_norm(width: int) -> nn.Module:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    return LlamaRMSNorm(width)


def scaled_embedding() -> nn.Module:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    return Gemma3TextScaledWordEmbedding(7, 6, padding_idx=1, embed_scale=2.5)


class Case(NamedTuple):
    """Layers in a row, and how each is split."""

    layers: Callable[[], list[nn.Module]]
    styles: tuple[str, ...] | dict[str, str]
    indices: Tensor | None = None
    takes_dtensor: bool = False


GATED = {"0.gate": "colwise", "0.up": "colwise", "0.late": "colwise", "0.down": "rowwise"}
CASES = {
    "columns, then rows": Case(lambda: [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)], ("colwise", "", "rowwise")),
    "without biases": Case(
        lambda: [nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)], ("colwise", "rowwise")
    ),
    "parts of different sizes, gathered": Case(lambda: [nn.Linear(6, 5), nn.Tanh()], ("colwise_gather_output", "")),
    "a shared input": Case(lambda: [Gated()], GATED),
    "a shared input of frozen layers": Case(lambda: [Gated(is_frozen=True)], GATED),
    "rows of a whole input": Case(lambda: [nn.Linear(6, 6)], ("rowwise_split_input",)),
    "transposed": Case(lambda: [conv1d(6, 8), nn.Tanh(), conv1d(8, 6)], ("colwise", "", "rowwise")),
    "transposed and gathered": Case(lambda: [conv1d(6, 5)], ("colwise_gather_output",)),
    "a DTensor goes in": Case(lambda: [nn.Linear(6, 6)], ("colwise_gather_output",), takes_dtensor=True),
    "vocabulary": Case(lambda: [nn.Embedding(7, 6)], ("embedding_rowwise",), TOKENS),
    "vocabulary with padding here": Case(lambda: [nn.Embedding(7, 6, padding_idx=1)], ("embedding_rowwise",), TOKENS),
    "vocabulary with padding there": Case(lambda: [nn.Embedding(7, 6, padding_idx=-1)], ("rowwise",), TOKENS),
    "vocabulary of Gemma": Case(lambda: [scaled_embedding()], ("embedding_rowwise",), TOKENS),
    "width of an embedding": Case(lambda: [nn.Embedding(7, 6, padding_idx=5)], ("embedding_colwise",), TOKENS),
    "parts of sequences": Case(
        lambda: [nn.Embedding(8, 6), nn.LayerNorm(6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), rms_norm(6)],
        ("rowwise_scatter_sequence", "sequence_parallel_gather", "colwise", "", "rowwise_scatter_sequence",
         "sequence_parallel_gather"),
        TOKENS,
    ),
    "norms of torch": Case(
        lambda: [nn.Embedding(8, 6), nn.LayerNorm(6, elementwise_affine=False), nn.RMSNorm(6)],
        ("rowwise_scatter_sequence", "sequence_parallel", "sequence_parallel_gather"),
        TOKENS,
    ),
    "a forward of the user's": Case(lambda: [Normalized(6, 6)], ("rowwise_split_input",)),
    "an embedding of the user's": Case(lambda: [Scaled(8, 6)], ("embedding_rowwise",), TOKENS),
}  # fmt: skip


def _computed(names: list[str]) -> list[dict[str, Tensor]]:
    """Return outputs and gradients of each case, those of a copy and of gradients of gradients too."""
    return [_of_case(CASES[name]) for name in names]


def _of_case(case: Case) -> dict[str, Tensor]:
    torch.manual_seed(0)
    styles = case.styles
    plan = styles if isinstance(styles, dict) else {str(index): style for index, style in enumerate(styles) if style}
    accelerator = accelerator_for(Split(plan=plan))
    model = accelerator.prepare(nn.Sequential(*case.layers()).double())
    inputs = torch.randn(2, 4, 6, dtype=torch.float64).requires_grad_() if case.indices is None else case.indices
    twin = copy.deepcopy(accelerator.unwrap_model(model))
    given = _as_dtensor(inputs, accelerator.torch_device_mesh) if case.takes_dtensor else inputs
    with torch.no_grad():
        for weight in twin.parameters():
            weight.mul_(2.0)
        of_twin = twin(given)
    output = model(given)
    weights: list[Any] = list(model.parameters())
    penalty = output.square().sum()
    if case.indices is None:
        (gradient,) = torch.autograd.grad(output.pow(3).sum(), inputs, create_graph=True)
        penalty = penalty + gradient.square().sum()
    penalty.backward()
    gradients = {str(index): _whole(w.grad) for index, w in enumerate(weights) if w.requires_grad}
    accelerator.free_memory()
    found = {"output": output.detach(), "of the copy": of_twin, **gradients}
    return found if inputs.grad is None else found | {"inputs": inputs.grad}


def _as_dtensor(value: Tensor, mesh: Any) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    return value if mesh is None else DTensor.from_local(value, mesh, [Replicate()], run_check=False)


def _whole(gradient: Any) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


@pytest.fixture(scope="module")
def computed() -> tuple[list[dict[str, Tensor]], list[list[dict[str, Tensor]]]]:
    """Return what each case gives on one process and on two."""
    (alone,) = run_world(_computed, (list(CASES),), 1)
    return alone, run_world(_computed, (list(CASES),), 2)


@pytest.mark.parametrize("name", CASES)
def test_a_split_layer_computes_what_the_whole_one_does(name: str, computed: Any) -> None:
    alone, together = computed
    index = list(CASES).index(name)
    assert len(alone[index]) > 2
    for of_rank in together:
        torch.testing.assert_close(of_rank[index], alone[index], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("module", "style", "expected"),
    [
        (nn.Linear(2, 2), "colwise", True),
        (nn.Embedding(2, 2), "embedding_rowwise", True),
        (nn.LayerNorm(2), "sequence_parallel", True),
        (nn.LayerNorm([2, 2]), "sequence_parallel", False),
        (Normalized(2, 2), "rowwise", False),
        (Scaled(2, 2), "embedding_rowwise", False),
        (scaled_embedding(), "embedding_rowwise", True),
        (nn.Embedding(2, 2, max_norm=1.0), "embedding_rowwise", False),
        (nn.Embedding(2, 2, scale_grad_by_freq=True), "embedding_rowwise", False),
        (nn.Embedding(2, 2, sparse=True), "embedding_rowwise", False),
        (nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), "colwise", False),
        (nn.Dropout(), "sequence_parallel", False),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_only_known_layers_compute_with_parts(module: nn.Module, style: str, expected: bool) -> None:
    assert is_known(module, STYLES[style]) is expected


def test_a_forward_that_was_replaced_is_not_known() -> None:
    module = nn.Linear(2, 2)
    module.forward = lambda input: input  # type: ignore[method-assign]
    assert not is_known(module, STYLES["colwise"])


def _messages(is_frozen: bool) -> tuple[list[int], bool]:
    """Return the sizes of the messages of a backward, and whether an input is held after it."""
    accelerator = accelerator_for(Split(plan=GATED))
    model = accelerator.prepare(nn.Sequential(Gated(is_frozen)))
    output = model(torch.randn(2, 6).requires_grad_())
    with Messages() as messages:
        output.sum().backward()
    gate: Any = accelerator.unwrap_model(model).get_submodule("0.gate")
    shared = gate.forward.func.__self__._shared_input
    return [message.size for message in messages.counts.elements()], shared._seen is not None


@pytest.mark.parametrize(("is_frozen", "count"), [(False, 1), (True, 2)])
def test_the_gradient_of_a_shared_input_is_one_message(is_frozen: bool, count: int) -> None:
    for sizes, holds in run_world(_messages, (is_frozen,), 2):
        assert sizes == [2 * 6 * 4] * count
        assert not holds


def _in_graphs(backend: str | None) -> tuple[list[float], int]:
    from torch._dynamo.utils import counters

    counters.clear()
    plugin = TorchDynamoPlugin(backend=backend, fullgraph=True) if backend else None
    accelerator = accelerator_for(Split(plan=LLAMA_SEQUENCES), dynamo_plugin=plugin)
    model = model_of(partial(llama, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses: list[float] = []
    for _ in range(2):
        loss = model(**default_collate(data(4)))["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated")  # torch's compiler does so
def test_a_split_model_compiles_to_one_graph() -> None:
    expected = run_world(_in_graphs, (None,), 2)
    compiled = run_world(_in_graphs, ("aot_eager",), 2, timeout=240)
    for (losses, graphs), (eager, _) in zip(compiled, expected, strict=True):
        assert graphs == 1
        assert losses == pytest.approx(eager, rel=1e-6)
