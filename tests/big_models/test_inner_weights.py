"""A module that computes with offloaded weights of the modules inside it, without their forwards, gets the values."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer_lib import cpu_offload, disk_offload, dispatch_model
from trainer_lib.device_map.infer import infer_auto_device_map
from trainer_lib.foundation.errors import UnsupportedError
from trainer_lib.hooks import remove_hook_from_submodules

pytestmark = pytest.mark.filterwarnings("ignore")


class InnerWeights(nn.Module):
    """Uses weights of layers that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.head.register_buffer("scale", torch.rand(8))
        self.several = nn.ParameterList(nn.Parameter(torch.randn(8)) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = F.linear(inputs, self.layer.weight) * self.several[0] + self.several[1]
        rows = torch.cat([self.head.weight, self.layer.weight.detach()]) @ hidden.mT
        return self.head(rows.mT[..., :8] * self.head.get_buffer("scale") + self.layer.weight.T.sum(0))


class InPlace(nn.Module):
    """Changes its values in place by weights of layers that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.shift = nn.Linear(8, 8), nn.Linear(8, 1), nn.Embedding(1, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layer(inputs).mul_(self.scale.weight).add_(self.shift.weight, alpha=2)
        rows = torch.empty(2, 8).copy_(self.scale.weight)
        rows[1] = self.shift.weight[0]
        return hidden + rows.sum(0)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, bias=False, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.attention(inputs, inputs, inputs, need_weights=False)[0]


def weight_norm() -> nn.Module:
    """Return layers whose weights are computed by torch's hooks, which run before the forward."""
    named: Any = nn.utils
    layers = (named.weight_norm(nn.Linear(8, 8)), named.spectral_norm(nn.Linear(8, 8)))
    return nn.Sequential(*layers, nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)))


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "weights of layers": InnerWeights,
    "in place": InPlace,
    "attention": Attention,
    "encoder": encoder,
    "weight_norm": weight_norm,
}


def every_second(model: nn.Module) -> dict[str, Any]:
    layers = infer_auto_device_map(model, {"cpu": "1GB"}, clean_result=False)
    return {name: "disk" if number % 2 else "cpu" for number, name in enumerate(layers)}


PLACES: dict[str, Callable[[nn.Module, Path], nn.Module]] = {
    "cpu": lambda model, folder: cpu_offload(model, offload_buffers=True),
    "disk": disk_offload,
    "every second": lambda model, folder: dispatch_model(model, every_second(model), offload_dir=folder),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def output(model: nn.Module) -> Tensor:
    inputs = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(inputs)


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_the_model_in_memory(name: str, place: Any, tmp_path: Path) -> None:
    expected = output(made(name))
    model = place(made(name), tmp_path)
    for _ in range(2):  # the second pass fetches ahead
        assert torch.equal(output(model), expected)
    remove_hook_from_submodules(model)
    assert torch.equal(output(model), expected)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_copy_computes_the_same(place: Any, duplicate: Any, tmp_path: Path) -> None:
    expected = output(made("weights of layers"))
    again = duplicate(place(made("weights of layers"), tmp_path))
    assert torch.equal(output(again), expected)
    assert again.head.weight.is_meta


def test_a_state_dict_is_saved_with_its_values(tmp_path: Path) -> None:
    model = made("weights of layers")
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state, file = disk_offload(model, tmp_path).state_dict(), io.BytesIO()
    assert [name for name, tensor in state.items() if not tensor.is_meta] == ["head.scale"]
    torch.save(state, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())


def test_an_empty_weight_says_what_it_is() -> None:
    model: Any = cpu_offload(made("weights of layers"))
    weight = model.layer.weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.device.type, weight.shape, weight.numel(), weight.requires_grad) == ("meta", (8, 8), 64, True)
    assert weight.data.is_meta
    assert weight.detach().is_meta
    assert torch.equal(weight.to("cpu"), weight.data.cpu())
    assert weight.to(torch.float32) is weight
    half = weight.half()
    assert (half.is_meta, half.dtype) == (True, torch.float16)
    assert torch.equal(half.cpu(), weight.cpu().half())
    with torch.no_grad():
        weight.zero_()  # is lost, as on the meta device
    assert weight.abs().sum() > 0


def test_a_gradient_of_an_inner_weight_is_refused() -> None:
    model = cpu_offload(made("weights of layers"))
    with pytest.raises(UnsupportedError, match="offloaded weight"):
        F.linear(torch.ones(8), model.get_parameter("layer.weight")).sum().backward()


@pytest.mark.slow
def test_a_compiled_model_computes_the_same() -> None:
    expected = output(made("weights of layers"))
    torch.compiler.reset()
    compiled: Any = torch.compile(cpu_offload(made("weights of layers")), backend="eager")
    for _ in range(2):
        assert torch.equal(output(compiled), expected)


@pytest.mark.parametrize("name", ["attention", "encoder"])
def test_layers_that_read_inner_weights_are_on_one_device(name: str) -> None:
    device_map = infer_auto_device_map(made(name), {"cpu": "1GB"}, clean_result=False)
    assert list(device_map) == {"attention": ["attention"], "encoder": ["layers.0", "layers.1"]}[name]


def test_a_weight_that_is_not_trained_takes_the_kernel_that_it_takes_in_memory() -> None:
    # Which product torch computes for inputs that are not contiguous depends on requires_grad.
    torch.manual_seed(0)
    layer, inputs = nn.Linear(32, 32), torch.randn(7, 2, 32).transpose(0, 1)
    with torch.no_grad():
        expected = layer(inputs)
        assert torch.equal(cpu_offload(layer)(inputs), expected)


def test_a_module_under_two_names_may_be_in_two_places(tmp_path: Path) -> None:
    layer, inputs = nn.Linear(4, 4), torch.randn(2, 4)
    model = nn.ModuleDict({"first": layer, "again": layer})
    expected = layer(inputs)
    for device_map in ({"first": "disk", "again": "cpu"}, {"first": "cpu", "again": "disk"}):
        dispatch_model(model, device_map, offload_dir=tmp_path)
        assert torch.equal(model["again"](inputs), expected)
        remove_hook_from_submodules(model)
        del model.hf_device_map


class Converts(nn.Module):
    """Converts a layer in its forward, as the router of Switch Transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer.to(torch.float32)(inputs)


def test_a_module_may_convert_the_modules_inside_it() -> None:
    model = Converts()
    expected = output(model)
    assert torch.equal(output(cpu_offload(model)), expected)
