"""Put weights from a folder of `offload_state_dict` into a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from trainer_lib.modules.device_placement import set_module_tensor_to_device
from trainer_lib.tensor_files.offloaded_weights import OffloadedWeightsLoader


def load_offloaded_weights(model: nn.Module, index: Mapping[str, Any] | None, offload_folder: str | Path) -> None:
    """Put weights from a folder into a model, on the CPU.

    Args:
        model: The model.
        index: The types and shapes of the weights, by name; nothing happens without them.
        offload_folder: The folder.
    """
    for name, weight in OffloadedWeightsLoader(save_folder=offload_folder, index=index or {}).items():
        set_module_tensor_to_device(model, name, "cpu", value=weight)
