"""Noise on the embeddings of a language model during training (NEFTune)."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.events import Modifier, Run
from trainer_lib.foundation.errors import ConfigurationError, did_you_mean


class NEFTune(Modifier):
    """Adds uniform noise of up to `alpha / sqrt(length * width)` to embeddings, in training only.

    Args:
        alpha: The noise level; usually 5 to 15.
        embedding: The name of the embedding, for models with several and without `get_input_embeddings`.

    Example:
        >>> noise = NEFTune(5.0)
    """

    alpha: float
    embedding: str | None

    def __init__(self, alpha: float = 5.0, embedding: str | None = None) -> None:
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha < math.inf:
            raise ConfigurationError(f"NEFTune(alpha) must be a number above 0, such as 5.0 (got {alpha!r}).")
        self.alpha, self.embedding = alpha, embedding
        self._hooks: list[Any] = []

    def on_fit_begin(self, run: Run) -> None:
        self._hooks = [self._find(model).register_forward_hook(self._add) for model in run.modules.values()]

    def on_fit_end(self, run: Run) -> None:
        del run
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _add(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        del inputs
        if not module.training:
            return output
        bound = self.alpha / math.sqrt(output.size(-2) * output.size(-1))
        return output + torch.empty_like(output).uniform_(-bound, bound)

    def _find(self, model: nn.Module) -> nn.Module:
        embeddings = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
        if self.embedding is not None:
            named = dict(model.named_modules())
            if self.embedding not in named:
                raise ConfigurationError(
                    f"NEFTune(embedding) must name a module of {type(model).__name__} (got {self.embedding!r}). "
                    "Embeddings: "
                    f"{', '.join(embeddings) or 'none'}.{did_you_mean(self.embedding, named)}"
                )
            return named[self.embedding]
        getter: Any = getattr(model, "get_input_embeddings", None)
        if callable(getter):
            return getter()  # type: ignore[no-any-return]
        if len(embeddings) != 1:
            raise ConfigurationError(
                f"NEFTune cannot find the input embedding of {type(model).__name__}: it has no get_input_embeddings() "
                f"and {len(embeddings)} embeddings ({', '.join(embeddings) or 'none'}). Give NEFTune(embedding=…)."
            )
        return next(iter(embeddings.values()))
