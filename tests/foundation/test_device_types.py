"""What differs between types of devices, and that no other module names one."""

import ast
import re
from pathlib import Path

import pytest
import torch

from tests.launched import ROOT
from trainer_lib.foundation import device_types
from trainer_lib.foundation.device_types import (
    default_backend,
    has_index,
    is_shared,
    memory_of,
    needs_accelerator,
    pins_memory,
    sum_dtype,
)

TYPES = {"cuda", "mps", "xpu", "npu", "hpu", "mlu", "musa", "sdaa", "mtia", "neuron", "xla"}
NAMES = TYPES | {"nccl", "hccl", "xccl", "cncl"}
_MAY_NAME = re.compile(rf"(?:[\"']|torch\.)(?:{'|'.join(sorted(NAMES))})\b")
HOME = "trainer_lib/foundation/device_types.py"
# The other modules that may name a device, and why.
ALLOWED = {
    "callbacks/memory_snapshot.py": "records the history of CUDA's allocator, which no other device has",
    "trainer_lib/big_modeling.py": "a method of nn.Module has the name of a device",
    "trainer_lib/checkpointing/third_party/safe_pickles.py": "the keys of Accelerate's files",
    "trainer_lib/foundation/environment.py": "whether a variable names a device of torch_xla",
    "trainer_lib/foundation/imports.py": "Accelerate's questions is_cuda_available, is_xpu_available and others",
    "trainer_lib/foundation/tensors/pytree.py": "Accelerate's question is_torch_xpu_tensor",
    "trainer_lib/launchers/settings/launch_options.py": "an option of an older launcher of Accelerate",
    "trainer_lib/launchers/local/torch_build.py": "reads what torch was built for, before torch is imported",
    "trainer_lib/options/compile_options.py": "a backend of torch.compile by its name",
    "trainer_lib/options/enums.py": "Accelerate's names of worlds and generators",
    "trainer_lib/options/profiler_options.py": "the names of torch.profiler's activities",
    "trainer_lib/processes/gpu_info.py": "asks NVIDIA's driver",
    "trainer_lib/processes/numa_affinity.py": "reads NVIDIA's PCI addresses",
    "trainer_lib/trainer/huggingface/argument_forms.py": "an option of FSDP in Hugging Face's arguments",
}


def named_devices(file: Path) -> set[str]:
    """Return the devices that a module's code names: as texts, or as parts of torch."""
    names: set[str] = set()
    text = file.read_text()
    if not _MAY_NAME.search(text):  # which is faster than to parse it
        return names
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and node.value in NAMES:
            names.add(str(node.value))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            names |= {node.attr} & NAMES
    return names


def test_devices_are_named_in_one_place() -> None:
    files = [*(ROOT / "trainer_lib").rglob("*.py"), *(ROOT / "callbacks").glob("*.py")]
    paths = {file.relative_to(ROOT).as_posix(): file for file in files if "trainer_lib/callbacks" not in str(file)}
    named = {path: names for path, file in paths.items() if (names := named_devices(file))}
    assert named.pop(HOME)
    assert named.keys() == ALLOWED.keys(), "add a question to device_types.py, or the reason to this list"


@pytest.mark.parametrize("kind", sorted(TYPES - {"xla"}))
def test_every_type_of_device_is_answered(kind: str) -> None:
    is_apple = kind == "mps"
    assert is_shared(kind) is is_apple
    assert pins_memory(kind) is not is_apple
    try:
        device = torch.device(kind, 1)
    except RuntimeError:  # of a package that registers it with torch
        return
    assert sum_dtype(device) is (torch.float32 if is_apple else torch.float64)
    assert has_index(device) is not is_apple


def test_backends_and_the_host() -> None:
    assert [default_backend(kind) for kind in ("cpu", "mps", "cuda", "xpu")] == ["gloo", "gloo", "nccl", "xccl"]
    assert needs_accelerator("cpu:gloo,cuda:nccl")
    assert not needs_accelerator("gloo")
    assert not pins_memory("cpu")
    assert memory_of(torch.device("cpu")) == {}
    assert device_types.device_name("cpu") == "cpu"
    assert device_types.supports_bf16()
