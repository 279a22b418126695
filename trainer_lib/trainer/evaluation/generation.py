"""This file is generation as an evaluation step, for models of transformers: predictions are what the model writes."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainer_lib.foundation.batch_fields import IGNORE_INDEX
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.trainer.evaluation.outputs import EvaluationOutput
from trainer_lib.trainer.losses.loss_result import Weight
from trainer_lib.trainer.losses.model_io import LABEL_NAMES, as_mapping

LossOf = Callable[[Any, Any], tuple[Tensor, Weight]]


def generate_step(
    model: Any,
    batch: Any,
    generation_kwargs: Mapping[str, Any] | None = None,
    processing_class: Any = None,
    *,
    loss_of: LossOf | None = None,
    in_lockstep: bool = False,
) -> EvaluationOutput:
    """Return what a model writes for each row of a batch, with the loss of the labels if there are some.

    A sequence-to-sequence model is given the inputs without labels. A causal one is given the prompts: the batch's
    `prompt_input_ids` (with `prompt_attention_mask`), or else what stands before the first label that counts, or else
    all of `input_ids`; what it writes after them is the prediction.

    Args:
        model: The model, with a `generate` as transformers' have it.
        batch: Its batch, by names.
        generation_kwargs: What `generate` is told beside the batch: `max_new_tokens`, `num_beams`, …
        processing_class: The tokenizer, whose token to pad with is taken where the model has none.
        loss_of: Returns a model's loss on a batch as (sum, weight); it gets the batch without prompts.
        in_lockstep: Whether other processes need this one for their forward, until the last of them is through.

    Raises:
        ConfigurationError: If the model cannot generate, or the batch has no names.
    """
    named = as_mapping(batch)
    if not callable(getattr(model, "generate", None)):
        raise ConfigurationError(
            f"predict_with_generate=True: {type(model).__name__} has no generate(). Leave it out, or override "
            "evaluation_step(model, batch)."
        )
    if named is None:
        raise ConfigurationError(
            f"predict_with_generate=True needs batches by name, such as input_ids and labels; got a "
            f"{type(batch).__name__}."
        )
    options = {**(generation_kwargs or {})}
    if in_lockstep:
        options.setdefault("synced_gpus", True)
    labels = named.get("labels")
    written = _written(model, named, options, processing_class)
    loss, weight = None, 0.0
    if labels is not None and loss_of is not None:
        loss, weight = loss_of(model, {name: value for name, value in named.items() if name not in _PROMPT.values()})
    return EvaluationOutput(loss, weight, written, labels)


_PROMPT = {"input_ids": "prompt_input_ids", "attention_mask": "prompt_attention_mask"}


def _written(model: Any, named: Mapping[str, Any], options: dict[str, Any], processing_class: Any) -> Tensor:
    padding = _padding(model, processing_class)
    if padding is not None and "generation_config" not in options:
        options.setdefault("pad_token_id", padding)
    if getattr(model.config, "is_encoder_decoder", False):
        return model.generate(**_inputs(named), **options)
    prompts = _prompts(named, 0 if padding is None else padding)
    written = model.generate(**prompts, **options)
    return written[:, prompts["input_ids"].shape[1] :] if "input_ids" in prompts else written


def _inputs(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch without labels, and without what was made of them."""
    inputs = {name: value for name, value in named.items() if name not in LABEL_NAMES}
    labels, own = named.get("labels"), inputs.get("decoder_input_ids")
    if labels is not None and own is not None and own.shape == labels.shape:
        for name in ("decoder_input_ids", "decoder_attention_mask"):
            inputs.pop(name, None)
    return inputs


def _prompts(named: Mapping[str, Any], padding: int) -> dict[str, Any]:
    if _PROMPT["input_ids"] in named:
        return {name: named[given] for name, given in _PROMPT.items() if given in named}
    inputs, labels = _inputs(named), named.get("labels")
    tokens = inputs.get("input_ids")
    if labels is None or tokens is None or labels.shape != tokens.shape:
        return inputs
    counts = labels != IGNORE_INDEX
    before = (counts.cumsum(dim=1) == 0) & (inputs.get("attention_mask", torch.ones_like(tokens)) != 0)
    if not before.any():  # every token is a label: there is no prompt that could be told from the rest
        return inputs
    if not before.any(dim=1).all():
        raise ConfigurationError(
            "predict_with_generate=True: some rows have a prompt (tokens before their labels) and others have none. "
            "Leave those out, or give prompts as prompt_input_ids and prompt_attention_mask."
        )
    # To the right, since what is written follows the last column.
    order = before.int().argsort(dim=1, stable=True)[:, -int(before.sum(dim=1).max()) :]
    mask = before.gather(1, order)
    rest = {
        name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask", "position_ids")
    }
    return {**rest, "input_ids": tokens.gather(1, order).where(mask, padding), "attention_mask": mask.to(tokens.dtype)}


def _padding(model: Any, processing_class: Any) -> int | None:
    """Return the token to pad with: the model's own, the tokenizer's, or that of the end."""
    config = getattr(model, "generation_config", None)
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    ends = [getattr(config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)]
    ends = [end[0] if isinstance(end, (list, tuple)) and end else end for end in ends]
    found = [getattr(config, "pad_token_id", None), getattr(tokenizer, "pad_token_id", None), *ends]
    return next((token for token in found if isinstance(token, int)), None)
