"""Whole fp32 weights of a ZeRO checkpoint, of DeepSpeed's or this library's format."""

from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trainer_lib.checkpointing.format.listing import newest_checkpoint
from trainer_lib.checkpointing.model_weights import checked_weights
from trainer_lib.checkpointing.third_party.deepspeed_shards import fp32_weights, is_deepspeed
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.tensor_files.weights_index import read_weights


def zero_weights(folder: Path, tag: str | None = None, exclude_frozen: bool = False) -> dict[str, Tensor]:
    """Return the whole weights in a folder that DeepSpeed's `save_checkpoint` or this library wrote.

    Args:
        folder: The folder.
        tag: The checkpoint of DeepSpeed's in it; by default the one in the file `latest`.
        exclude_frozen: Whether to leave out weights that are not trained, which only DeepSpeed's format records.

    Raises:
        CheckpointError: If there is no checkpoint, or it is damaged.
    """
    if tag is not None or is_deepspeed(folder):
        return fp32_weights(folder, tag, exclude_frozen)
    if exclude_frozen:
        raise ConfigurationError(
            f"{folder} is not a checkpoint of DeepSpeed's, and others do not record which weights are trained. Leave "
            "out exclude_frozen_parameters."
        )
    with checked_weights(newest_checkpoint(folder).path) as files:
        weights = read_weights(files)
        return {name: v.float() if v.is_floating_point() else v for name, v in weights.items()}


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | PathLike[str], tag: str | None = None, exclude_frozen_parameters: bool = False
) -> dict[str, Tensor]:
    """Return the whole fp32 weights of a ZeRO checkpoint; DeepSpeed need not be installed.

    Args:
        checkpoint_dir: The folder given to DeepSpeed's `save_checkpoint`, or a checkpoint of this library.
        tag: The checkpoint in it, such as "global_step100"; by default the one in the file `latest`.
        exclude_frozen_parameters: Whether to leave out weights that are not trained.
    """
    return zero_weights(Path(checkpoint_dir), tag, exclude_frozen_parameters)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | PathLike[str], tag: str | None = None
) -> Any:
    """Load the whole fp32 weights of a ZeRO checkpoint into a model on the CPU, and return the model."""
    model.cpu().load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model
