"""`prepare_pippy`: outputs of a model that is spread over ranks are those of the whole model, chunk by chunk."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.worlds import run_world
from trainer_lib import prepare_pippy
from trainer_lib.foundation.errors import ConfigurationError, PreparationError, UnsupportedError
from trainer_lib.inference import find_pippy_batch_size, generate_device_map


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, images: Tensor) -> Tensor:
        return images + self.norm(self.convolution(images)).relu()


class Network(nn.Module):
    """A network of images whose parts are attributes, not a list."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layer1, self.layer2 = nn.Conv2d(3, 4, 3), Residual(), Residual()
        self.head = nn.Linear(4, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layer2(self.layer1(self.stem(images))).mean((2, 3)))


def _network() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return Network(), (torch.randn(5, 3, 8, 8),), {}


def _sequential() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(5))), (torch.randn(5, 6),), {}


def _transformer(name: str, **sizes: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    import transformers

    hf: Any = transformers
    sizes |= {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = getattr(hf, f"{name.removesuffix('ForCausalLM').removesuffix('LMHeadModel').removesuffix('Model')}Config")
    mask = torch.ones(5, 7, dtype=torch.long)
    mask[1, 4:] = mask[4, 2:] = 0
    inputs = {"input_ids": torch.randint(3, 40, (5, 7)), "attention_mask": mask}
    return getattr(hf, name)(config(**sizes)), (), inputs


_LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}


def _llama() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return _transformer("LlamaForCausalLM", **_LLAMA)


def _gpt2() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return _transformer("GPT2LMHeadModel", n_embd=16, n_layer=4, n_head=2, n_positions=16)


def _bert() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return _transformer("BertModel", **_LLAMA)


def _outputs(
    make: Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]], processes: int, options: dict[str, Any]
) -> tuple[Any, Any, list[str], int]:
    """Return the outputs of the spread model, those of the whole one, where it is cut, and the weights of this rank."""
    torch.manual_seed(0)
    model, args, kwargs = make()
    model.eval()
    chunks = options.get("num_chunks") or processes
    with torch.no_grad():
        parts = [
            model(*(arg[rows] for arg in args), **{name: value[rows] for name, value in kwargs.items()})
            for rows in (slice(5 * index // chunks, 5 * (index + 1) // chunks) for index in range(chunks))
        ]
    whole = torch.cat([_tensor(part) for part in parts])
    model = prepare_pippy(model, **options)
    held = sum(weight.numel() for weight in model.parameters())
    rank = torch.distributed.get_rank()
    outputs = model(*args, **kwargs) if rank == 0 else model()
    return None if outputs is None else _tensor(outputs), whole, model.hf_split_points, held


def _tensor(outputs: Any) -> Tensor:
    for name in ("logits", "last_hidden_state"):
        outputs = getattr(outputs, name, outputs)
    return outputs


@pytest.mark.parametrize(
    ("make", "options", "points"),
    [
        pytest.param(_sequential, {}, ["2"], marks=pytest.mark.slow),
        (_sequential, {"split_points": ["1"], "num_chunks": 5}, ["1"]),
        (_network, {"split_points": ["layer2"], "num_chunks": 3}, ["layer2"]),
        (_llama, {"no_split_module_classes": ["LlamaDecoderLayer"]}, ["model.layers.2"]),
        pytest.param(_gpt2, {"num_chunks": 1}, ["transformer.h.2"], marks=pytest.mark.slow),
        pytest.param(_bert, {"split_points": "encoder.layer.1"}, ["encoder.layer.1"], marks=pytest.mark.slow),
    ],
)
def test_outputs_are_those_of_the_whole_model(make: Any, options: dict[str, Any], points: list[str]) -> None:
    total = sum(weight.numel() for weight in make()[0].parameters())
    for gathers in (False, True):
        results = run_world(_outputs, (make, 2, {**options, "gather_output": gathers}), 2)
        for rank, (outputs, whole, cut, held) in enumerate(results):
            assert cut == points
            assert held < total
            if rank == 1 or gathers:
                assert torch.equal(outputs, whole)
            else:
                assert outputs is None


@pytest.mark.slow
def test_four_ranks() -> None:
    for outputs, whole, points, _ in run_world(_outputs, (_llama, 4, {"gather_output": True}), 4):
        assert points == ["model.layers.1", "model.layers.2", "model.layers.3"]
        assert torch.equal(outputs, whole)


def test_a_single_process_keeps_its_model() -> None:
    model = nn.Linear(2, 2)  # which cannot be cut
    assert prepare_pippy(model, gather_output=True) is model
    assert model(torch.zeros(3, 2)).requires_grad


def _error(make: Any, options: dict[str, Any], call: Any = None) -> str:
    try:
        model = prepare_pippy(make()[0].eval(), **options)
        call(model)
    except (ConfigurationError, PreparationError, UnsupportedError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (_sequential, {"split_points": ["1", "2"]}, "1 for 2 processes (got 2: ['1', '2'])"),
        (_sequential, {"split_points": ["0"]}, "The stages cannot begin with 0"),
        (_sequential, {"split_points": ["9"]}, "The stages cannot begin with 9"),
        (_bert, {"split_points": ["encodr.layer.1"]}, "The split point 'encodr.layer.1' is no module"),
        (_bert, {"no_split_module_classes": ["Layer"]}, "no_split_module_classes=['Layer'] names no class"),
        (_sequential, {"num_chunks": 0}, "num_chunks"),
        (_sequential, {"example_args": ("text",)}, "hold no batch to cut into chunks (got 1 positional inputs"),
        (lambda: (nn.Sequential(*(nn.Linear(1, 1) for _ in range(1))), (), {}), {}, "2 stages need as many blocks"),
    ],
)
def test_what_cannot_be_cut_is_an_error_on_all_ranks(make: Any, options: dict[str, Any], message: str) -> None:
    for text in run_world(_error, (make, options), 2):
        assert message in text


def test_generation_is_refused_on_all_ranks() -> None:
    tokens = torch.tensor([[3, 4, 5]])
    for gathers in (False, True):
        options = {"gather_output": gathers}
        for text in run_world(_error, (_llama, options, lambda model: model.generate(tokens, max_new_tokens=2)), 2, 60):
            assert "generate does not work after prepare_pippy" in text


def test_outputs_that_are_no_rows_are_an_error_on_the_last_rank() -> None:
    def loss_of_chunks() -> str:
        model = nn.Sequential(nn.Linear(2, 2), nn.Flatten(0), nn.LogSoftmax(0), _Mean())
        return _error(lambda: (model, (), {}), {}, lambda model: model(torch.ones(4, 2)))

    texts = run_world(loss_of_chunks, (), 2)
    assert "returns a single number for a chunk" in texts[1]


def test_an_output_without_a_value_stays_so() -> None:
    def outputs() -> Any:
        return prepare_pippy(nn.Sequential(nn.Linear(2, 2), _Pair()).eval())(torch.ones(4, 2))

    rows, nothing = run_world(outputs, (), 2)[1]
    assert (rows.shape, nothing) == ((4, 2), None)


class _Pair(nn.Module):
    def forward(self, inputs: Tensor) -> tuple[Tensor, None]:
        return inputs, None


class _Mean(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.mean()


def test_the_other_names() -> None:
    assert find_pippy_batch_size((), {"mask": None, "input_ids": torch.zeros(3, 8)}) == 3
    assert find_pippy_batch_size(("text",), None) is None
    model = _sequential()[0]
    assert len(set(generate_device_map(model).values())) == 1
    assert list(generate_device_map(model, 2).values()) == [0, 0, 0, 1, 1]
