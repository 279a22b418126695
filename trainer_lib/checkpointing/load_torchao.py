"""Loads weights into a model that torchao quantizes, or weights that it has quantized."""

import torch
from torch import nn

from trainer_lib.checkpointing.load.weight_files import WeightFiles
from trainer_lib.checkpointing.model_weights import checked_weights, load_checkpoint_in_model
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.logging import get_logger
from trainer_lib.modules.weights.state_dicts import check_fits
from trainer_lib.modules.weights.tied_parameters import find_tied_parameters, retie_parameters
from trainer_lib.options.torchao_options import TorchAoConfig
from trainer_lib.quantization.torchao_layers import quantize_linear_layers

_logger = get_logger(__name__)
_PART = ".weight.qdata"


def load_quantized_by_torchao(
    model: nn.Module, checkpoint: str | AnyPath, config: TorchAoConfig, device: torch.device, strict: bool = False
) -> nn.Module:
    """Load weights into a model, quantize its linear layers one after the other, and return it on its device.

    Weights that were saved quantized are loaded as they are.

    Args:
        model: The model, usually made under `init_empty_weights`.
        checkpoint: The weights; see `load_checkpoint_in_model`.
        config: What to quantize, and how.
        device: The device of the model.
        strict: Whether names that only the model or only the checkpoint has raise.

    Raises:
        StateError: If the weights were quantized in another way, or do not fit the model.
    """
    with checked_weights(checkpoint) as files:
        weights = WeightFiles(files)
        if any(name.endswith(_PART) for name in weights.kinds):
            _load_parts(model, weights, config, strict)
        else:
            load_checkpoint_in_model(model, files, dtype=config.torch_dtype, strict=strict)
            quantize_linear_layers(model, config)
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        raise CheckpointError(f"{checkpoint} has no values for {', '.join(empty[:4])}, and the model has none.")
    return model.to(device)


def _load_parts(model: nn.Module, weights: WeightFiles, config: TorchAoConfig, strict: bool) -> None:
    ties = find_tied_parameters(model)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    model.to(config.torch_dtype)  # what layers without values compute in
    quantize_linear_layers(model, config)
    check_fits(model, weights.shapes, strict)
    state = {name: value for path, names in weights.by_file() for name, value in weights.read(path, names).items()}
    current = model.state_dict(keep_vars=True)
    cast = {
        name: value.to(current[name].dtype) if name in current and value.dtype in _FLOATING else value
        for name, value in state.items()
    }
    missing, unexpected = model.load_state_dict(cast, strict=False, assign=True)
    retie_parameters(model, ties)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name not in frozen)
    tied = {name for names in ties for name in names}
    for names, text in ((set(missing) - tied, "is not in the files"), (set(unexpected), "is not in the model")):
        if names:
            _logger.warning("%s %s.", ", ".join(sorted(names)[:8]), text)


_FLOATING = (torch.float32, torch.float16, torch.bfloat16)
