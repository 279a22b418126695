"""A disk that is full or read-only while weights are offloaded: the model stays in memory, and nothing is left."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.faults.conftest import SmallDisk
from trainer_lib import disk_offload, dispatch_model, load_checkpoint_and_dispatch
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


def load_in_half(model: nn.Module, folder: Path) -> nn.Module:
    """Load weights in another type than the file has, so that they have to be written."""
    weights = folder.parent.parent / "weights.safetensors"
    if not weights.is_file():
        save_file({name: value.contiguous() for name, value in model.state_dict().items()}, weights)
    return load_checkpoint_and_dispatch(
        model, weights, device_map={"": "disk"}, offload_folder=folder, dtype=torch.bfloat16
    )


@pytest.mark.parametrize("offload", [*OFFLOADS.values(), load_in_half], ids=[*OFFLOADS, "load"])
def test_a_read_only_folder_leaves_the_model_in_memory(offload: Any, small_disk: SmallDisk) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    inputs = torch.ones(1, 16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model(inputs)
    existing, folder = small_disk.folder / "existing", small_disk.folder / "new"
    existing.mkdir()
    small_disk.make_read_only()
    for read_only in (folder, existing):
        with pytest.raises(CheckpointError, match=r"could not be written.*Read-only file system"):
            offload(model, read_only)
        assert not any("_hf_hook" in vars(module) for module in model.modules())
        assert not hasattr(model, "hf_device_map")
        assert torch.equal(model(inputs), expected)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_text("")
    model = nn.Linear(2, 2)
    for offload in OFFLOADS.values():
        with pytest.raises(CheckpointError, match=r"weights: the offloaded weights could not be written"):
            offload(model, file)
        assert not model.weight.is_meta
