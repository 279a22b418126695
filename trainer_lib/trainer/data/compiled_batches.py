"""Batches of compiled models: sizes that vary compile once, and a short last batch compiles nothing."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from trainer_lib.options.compile_options import TorchDynamoPlugin
from trainer_lib.trainer.data.batch_rows import count_rows

_COMPILED = nullcontext()
_OF_TOKENS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "labels")


class CompiledBatches:
    """Decides how a compiled model runs a batch, so that training compiles once, and so does evaluation.

    Args:
        plugin: The options of compilation; without compilation, all batches run as usual.

    Attributes:
        compiles: Whether the model is compiled.
    """

    def __init__(self, plugin: TorchDynamoPlugin) -> None:
        self.compiles: bool = plugin.is_active
        self._takes_any_size = plugin.dynamic is True
        self._may_vary = plugin.dynamic is None
        self._rows = 0  # of the largest batch so far

    def stance(self, batch: Any, is_last: bool) -> AbstractContextManager[Any]:
        """Return the context of a batch's step: without torch.compile for the shorter last batch of an epoch."""
        if not self.compiles or self._takes_any_size:
            return _COMPILED
        rows = count_rows(batch) or 0
        if is_last and rows < self._rows:
            return torch.compiler.set_stance("force_eager")
        if not self._rows and self._may_vary:
            _mark_padded_length(batch)
        self._rows = max(self._rows, rows)
        return _COMPILED


def _mark_padded_length(batch: Any) -> None:
    """Tell the compiler that the next batches have other lengths, if this one is padded to its longest row.

    Otherwise torch compiles for the first length, and again for all others when it sees the second one.
    """
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return
    is_full = mask.bool().all(dim=1)
    if bool(is_full.any()) and not bool(is_full.all()):
        tokens = [batch[name] for name in _OF_TOKENS if name in batch]
        for tensor in tokens:
            if isinstance(tensor, Tensor) and tensor.shape == mask.shape:
                torch._dynamo.maybe_mark_dynamic(tensor, 1)  # pyright: ignore[reportPrivateUsage]  # no public name
