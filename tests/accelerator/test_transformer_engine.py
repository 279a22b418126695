"""Layers of Transformer Engine in place of torch's, with a stand-in for its package, which needs CUDA."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trainer_lib import UnsupportedError
from trainer_lib.foundation.errors import MissingPackageError
from trainer_lib.options import fp8_options
from trainer_lib.options.fp8_options import TERecipeKwargs
from trainer_lib.precision import choose_precision, transformer_engine_fp8
from trainer_lib.utils import apply_fp8_autowrap, contextual_fp8_autocast, convert_model


class Linear(nn.Linear):
    def __init__(self, inputs: int, outputs: int, bias: bool = True, params_dtype: Any = None) -> None:
        super().__init__(inputs, outputs, bias, dtype=params_dtype)


class LayerNorm(nn.LayerNorm):
    def __init__(self, size: int, eps: float, params_dtype: Any = None) -> None:
        super().__init__(size, eps, dtype=params_dtype)


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Install the stand-in, and return the contexts that forwards enter."""
    entered: list[Any] = []

    @contextmanager
    def fp8_autocast(enabled: bool, fp8_recipe: Any) -> Generator[None]:
        entered.append((enabled, fp8_recipe))
        yield

    package, layers, common = (ModuleType(name) for name in ("transformer_engine", "layers", "common"))
    vars(layers).update(Linear=Linear, LayerNorm=LayerNorm, fp8_autocast=fp8_autocast)
    formats = SimpleNamespace(HYBRID="hybrid", E4M3="e4m3")
    vars(common)["recipe"] = SimpleNamespace(
        Format=formats,
        DelayedScaling=lambda **options: ("delayed", options),
        MXFP8BlockScaling=lambda **options: ("blocks", options),
    )
    for name, module in {"": package, ".pytorch": layers, ".common": common}.items():
        monkeypatch.setitem(sys.modules, f"transformer_engine{name}", module)
    vars(package).update(pytorch=layers, common=common)
    for module in (transformer_engine_fp8, fp8_options):
        monkeypatch.setattr(module, "is_transformer_engine_available", lambda: True)
    return entered


def network() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(16, 32, bias=False), nn.LayerNorm(32, eps=1e-3))
    return nn.Sequential(nn.Linear(16, 16), inner, nn.Linear(32, 3)).double()


def test_layers_are_replaced_and_back_with_their_weights(contexts: list[Any]) -> None:
    del contexts
    model, inputs = network(), torch.randn(4, 16, dtype=torch.double)
    model[0].weight.requires_grad_(False)
    before, expected = model.state_dict(), model(inputs)
    convert_model(model)
    kinds = [type(module) for module in model.modules() if not isinstance(module, nn.Sequential)]
    assert kinds == [Linear, Linear, LayerNorm, nn.Linear], "3 is no multiple of 16"
    assert list(model.state_dict()) == list(before)
    assert torch.equal(model(inputs), expected)
    assert not model[0].weight.requires_grad
    assert model[0].bias.requires_grad
    convert_model(model, to_transformer_engine=False)
    kinds = [type(module) for module in model.modules() if not isinstance(module, nn.Sequential)]
    assert kinds == [nn.Linear, nn.Linear, nn.LayerNorm, nn.Linear]
    assert torch.equal(model(inputs), expected)


def test_a_prepared_model_computes_in_fp8_while_it_trains(contexts: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer_engine_fp8, "check_cuda_fp8_capability", lambda: True)
    precision = choose_precision("fp8", "cpu", fp8=TERecipeKwargs(margin=2, fp8_format="E4M3"))
    model = network().float()
    precision.cast(model)
    precision.wrap_forward(model)
    assert model(torch.ones(2, 16)).dtype is torch.float32
    model.eval()(torch.ones(2, 16))
    (trains, (kind, options)), (evaluates, _) = contexts
    assert (trains, evaluates, kind, precision.fp8_backend) == (True, False, "delayed", "TE")
    assert (options["margin"], options["fp8_format"], options["amax_history_len"]) == (2, "e4m3", 1024)
    blocks = apply_fp8_autowrap(network(), TERecipeKwargs(use_mxfp8_block_scaling=True, use_autocast_during_eval=True))
    blocks.eval()(torch.ones(2, 16, dtype=torch.double))
    assert contexts[-1] == (True, ("blocks", {"margin": 0, "fp8_format": "hybrid"}))


def test_a_missing_package_or_gpu_is_named(contexts: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    del contexts
    with pytest.raises(UnsupportedError, match=r"this cpu device does not\. torchao emulates fp8 on a CPU"):
        choose_precision("fp8", "cpu", fp8=TERecipeKwargs())
    monkeypatch.setattr(transformer_engine_fp8, "is_transformer_engine_available", lambda: False)
    for call in (
        lambda: convert_model(network()),
        lambda: apply_fp8_autowrap(network(), None),
        lambda: contextual_fp8_autocast(network().forward, None),
    ):
        with pytest.raises(MissingPackageError, match=r'pip install "transformer_engine\[pytorch\]"'):
            call()
