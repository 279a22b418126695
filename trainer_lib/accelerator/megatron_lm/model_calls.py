"""Models of transformers or torch, called as Megatron-LM's models are: token by token losses, masks of booleans."""

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100


class ModelCall:
    """A model, as a train step calls it.

    Args:
        call: Calls the model itself.
        model: The user's model, whose attributes this object has.
        returns_logits: Whether losses come with their logits.
    """

    def __init__(self, call: Callable[..., Any], model: Any, returns_logits: bool = False) -> None:
        self._call, self._model, self._returns_logits = call, model, returns_logits
        self._accepted = inspect.signature(model.forward).parameters

    def __getattr__(self, name: str) -> Any:
        if name == "_model":
            raise AttributeError(name)
        return getattr(self._model, name)

    def outputs(self, tokens: Tensor, **inputs: Any) -> Any:
        """Return the model's outputs, from those of the inputs that it takes."""
        if "input_ids" not in self._accepted:
            return self._call(tokens)
        given = {name: value for name, value in inputs.items() if value is not None and name in self._accepted}
        return self._call(input_ids=tokens, **given)

    def losses(self, logits: Tensor, labels: Tensor | None) -> Any:
        """Return the loss of each token, or the logits if there are no labels."""
        if labels is None:
            return logits
        losses = functional.cross_entropy(
            logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none"
        ).view(labels.shape)
        return (losses, logits) if self._returns_logits else losses


class GPTCall(ModelCall):
    """A causal language model, with the call of Megatron-LM's `GPTModel`."""

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Any:
        """Return the loss of each token; `labels` are shifted already, and a true value of a mask hides a token."""
        outputs = self.outputs(input_ids, position_ids=position_ids, attention_mask=_as_of_transformers(attention_mask))
        return self.losses(_logits(outputs), labels)


class BertCall(ModelCall):
    """A model of BERT's kind, with the call of Megatron-LM's `BertModel`."""

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        tokentype_ids: Tensor | None = None,
        lm_labels: Tensor | None = None,
    ) -> Any:
        """Return logits, or with labels the loss of each token and the logits of the second task (or `None`)."""
        outputs = self.outputs(input_ids, attention_mask=attention_mask, token_type_ids=tokentype_ids)
        if lm_labels is None:
            return _logits(outputs)
        losses = self.losses(_logits(outputs), lm_labels)
        second = getattr(outputs, "seq_relationship_logits", None)
        return (*losses, second) if self._returns_logits else (losses, second)


class T5Call(ModelCall):
    """An encoder and decoder, with the call of Megatron-LM's `T5Model`."""

    def __call__(
        self,
        encoder_input_ids: Tensor,
        decoder_input_ids: Tensor,
        encoder_attn_mask: Tensor | None = None,
        decoder_attn_mask: Tensor | None = None,
        encoder_decoder_attn_mask: Tensor | None = None,
        tokentype_ids: Tensor | None = None,
        lm_labels: Tensor | None = None,
    ) -> Any:
        """Return the loss of each token; the decoder's masks are those that the model makes itself."""
        del decoder_attn_mask, encoder_decoder_attn_mask, tokentype_ids
        mask = encoder_attn_mask
        if mask is not None and mask.dim() == 3:  # of each pair of tokens; true: hidden
            mask = (~mask).any(dim=1).long()
        outputs = self.outputs(encoder_input_ids, decoder_input_ids=decoder_input_ids, attention_mask=mask)
        return self.losses(_logits(outputs), lm_labels)


CALLS: dict[str, type[ModelCall]] = {"gpt": GPTCall, "bert": BertCall, "t5": T5Call}


def _logits(outputs: Any) -> Tensor:
    if isinstance(outputs, Tensor):
        return outputs
    for name in ("logits", "prediction_logits"):
        if getattr(outputs, name, None) is not None:
            return cast(Tensor, getattr(outputs, name))
    return cast(Tensor, outputs[0])


def _as_of_transformers(mask: Tensor | None) -> Tensor | None:
    """Return a mask of pairs of tokens as transformers adds it to attention scores; other masks are the same."""
    if mask is None or mask.dim() != 4 or mask.dtype != torch.bool:
        return mask
    scores = torch.zeros(mask.shape, device=mask.device)
    return scores.masked_fill(mask, torch.finfo(scores.dtype).min)
