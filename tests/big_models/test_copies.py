"""Models with hooks that are copied, pickled or compiled keep their hooks, their weights' places and their outputs."""

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.big_models.architectures import made, output
from trainer_lib import cpu_offload, disk_offload, dispatch_model
from trainer_lib.foundation.errors import UnsupportedError
from trainer_lib.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules
from trainer_lib.utils.modeling import get_state_dict_offloaded_model

pytestmark = pytest.mark.filterwarnings("ignore")


class Scales(ModelHook):
    """Scales the output, and counts its forwards."""

    def __init__(self, factor: float) -> None:
        self.factor, self.forwards = factor, 0

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        del module
        self.forwards += 1
        return self.factor * output


def saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved,
}
PLACES: dict[str, Callable[[nn.Module, Path], nn.Module]] = {
    "memory": lambda model, folder: dispatch_model(model, {"": "cpu"}, force_hooks=True),
    "cpu_offload": lambda model, folder: cpu_offload(model),
    "disk": disk_offload,
    "mixed": lambda model, folder: dispatch_model(
        model, {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu",
                "lm_head": "disk"}, offload_dir=folder
    ),
}  # fmt: skip


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_a_copy_runs_its_own_hook_and_weights(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    layer, inputs = nn.Linear(3, 2), torch.ones(1, 3)
    plain = layer(inputs)
    add_hook_to_module(layer, Scales(2.0))
    again: Any = duplicate(layer)
    again._hf_hook.factor = 3.0
    nn.init.zeros_(again.weight)
    assert torch.equal(layer(inputs), 2 * plain)
    assert torch.equal(again(inputs), 3 * layer.bias[None])
    assert (layer._hf_hook.forwards, again._hf_hook.forwards) == (1, 1)  # type: ignore[union-attr]
    assert inspect.signature(again.forward) == inspect.signature(nn.Linear(3, 2).forward)
    remove_hook_from_submodules(again)
    assert torch.equal(again(inputs), layer.bias[None])


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_copy_of_a_spread_model_computes_the_same(place: Any, duplicate: Any, tmp_path: Path) -> None:
    model = made("llama")
    expected, state = output(model, "llama"), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    spread = place(model, tmp_path)
    again = duplicate(spread)
    assert [tensor.device for tensor in again.parameters()] == [tensor.device for tensor in spread.parameters()]
    for _ in range(2):  # the second forward fetches ahead
        assert torch.equal(output(again, "llama"), expected)
    read = get_state_dict_offloaded_model(again)
    assert read.keys() == state.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in state.items())
    if hasattr(again, "hf_device_map"):
        with pytest.raises(UnsupportedError, match="cannot be moved"):
            again.half()


@pytest.mark.slow
@pytest.mark.parametrize("offload", [cpu_offload, lambda model: disk_offload(model, "weights")], ids=["cpu", "disk"])
def test_a_compiled_model_computes_the_same(
    offload: Callable[[nn.Module], nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, inputs = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(2, 4)
    expected = model(inputs)
    torch.compiler.reset()
    compiled: Any = torch.compile(offload(model), backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(inputs), expected)


def test_a_hook_is_compiled_into_one_graph() -> None:
    layer, inputs = nn.Linear(3, 2), torch.ones(1, 3)
    plain = layer(inputs)
    add_hook_to_module(layer, Scales(2.0))
    torch.compiler.reset()
    compiled: Callable[[Tensor], Tensor] = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(inputs), 2 * plain)
