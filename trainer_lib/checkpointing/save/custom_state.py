"""The state of one object of yours in a file of its own, under Accelerate's names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer_lib.checkpointing.format.layout import CUSTOM_STATE_NAME
from trainer_lib.checkpointing.save.torch_save import load, save
from trainer_lib.foundation.public_names.missing_features import MissingFeature, missing_function

_SEPARATE_STATES = MissingFeature(
    "Accelerate's separate steps of a checkpoint", "accelerator.save_state and accelerator.load_state do all of it."
)

load_accelerator_state: Callable[..., Any] = missing_function("load_accelerator_state", _SEPARATE_STATES)
save_accelerator_state: Callable[..., Any] = missing_function("save_accelerator_state", _SEPARATE_STATES)


def save_custom_state(obj: Any, path: str | Path, index: int = 0, save_on_each_node: bool = False) -> None:
    """Save `obj.state_dict()` as `custom_checkpoint_{index}.pkl`, on the main process.

    `accelerator.register_for_checkpointing(obj)` makes it a part of every checkpoint instead.

    Args:
        obj: The object.
        path: The folder.
        index: The number in the name of the file.
        save_on_each_node: Save on the main process of each machine.
    """
    save(obj.state_dict(), _file(path, index), save_on_each_node=save_on_each_node)


def load_custom_state(obj: Any, path: str | Path, index: int = 0) -> None:
    """Load what `save_custom_state` saved into `obj`: tensors and plain values.

    Raises:
        CheckpointError: If the file holds other objects.
    """
    obj.load_state_dict(load(_file(path, index), map_location="cpu"))


def _file(path: str | Path, index: int) -> Path:
    return Path(path) / f"{CUSTOM_STATE_NAME}_{index}.pkl"
