"""The attention of transformers' models, computed over the ranks that hold parts of sequences."""

import inspect
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.context_parallel.active import CutSequences
from trainer_lib.context_parallel.documents import documents_of_positions
from trainer_lib.foundation.errors import UnsupportedError
from trainer_lib.modules.module_kinds import is_transformers_model

NAME = "context_parallel"
_REPLACED = ("sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", NAME)
_LAYERS = ("full_attention", "sliding_attention")
_BLOCKS = ("blockwise_overlay", "chunked_overlay")  # functions of transformers
_OPTIONS = ("softcap", "position_bias", "s_aux", "cache")


def use_context_parallel_attention(model: nn.Module) -> list[int]:
    """Have models of transformers within a model compute their attention over ranks; outside of a cut, as sdpa.

    Returns:
        The numbers of their attention heads, where they are known.

    Raises:
        UnsupportedError: If a model has an attention that cannot be computed on parts of sequences.
    """
    heads: list[int] = []
    for module in _pretrained_models(model):
        _check(module)
        _register()
        module.set_attn_implementation(NAME)
        if module.config._attn_implementation != NAME:  # transformers has no public name for it
            raise UnsupportedError(
                f"{type(module).__name__} does not let its attention be chosen (transformers' attention interface), so "
                "context parallelism cannot compute it. Set cp_size and sp_size to 1."
            )
        number = getattr(module.config.get_text_config(), "num_attention_heads", None)
        heads += [number] if isinstance(number, int) else []
    return heads


def _pretrained_models(model: nn.Module) -> list[Any]:
    """Return the outermost models of transformers within a model."""
    if is_transformers_model(model):
        return [model]
    return [found for child in model.children() for found in _pretrained_models(child)]


def _check(model: Any) -> None:
    kind, config = type(model).__name__, model.config
    text = config.get_text_config()
    chosen = text._attn_implementation  # transformers has no public name for it
    if chosen not in _REPLACED:
        raise UnsupportedError(
            f"{kind} uses attn_implementation={chosen!r}, which needs whole sequences on each rank. Set "
            "attn_implementation='sdpa' (from_pretrained(…, attn_implementation='sdpa') or "
            "model.set_attn_implementation('sdpa')) to cut sequences, or cp_size and sp_size to 1."
        )
    others = sorted(set(getattr(text, "layer_types", None) or ()) - set(_LAYERS))
    if others or getattr(text, "attention_chunk_size", None):
        raise UnsupportedError(
            f"{kind} has layers of {', '.join(others) or 'chunked_attention'}, which need whole sequences on each rank "
            f"(supported: {', '.join(_LAYERS)}). Set cp_size and sp_size to 1."
        )


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    # Messages between ranks stay out of compiled graphs. A decorator would import the compiler with this file.
    AttentionInterface.register(NAME, torch.compiler.disable(attention_forward))
    AttentionMaskInterface.register(NAME, torch.compiler.disable(attention_mask))


def attention_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """Return the keys of whole sequences that are no padding; outside of a cut, the mask for sdpa."""
    sequences = CutSequences.active()
    if sequences is None:
        from transformers.masking_utils import sdpa_mask

        return sdpa_mask(*args, attention_mask=attention_mask, **kwargs)
    if not torch.compiler.is_compiling():  # compiled code cannot inspect closures
        for function in _functions(kwargs.get("mask_function")):
            _check_mask_function(function, sequences)
    if attention_mask is None:
        return None
    whole = sequences.whole_mask(attention_mask)
    return None if bool(whole.all()) else whole


def _functions(mask_function: Any) -> Iterator[FunctionType]:
    """Yield the functions that a rule of transformers is made of."""
    if isinstance(mask_function, FunctionType):
        yield mask_function
        for value in _captured(mask_function).values():
            for inner in value if isinstance(value, tuple) else (value,):
                yield from _functions(inner)


def _captured(function: FunctionType) -> Mapping[str, Any]:
    return inspect.getclosurevars(function).nonlocals


def _check_mask_function(function: FunctionType, sequences: CutSequences) -> None:
    """Raise for a rule that depends on what a rank knows of its own part only."""
    name, captured = function.__qualname__.split(".")[0], _captured(function)
    is_own = function.__module__ != "transformers.masking_utils" and any(
        isinstance(value, Tensor) for value in captured.values()
    )
    if is_own or name in _BLOCKS:
        raise UnsupportedError(
            f"The model lets some positions attend to others by their content ({name}), as with images or prefixes in "
            "both directions, and context parallelism does not cut that. Set cp_size and sp_size to 1."
        )
    documents = captured.get("packed_sequence_mask")
    if documents is not None and not sequences.knows_documents:
        layout = sequences.ranks.layout
        positions = layout.positions(documents.shape[1] * layout.size, device=documents.device)
        # A cut begins a document too.
        if bool((documents != documents_of_positions(positions.unsqueeze(0))).any()):
            raise UnsupportedError(
                "position_ids restart within a sequence, so that the model keeps packed documents apart, and "
                "maybe_context_parallel does not know them. Use a Trainer, or a loader of "
                "deepspeed_ulysses_dl_adapter, which do; or give position_ids that count on."
            )


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention over the ranks that hold parts of its sequences; outside of a cut, as sdpa."""
    sequences = CutSequences.active()
    if sequences is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(  # type: ignore[return-value]
            module, query, key, value, attention_mask, dropout, scaling, is_causal,
            sliding_window=sliding_window, **kwargs,
        )  # fmt: skip
    given = [name for name in _OPTIONS if kwargs.get(name) is not None]
    if given or (attention_mask is not None and attention_mask.ndim != 2):
        shape = "" if attention_mask is None else f" and a mask of shape {tuple(attention_mask.shape)}"
        raise UnsupportedError(
            f"{type(module).__name__} computes attention with {', '.join(given) or 'no option'}{shape}, which context "
            "parallelism does not cut. It takes attention_mask as [batch, length]; set cp_size and sp_size to 1 for "
            "other attention."
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    out = sequences.attention(
        query, key, value, keep=attention_mask, is_causal=causal, scale=scaling, window=sliding_window,
        dropout_p=dropout,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None
