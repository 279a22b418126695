"""Models in 8 and 4 bits by bitsandbytes: quantized while they are loaded, offloaded, saved and loaded again."""

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pages import run_example
from trainer_lib import Accelerator, dispatch_model, init_empty_weights, load_checkpoint_in_model
from trainer_lib.big_modeling import load_checkpoint_and_dispatch
from trainer_lib.foundation.errors import ConfigurationError, PreparationError, StateError
from trainer_lib.foundation.imports import is_bnb_available
from trainer_lib.hooks import remove_hook_from_submodules
from trainer_lib.utils import BnbQuantizationConfig, CustomDtype
from trainer_lib.utils.bnb import (
    get_keys_to_not_convert,
    get_parameter_device,
    get_quantized_model_device_map,
    load_and_quantize_model,
    quantize_and_offload_8bit,
    replace_with_bnb_layers,
)
from trainer_lib.utils.modeling import (
    compute_module_sizes,
    infer_auto_device_map,
    set_module_tensor_to_device,
)
from trainer_lib.utils.offload import OffloadedWeightsLoader

pytestmark = [
    pytest.mark.slow,  # bitsandbytes takes seconds to import
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not is_bnb_available(), reason="bitsandbytes is not installed"),
]

KINDS: dict[str, dict[str, Any]] = {
    "int8": {"load_in_8bit": True, "torch_dtype": "fp32"},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "fp32"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_compute_dtype": "fp32"},
    "nf4 twice": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "fp32",
    },
}


def config(kind: str, **options: Any) -> BnbQuantizationConfig:
    return BnbQuantizationConfig(**KINDS[kind], **options)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 128)
        self.blocks: Any = nn.Sequential(
            *(nn.Sequential(nn.Linear(128, 192), nn.GELU(), nn.Linear(192, 128)) for _ in "ab")
        )
        self.norm = nn.LayerNorm(128)
        self.head = nn.Linear(128, 50, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


TOKENS = torch.arange(10).reshape(2, 5)


def made() -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Model().eval()


def empty() -> Model:
    with init_empty_weights():
        return Model().eval()


def saved(folder: Path, model: nn.Module | None = None, **options: Any) -> Path:
    Accelerator(cpu=True).save_model(made() if model is None else model, str(folder), **options)
    return folder


def output(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(TOKENS)


def by_hand(kind: str) -> Model:
    """Return the model with layers made as the documentation of bitsandbytes says."""
    layers: Any = importlib.import_module("bitsandbytes").nn
    model, options = made(), KINDS[kind]
    for block in model.blocks:
        for name in ("0", "2"):
            whole: Any = block.get_submodule(name)
            sizes = whole.in_features, whole.out_features
            if kind == "int8":
                new = layers.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=6.0)
            else:
                twice = options.get("bnb_4bit_use_double_quant", False)
                new = layers.Linear4bit(
                    *sizes, compute_dtype=torch.float32, compress_statistics=twice,
                    quant_type=options.get("bnb_4bit_quant_type", "fp4"),
                )  # fmt: skip
                new.support_avx512bf16_for_cpu = False
            new.load_state_dict(whole.state_dict())
            setattr(block, name, new)
    return model.to("cpu").eval()


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_quantized_while_it_is_loaded(kind: str, tmp_path: Path) -> None:
    saved(tmp_path, max_shard_size="100KB")
    expected = output(by_hand(kind))
    whole = output(made())
    assert 0 < (expected - whole).abs().max() < 0.3
    model: Any = load_and_quantize_model(empty(), config(kind), tmp_path)
    assert torch.equal(output(model), expected)
    assert get_parameter_device(model) == torch.device("cpu")
    assert type(model.blocks[0][0]).__name__ == ("Linear8bitLt" if kind == "int8" else "Linear4bit")
    assert type(model.head) is nn.Linear
    assert (model.is_loaded_in_8bit, model.is_loaded_in_4bit) == (kind == "int8", kind != "int8")
    loaded: Any = load_and_quantize_model(made(), config(kind))
    assert torch.equal(output(loaded), expected)
    assert not any(parameter.requires_grad for parameter in loaded.blocks.parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["part", "all"])
def test_quantized_modules_on_the_disk_compute_the_same(kind: str, place: str, tmp_path: Path) -> None:
    saved(tmp_path / "weights", max_shard_size="100KB")
    expected = output(by_hand(kind))
    device_map: dict[str, Any] = {"": "disk"}
    if place == "part":
        device_map = {"embedding": "cpu", "blocks.0": "disk", "blocks.1": "cpu", "norm": "cpu", "head": "disk"}
    loaded: Any = load_and_quantize_model(
        empty(), config(kind), tmp_path / "weights", device_map, offload_folder=tmp_path / "offloaded"
    )
    written = {path.name for path in (tmp_path / "offloaded").glob("*.dat")}
    assert "blocks.0.0.weight.dat" in written
    assert ("blocks.0.0.SCB.dat" if kind == "int8" else "blocks.0.0.weight.absmax.dat") in written
    assert "head.weight.dat" not in written  # it stays in its safetensors file
    for _ in range(3):
        assert torch.equal(output(loaded), expected)
        assert loaded.blocks[0][0].weight.device.type == "meta"
    dispatched: Any = dispatch_model(by_hand(kind), device_map, offload_dir=tmp_path / "again")
    assert torch.equal(output(dispatched), expected)
    remove_hook_from_submodules(dispatched)
    assert dispatched.blocks[0][0].weight.device.type == "cpu"
    assert torch.equal(output(dispatched), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_model_is_saved_and_loaded_again(kind: str, tmp_path: Path) -> None:
    model: Any = load_and_quantize_model(made(), config(kind))
    expected = output(model)
    saved(tmp_path, model, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    again = load_and_quantize_model(empty(), config(kind), tmp_path)
    assert torch.equal(output(again), expected)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    on_disk = load_and_quantize_model(
        empty(), config(kind), tmp_path, {"blocks": "disk", "": "cpu"}, offload_folder=tmp_path / "offloaded"
    )
    assert torch.equal(output(on_disk), expected)
    for tensor in by_hand(kind).parameters():
        tensor.data.zero_()
    other = load_and_quantize_model(Model().eval(), config(kind))
    load_checkpoint_in_model(other, tmp_path, strict=True)
    assert torch.equal(output(other), expected)
    with pytest.raises(StateError, match=r"were quantized by bitsandbytes, .*blocks\.0\.0\.weight.*load_and_quantize"):
        load_checkpoint_and_dispatch(empty(), tmp_path, {"": "cpu"})


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_are_those_of_quantized_weights(kind: str, tmp_path: Path) -> None:
    saved(tmp_path)
    planned = empty()
    replace_with_bnb_layers(planned, config(kind), ["head"])
    model: Any = load_and_quantize_model(empty(), config(kind), tmp_path)
    sizes = compute_module_sizes(model)
    assert compute_module_sizes(planned) == sizes
    layer: Any = model.blocks[0][0]
    parts = layer.state_dict()
    counted = [tensor for name, tensor in parts.items() if "quant_state" not in name and name != "weight_format"]
    extra = 4 if kind == "nf4 twice" else 0  # the offset is inside the packed options
    assert sizes["blocks.0.0"] == sum(tensor.nbytes for tensor in counted) + extra
    assert sizes["blocks.0.0.weight"] < 128 * 192 * (1.1 if kind == "int8" else 0.6)
    limit = sizes["embedding"] + sizes["blocks.0"]
    device_map = infer_auto_device_map(planned, {0: limit + 10, "cpu": "1GB"})
    assert device_map["embedding"] == 0


def test_a_map_counts_quantized_weights_to_the_byte(tmp_path: Path) -> None:
    model = empty()
    options = config("nf4", keep_in_fp32_modules=["norm"])
    replace_with_bnb_layers(model, options, ["head", "norm"])
    total = compute_module_sizes(model, torch.float32)[""]
    for limit, place in ((total, {"cpu"}), (total - 1, {"cpu", "disk"})):
        found = get_quantized_model_device_map(model, options, "sequential", {"cpu": limit})
        assert set(found.values()) == place
    assert get_quantized_model_device_map(model, options) == {"": "cpu"}
    assert get_quantized_model_device_map(model, options, {"": "disk"}) == {"": "disk"}
    with pytest.raises(ConfigurationError, match=r"device_map.*'even'.*auto"):
        get_quantized_model_device_map(model, options, "even")
    saved(tmp_path / "weights")
    loaded = load_and_quantize_model(
        empty(), options, tmp_path / "weights", "auto", max_memory={"cpu": total - 1}, offload_folder=tmp_path / "disk"
    )
    assert torch.equal(output(loaded), output(by_hand("nf4")))


def test_modules_are_skipped_or_kept_in_fp32(tmp_path: Path) -> None:
    saved(tmp_path)
    options = BnbQuantizationConfig(load_in_8bit=True, skip_modules=["blocks.1"], keep_in_fp32_modules=["norm", "head"])
    model: Any = load_and_quantize_model(empty(), options, tmp_path)
    loaded = load_and_quantize_model(made(), copy.deepcopy(options))
    for either in (model, loaded):
        kinds = {name: parameter.dtype for name, parameter in either.named_parameters() if "bias" not in name}
        assert kinds == {
            "embedding.weight": torch.float16,
            "blocks.0.0.weight": torch.int8,
            "blocks.0.2.weight": torch.int8,
            "blocks.1.0.weight": torch.float16,
            "blocks.1.2.weight": torch.float16,
            "norm.weight": torch.float32,
            "head.weight": torch.float32,
        }
    assert options.skip_modules == ["blocks.1"]  # Accelerate adds names to the user's list


def test_the_output_layer_and_tied_weights_are_skipped() -> None:
    tied = made()
    assert get_keys_to_not_convert(tied) == ["head"]
    tied.head.weight = tied.embedding.weight
    assert get_keys_to_not_convert(tied) == ["embedding", "head"]
    base = made()
    base.base_model_prefix = "model"  # type: ignore[assignment]
    assert get_keys_to_not_convert(base) == []
    assert get_keys_to_not_convert(nn.Linear(2, 2)) == []


def test_single_weights_are_quantized(tmp_path: Path) -> None:
    model = replace_with_bnb_layers(empty(), config("int8"), ["head", "blocks.1"])
    value, name = made().blocks[0][0].weight.data, "blocks.0.0.weight"
    set_module_tensor_to_device(model, name, "cpu", value, torch.float16)
    weight: Any = model.get_parameter(name)
    assert torch.equal(weight.data, by_hand("int8").get_parameter(name).data)
    index: dict[str, Any] = {}
    quantize_and_offload_8bit(model, weight.data, name, None, tmp_path, index, weight.SCB)
    quantize_and_offload_8bit(model, value, name, torch.float16, tmp_path, index, None)
    assert model.get_parameter(name).device.type == "meta"
    offloaded = OffloadedWeightsLoader(save_folder=tmp_path, index=index)
    assert torch.equal(offloaded[name], weight.data)
    assert torch.equal(offloaded["blocks.0.0.SCB"], weight.SCB)
    with pytest.raises(ConfigurationError, match=r"fp16_statistics belong to weights of 8-bit layers.*head.weight"):
        set_module_tensor_to_device(model, "head.weight", "cpu", torch.zeros(50, 128), fp16_statistics=weight.SCB)


def test_what_cannot_be_quantized_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="Give weights_location"):
        load_and_quantize_model(empty(), config("nf4"))
    with pytest.raises(ConfigurationError, match="is quantized on one device"):
        load_and_quantize_model(made(), config("nf4"), device_map={"": "disk"})
    with pytest.raises(ConfigurationError, match=r"quantization must be .*'int3'"):
        load_checkpoint_and_dispatch(empty(), tmp_path, quantization="int3")  # type: ignore[arg-type]
    saved(tmp_path)
    with pytest.raises(ConfigurationError, match=r"the weight is quantized now. Give offload_folder"):
        load_and_quantize_model(empty(), config("nf4"), tmp_path, {"": "disk"})


def test_options_are_those_of_accelerate() -> None:
    assert BnbQuantizationConfig(load_in_8bit=True).target_dtype is torch.int8
    in_4bit = BnbQuantizationConfig(load_in_4bit=True)
    assert (in_4bit.target_dtype, in_4bit.torch_dtype) == (CustomDtype.INT4, torch.float16)


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_example("big_models.md", "load_and_quantize_model(", tmp_path)
    assert names["model"].is_loaded_in_4bit
    assert list((tmp_path / "quantized").glob("*.safetensors"))


def test_prepared_4bit_layers_let_gradients_through_after_an_evaluation() -> None:
    layer = by_hand("nf4").blocks[0][0]
    layer.support_avx512bf16_for_cpu = True  # as bitsandbytes sets it, on CPUs that have it
    model = Accelerator(cpu=True).prepare(nn.Sequential(nn.Linear(128, 128), layer))
    with torch.no_grad():
        evaluated = model.eval()(torch.ones(1, 128))
    trained = model.train()(torch.ones(1, 128))
    assert torch.equal(trained, evaluated)
    trained.sum().backward()
    assert model[0].weight.grad is not None
    layer.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(PreparationError, match=r"4-bit weights of 1 were packed .* Load the model again"):
        Accelerator(cpu=True).prepare(nn.Sequential(nn.Linear(128, 128), layer))
