"""The loss of a causal language model of transformers without its whole logits in memory."""

from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.foundation.errors import UnsupportedError
from trainer_lib.foundation.tensors.batch_fields import IGNORE_INDEX, SHIFTED_LABELS
from trainer_lib.modules.unwrapping import without_adapter
from trainer_lib.trainer.losses.label_shift import is_shifted_by_name
from trainer_lib.trainer.losses.linear_cross_entropy import linear_cross_entropy

_LOSS = "ForCausalLMLoss"
_ROWS = 512


def chunk_loss(model: nn.Module, mixed_precision: str = "no", rows: int = _ROWS) -> None:
    """Let a causal language model of transformers compute its loss without whole logits, while it trains.

    Args:
        model: The model, or an adapter of PEFT around it.
        mixed_precision: The precision that it trains in.
        rows: How many tokens have logits in memory.

    Raises:
        UnsupportedError: If the model computes its loss in another way, or the precision scales it.
    """
    if mixed_precision == "fp16":
        raise UnsupportedError(
            "chunked_cross_entropy does not work with mixed_precision='fp16', which scales the loss after its "
            "gradients are computed. Use mixed_precision='bf16', or set chunked_cross_entropy=False."
        )
    inner, head = _causal_model(model)
    if not isinstance(getattr(head.__dict__.get("forward"), "__self__", None), ChunkedLoss):
        ChunkedLoss(inner, head, rows).attach()


class ChunkedLoss:
    """Takes the place of a model's output layer and loss function, in forwards that train on labels.

    The output layer then returns the summed loss instead of logits, which the loss function divides. All other
    forwards return logits, as they did.

    Args:
        model: The model.
        head: Its output layer.
        rows: How many tokens have logits in memory.
    """

    def __init__(self, model: Any, head: Any, rows: int) -> None:
        self._model, self._head, self._rows = model, head, rows
        self._targets: Tensor | None = None
        self._sum: Tensor | None = None
        self._plain_head, self._plain_loss = self._head.forward, self._model.loss_function

    def attach(self) -> None:
        """Replace the output layer's forward and the loss function."""
        self._model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        self._model.register_forward_hook(self._after_forward, always_call=True)
        self._head.__dict__["forward"] = self._head_forward
        self._model.loss_function = self._loss

    def _before_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        del module, args
        labels, shifted = kwargs.get("labels"), kwargs.get(SHIFTED_LABELS)
        self._targets = self._sum = None
        if not torch.is_grad_enabled() or not isinstance(labels, Tensor):
            return
        if not isinstance(shifted, Tensor):
            shifted = nn.functional.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]
        self._targets = shifted.reshape(-1)

    def _after_forward(self, module: nn.Module, args: Any, outputs: Any) -> None:
        del module, args, outputs
        self._targets = self._sum = None

    def _head_forward(self, hidden: Tensor) -> Tensor:
        if self._targets is None:
            return self._plain_head(hidden)
        rows = hidden.reshape(-1, hidden.shape[-1])
        if len(rows) != len(self._targets):
            raise UnsupportedError(
                f"chunked_cross_entropy compares each of {len(self._targets)} labels with a position, and "
                f"{type(self._model).__name__} computes logits for {len(rows)}. Set chunked_cross_entropy=False."
            )
        targets = self._targets.to(rows.device)
        self._sum = linear_cross_entropy(rows, self._head.weight, self._head.bias, targets, self._rows)
        return self._sum

    def _loss(self, logits: Tensor, labels: Any, vocab_size: Any = None, **kwargs: Any) -> Tensor:
        total, targets = self._sum, self._targets
        if total is None or targets is None:
            return self._plain_loss(logits, labels, vocab_size, **kwargs)
        if logits is not total:
            raise UnsupportedError(
                f"chunked_cross_entropy does not work for {type(self._model).__name__}: it changes its logits before "
                "the loss (final_logit_softcapping, logits_scaling …). Set chunked_cross_entropy=False."
            )
        items = kwargs.get("num_items_in_batch")
        if items is None:
            items = (targets != kwargs.get("ignore_index", IGNORE_INDEX)).sum()
        return total / (items.to(total.device) if isinstance(items, Tensor) else items)


def _causal_model(model: nn.Module) -> tuple[Any, Any]:
    """Return the model of transformers and its output layer."""
    inner = without_adapter(model)
    get_head = getattr(inner, "get_output_embeddings", None)
    loss = getattr(getattr(inner, "loss_function", None), "__name__", None)
    head = get_head() if callable(get_head) else None
    is_chunked = isinstance(getattr(getattr(inner, "loss_function", None), "__self__", None), ChunkedLoss)
    if not is_shifted_by_name(inner) or (loss != _LOSS and not is_chunked):
        raise UnsupportedError(
            f"chunked_cross_entropy needs a causal language model of transformers (got {type(inner).__name__}, whose "
            f"loss function is {loss}). Set chunked_cross_entropy=False."
        )
    if type(head) is not nn.Linear:
        raise UnsupportedError(
            f"chunked_cross_entropy needs an output layer that is a torch.nn.Linear, and that of "
            f"{type(inner).__name__} is a {type(head).__name__}. Leave it out of adapters and quantization, or set "
            "chunked_cross_entropy=False."
        )
    return inner, head
