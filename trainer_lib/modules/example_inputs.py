"""A forward of a model of transformers or timm on a batch of zeros, to measure what it keeps for the backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_LANGUAGE_MODELS = ("CausalLM", "MaskedLM", "ConditionalGeneration", "LMHeadModel")


def example_forward(model: nn.Module, batch_size: int, sequence_length: int) -> tuple[Callable[[nn.Module], Any], str]:
    """Return a function that computes an output, and the loss of a language model, and the batch in words.

    Args:
        model: The model, maybe on the meta device.
        batch_size: The samples.
        sequence_length: The tokens of a sample; at most as many as the model takes.
    """
    batch = example_batch(model, batch_size, sequence_length)
    on_images = "pixel_values" in batch
    (sizes,) = {tuple(value.shape) for value in batch.values()}

    def forward(model: nn.Module) -> Any:
        weight = next(model.parameters())
        inputs = {
            name: torch.zeros(value.shape, dtype=weight.dtype if on_images else value.dtype, device=weight.device)
            for name, value in batch.items()
        }
        return model(*inputs.values()) if on_images else model(**inputs)

    shape = "×".join(map(str, sizes[1:]))
    return forward, f"{batch_size} × {shape} {'values' if on_images else 'tokens'}"


def example_batch(model: nn.Module, batch_size: int, sequence_length: int) -> dict[str, Tensor]:
    """Return a batch of zeros, with the labels of a language model.

    Args:
        model: The model, maybe on the meta device.
        batch_size: The samples.
        sequence_length: The tokens of a sample; at most as many as the model takes.
    """
    config: Any = getattr(model, "config", None)
    size = _image_size(model, config)
    if size is not None:
        return {"pixel_values": torch.zeros(batch_size, *size)}
    length = min(sequence_length, getattr(config, "max_position_embeddings", None) or sequence_length)
    tokens = torch.zeros(batch_size, length, dtype=torch.int64)
    batch = {"input_ids": tokens}
    if type(model).__name__.endswith(_LANGUAGE_MODELS):
        batch["labels"] = tokens
    elif getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = tokens
    return batch


def _image_size(model: nn.Module, config: Any) -> tuple[int, ...] | None:
    """Return channels, height and width of the images that a model takes; `None` for a model of tokens."""
    of_timm: Any = getattr(model, "default_cfg", None)
    if of_timm is not None:
        return tuple(of_timm["input_size"])
    if getattr(model, "main_input_name", "input_ids") != "pixel_values":
        return None
    size: Any = getattr(config, "image_size", 224)
    return (getattr(config, "num_channels", 3), *(size if isinstance(size, (list, tuple)) else (size, size)))
