"""Text generation as an evaluation step, for transformers models: predictions are the generated tokens."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.public_names.signatures import parameter_names
from trainer_lib.foundation.tensors.batch_fields import IGNORE_INDEX
from trainer_lib.modules.unwrapping import without_adapter
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
    """Return the tokens that a model generates for each row of a batch, with the loss if the batch has labels.

    A sequence-to-sequence model gets the inputs without labels. A causal model gets the prompts: the batch's
    `prompt_input_ids` (with `prompt_attention_mask`), or the tokens before the first label that counts, or all of
    `input_ids`. The tokens after the prompt are the prediction.

    Args:
        model: The model, with a `generate` method like that of transformers.
        batch: Its batch, by names.
        generation_kwargs: Further arguments of `generate`: `max_new_tokens`, `num_beams`, …
        processing_class: The tokenizer, whose padding token is used if the model has none.
        loss_of: Returns a model's loss on a batch as (sum, weight); it gets the batch without prompts.
        in_lockstep: Whether other ranks need this one for their forward until the last of them has finished.

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
            f"predict_with_generate=True needs batches with names, such as input_ids and labels, got a "
            f"{type(batch).__name__}."
        )
    options = _options(model, generation_kwargs or {}, processing_class, in_lockstep)
    labels = named.get("labels")
    written = _written(model, named, options)
    loss, weight = None, 0.0
    if labels is not None and loss_of is not None:
        loss, weight = loss_of(model, {name: value for name, value in named.items() if name not in _PROMPT.values()})
    return EvaluationOutput(loss, weight, written, labels, _row_padding(options))


_PROMPT = {"input_ids": "prompt_input_ids", "attention_mask": "prompt_attention_mask"}


def _options(model: Any, given: Mapping[str, Any], processing_class: Any, in_lockstep: bool) -> dict[str, Any]:
    """Return the arguments of `generate`, with the padding token if one is known."""
    options = dict(given)
    config = options.get("generation_config")
    if isinstance(config, (str, Path)):
        config = options["generation_config"] = _read_config(str(config))
    padding = _padding(model, processing_class)
    if padding is not None and getattr(config, "pad_token_id", None) is None and not _pads_by_itself(model):
        options.setdefault("pad_token_id", padding)
    if in_lockstep:
        options.setdefault("synced_gpus", True)
    return options


@lru_cache(maxsize=1)
def _read_config(source: str) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig.from_pretrained(source)


def _row_padding(options: Mapping[str, Any]) -> int:
    """Return what `generate` pads rows with, so that predictions do not depend on which rows are in a batch."""
    token = options.get("pad_token_id", getattr(options.get("generation_config"), "pad_token_id", None))
    return IGNORE_INDEX if token is None else int(token)


def _written(model: Any, named: Mapping[str, Any], options: Mapping[str, Any]) -> Tensor:
    if getattr(model.config, "is_encoder_decoder", False):
        return model.generate(**_inputs(named), **options)
    prompts = _prompts(named, max(_row_padding(options), 0))
    written = model.generate(**prompts, **options)
    return written[:, prompts["input_ids"].shape[1] :] if "input_ids" in prompts else written


def _inputs(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch without labels, and without decoder inputs that were made from labels."""
    inputs = {name: value for name, value in named.items() if name not in LABEL_NAMES}
    labels, decoder_inputs = named.get("labels"), inputs.get("decoder_input_ids")
    if labels is not None and decoder_inputs is not None and decoder_inputs.shape == labels.shape:
        for name in ("decoder_input_ids", "decoder_attention_mask"):
            inputs.pop(name, None)
    return inputs


def _prompts(named: Mapping[str, Any], padding: int) -> dict[str, Any]:
    if _PROMPT["input_ids"] in named:
        return {name: named[prompt_name] for name, prompt_name in _PROMPT.items() if prompt_name in named}
    inputs, labels = _inputs(named), named.get("labels")
    tokens = inputs.get("input_ids")
    if labels is None or tokens is None or labels.shape != tokens.shape:
        return inputs
    counts = labels != IGNORE_INDEX
    before = (counts.cumsum(dim=1) == 0) & (inputs.get("attention_mask", torch.ones_like(tokens)) != 0)
    if not before.any():  # every token is a label, so there is no separate prompt
        return inputs
    if not before.any(dim=1).all():
        raise ConfigurationError(
            "predict_with_generate=True: some rows have a prompt (tokens before their labels) and others do not. Give "
            "prompts as prompt_input_ids and prompt_attention_mask, or remove the rows without a prompt."
        )
    # Aligned to the right, as generated tokens follow the last column.
    order = before.int().argsort(dim=1, stable=True)[:, -int(before.sum(dim=1).max()) :]
    mask = before.gather(1, order)
    rest = {
        # Other values of each token, such as token_type_ids, follow the tokens; padding has 0.
        name: value.gather(1, order) * mask if isinstance(value, Tensor) and value.shape == tokens.shape else value
        for name, value in inputs.items()
        if name not in ("input_ids", "attention_mask", "position_ids")
    }
    return {**rest, "input_ids": tokens.gather(1, order).where(mask, padding), "attention_mask": mask.to(tokens.dtype)}


def _pads_by_itself(model: Any) -> bool:
    """Whether a model of transformers gives a padding token to the one inside it that generates, such as BLIP."""
    kinds = type(without_adapter(model)).__mro__
    theirs = (kind for kind in kinds if kind.__module__.startswith("transformers.") and "generate" in vars(kind))
    kind: Any = next(theirs, None)
    return kind is not None and "generation_config" not in parameter_names(kind.generate)


def _padding(model: Any, processing_class: Any) -> int | None:
    """Return the padding token: the model's, the tokenizer's, or the end-of-sequence token."""
    config = getattr(model, "generation_config", None)
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    ends = [getattr(config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)]
    ends = [end[0] if isinstance(end, (list, tuple)) and end else end for end in ends]
    candidates = [getattr(config, "pad_token_id", None), getattr(tokenizer, "pad_token_id", None), *ends]
    return next((token for token in candidates if isinstance(token, int)), None)
