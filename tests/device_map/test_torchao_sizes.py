"""Weights that torchao has quantized count as what they take."""

from typing import Any

import pytest
import torch
from torch import nn

from trainer_lib.utils.modeling import compute_module_sizes, infer_auto_device_map


@pytest.mark.slow  # torchao takes seconds to import
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_sizes_and_maps_count_quantized_weights(kind: str) -> None:
    quantization: Any = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(256, 128, bias=False), nn.Linear(128, 64, bias=False))
    quantization.quantize_(model, getattr(quantization, kind)())
    sizes = compute_module_sizes(model, torch.float32)
    assert sizes["0.weight"] == 256 * 128 + 128 * (4 + 1)  # a scale and a zero point for each row
    assert sizes[""] == sizes["0"] + 128 * 64 + 64 * (4 + 1)
    assert infer_auto_device_map(model, {"cpu": sizes[""]}) == {"": "cpu"}
    assert infer_auto_device_map(model, {0: sizes["0"], 1: sizes["1"]}) == {"0": 0, "1": 1}
