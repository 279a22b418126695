"""Memory of tensors that are read again and again."""

import copy
import mmap
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from trainer_lib import init_empty_weights, load_checkpoint_and_dispatch
from trainer_lib.tensor_files.offloaded_weights import OffloadedWeightsLoader
from trainer_lib.tensor_files.reused_memory import ReusedMemory


class Layer(nn.Linear):
    """Notes where its weights are in each forward."""

    def __init__(self) -> None:
        super().__init__(33, 33)
        self.addresses: list[int] = []

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Note, and multiply."""
        self.addresses.append(self.weight.data_ptr())
        return super().forward(input)


def test_memory_is_used_again_once_nothing_refers_to_it() -> None:
    memory = ReusedMemory()
    first = memory.take(torch.float32, (4, 5))
    row, address = first[1], first.data_ptr()
    del first
    second = memory.take(torch.float32, (4, 5))
    assert second.data_ptr() != address, "a view still refers to it"
    del row
    assert memory.take(torch.bfloat16, (40,)).data_ptr() == address
    assert memory.take(torch.float32, (0, 5)).shape == (0, 5)


def test_a_copy_of_a_loader_has_memory_of_its_own(tmp_path: Path) -> None:
    save_file({"odd": torch.ones(1, dtype=torch.int8), "weight": torch.randn(9, 9)}, tmp_path / "weights")
    entry = {"safetensors_file": str(tmp_path / "weights"), "weight_name": "weight", "dtype": "float32"}
    loader = OffloadedWeightsLoader(index={"weight": entry})
    first = loader["weight"]
    twin = copy.deepcopy(loader)
    assert torch.equal(twin["weight"], first)
    address = first.data_ptr()
    del first
    kept = twin["weight"]
    assert kept.data_ptr() != address
    assert loader["weight"].data_ptr() == address


def test_forwards_from_unaligned_files_need_no_new_memory(tmp_path: Path) -> None:
    model = nn.Sequential(*(Layer() for _ in range(6)))
    save_file(model.state_dict(), tmp_path / "model.safetensors")  # 33 × 33 values: few of them are aligned
    with init_empty_weights():
        layers = [Layer() for _ in range(6)]
    empty = nn.Sequential(*layers)
    load_checkpoint_and_dispatch(
        empty, str(tmp_path / "model.safetensors"), {"": "disk"}, offload_folder=tmp_path / "offload"
    )
    batch = torch.randn(3, 33)
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(empty(batch), model(batch))
    addresses = {address for layer in layers for address in layer.addresses}
    in_pages = {address for address in addresses if address % mmap.PAGESIZE == 0}  # other memory begins in between
    assert 1 <= len(in_pages) <= 3, "of one that runs, one read ahead and one that has just run"
