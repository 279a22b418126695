"""A disk that fills up while weights are offloaded: the model stays in memory, and the disk is left empty."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.faults.conftest import SmallDisk
from trainer_lib import disk_offload, dispatch_model
from trainer_lib.foundation.errors import CheckpointError

OFFLOADS: dict[str, Callable[..., nn.Module]] = {
    "dispatch_model": lambda model, folder: dispatch_model(model, {"": "disk"}, offload_dir=folder),
    "disk_offload": disk_offload,
}


@pytest.mark.parametrize("offload", OFFLOADS.values(), ids=OFFLOADS)
def test_a_disk_that_fills_up_half_way_leaves_the_model_in_memory(offload: Any, small_disk: SmallDisk) -> None:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))  # 6.3 MB, for 4 MB
    inputs = torch.ones(1, 512)
    expected, folder = model(inputs), small_disk.folder / "weights"
    with pytest.raises(CheckpointError, match=r"could not be written.*No space left on device"):
        offload(model, folder)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert not any("_hf_hook" in vars(module) for module in model.modules())
    assert torch.equal(model(inputs), expected)
    assert not list(folder.iterdir())
    smaller = offload(model[:3], folder)
    assert all(parameter.is_meta for parameter in smaller.parameters())
    assert torch.equal(model[3:](smaller(inputs)), expected)
