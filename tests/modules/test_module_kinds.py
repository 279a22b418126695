"""Models of PEFT, with DTensors, and with layers of other packages."""

from types import SimpleNamespace
from typing import Any

import peft
import torch
from torch import nn

from trainer_lib.modules.blocks import (
    get_module_children_bottom_up,
    get_module_class_from_name,
    has_repeated_blocks,
    is_repeated_blocks,
)
from trainer_lib.modules.forwards import ConvertOutputsToFp32, convert_outputs_to_fp32
from trainer_lib.modules.module_kinds import (
    get_model_tp_size,
    has_4bit_bnb_layers,
    has_ao_layers,
    has_transformer_engine_layers,
    is_peft_model,
    model_has_dtensor,
)
from trainer_lib.modules.weights.names import fsdp2_canonicalize_names
from trainer_lib.modules.weights.tied_parameters import check_tied_parameters_in_config


def test_a_model_of_peft() -> None:
    base = nn.Sequential(nn.Linear(2, 2))
    assert not is_peft_model(base)
    assert is_peft_model(peft.get_peft_model(base, peft.LoraConfig(target_modules=["0"])))  # type: ignore[arg-type]


def test_layers_of_other_packages_go_by_their_class() -> None:
    def layer(module: str, name: str) -> nn.Module:
        return nn.Sequential(type(name, (nn.Linear,), {"__module__": module})(1, 1))

    plain = nn.Sequential(nn.Linear(1, 1))
    assert not any(question(plain) for question in (has_4bit_bnb_layers, has_ao_layers, has_transformer_engine_layers))
    assert has_4bit_bnb_layers(layer("bitsandbytes.nn.modules", "Linear4bit"))
    assert not has_4bit_bnb_layers(layer("bitsandbytes.nn.modules", "Linear8bitLt"))
    assert has_ao_layers(layer("torchao.float8.float8_linear", "Float8Linear"))
    assert has_transformer_engine_layers(layer("transformer_engine.pytorch.module", "LayerNormLinear"))


def test_a_plain_model_has_no_dtensor() -> None:
    model = nn.Linear(1, 1)
    assert not model_has_dtensor(model)
    model.weight._local_tensor = torch.ones(1)  # type: ignore[attr-defined]
    assert model_has_dtensor(model)


def test_ties_in_a_configuration() -> None:
    class Config:
        tie_word_embeddings = True

    model = nn.Linear(1, 1)
    assert not check_tied_parameters_in_config(model)
    model.config = Config()  # type: ignore[assignment]
    assert not check_tied_parameters_in_config(model), "it has no output embeddings"
    model.get_output_embeddings = lambda: None  # type: ignore[assignment]
    assert check_tied_parameters_in_config(model)


def test_names_without_wrappers() -> None:
    assert fsdp2_canonicalize_names({"a._orig_mod.b": 1, "c": 2}) == {"a.b": 1, "c": 2}


def test_modules_from_the_inside_out() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1)), nn.ReLU())
    pairs = get_module_children_bottom_up(model, return_fqns=True)
    assert [name for name, _ in pairs] == ["0.0", "0", "1", ""]
    assert get_module_children_bottom_up(model) == [module for _, module in pairs]
    assert get_module_class_from_name(model, "ReLU") is nn.ReLU
    assert get_module_class_from_name(model, "Conv1d") is None


def test_repeated_blocks_are_lists_of_one_class() -> None:
    repeated = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    assert is_repeated_blocks(repeated)
    assert not is_repeated_blocks(nn.ModuleList([nn.Linear(1, 1), nn.ReLU()]))
    assert not is_repeated_blocks(nn.Sequential(repeated))
    assert has_repeated_blocks(nn.Sequential(repeated))


def test_how_transformers_split_a_model() -> None:
    model: Any = nn.Linear(1, 1)
    assert get_model_tp_size(model) is None
    for options in (SimpleNamespace(tp_size=4), {"tp_size": 4}):  # the second is from a file
        model.config = SimpleNamespace(distributed_config=options)
        assert get_model_tp_size(model) == 4
    model.tp_size = 2  # transformers 4
    assert get_model_tp_size(model) == 2


def test_outputs_in_fp32() -> None:
    layer = nn.Linear(2, 1).bfloat16()
    batch = torch.ones(1, 2, dtype=torch.bfloat16)
    assert convert_outputs_to_fp32(layer.forward)(batch).dtype is torch.float32
    assert ConvertOutputsToFp32(layer.forward)(batch).dtype is torch.float32
    assert convert_outputs_to_fp32(layer.forward).__name__ == "forward"
