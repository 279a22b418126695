"""This file is noise on the embeddings of a language model while it is trained (NEFTune)."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.events import Modifier, Run
from trainer_lib.foundation.errors import ConfigurationError, did_you_mean


class NEFTune(Modifier):
    """Adds uniform noise of up to `alpha / sqrt(length * width)` to embeddings, in training only.

    Args:
        alpha: How much; 5 to 15 are usual.
        embedding: The name of the embedding, where the model does not tell (`get_input_embeddings`) and has several.

    Example:
        >>> noise = NEFTune(5.0)
    """

    def __init__(self, alpha: float = 5.0, embedding: str | None = None) -> None:
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha < math.inf:
            raise ConfigurationError(f"NEFTune(alpha={alpha!r}): give a number above 0, such as 5.0.")
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
        there = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
        if self.embedding is not None:
            named = dict(model.named_modules())
            if self.embedding not in named:
                raise ConfigurationError(
                    f"NEFTune(embedding={self.embedding!r}) is no module of {type(model).__name__}. Embeddings: "
                    f"{', '.join(there) or 'none'}.{did_you_mean(self.embedding, named)}"
                )
            return named[self.embedding]
        tells: Any = getattr(model, "get_input_embeddings", None)
        if callable(tells):
            return tells()  # type: ignore[no-any-return]
        if len(there) != 1:
            raise ConfigurationError(
                f"NEFTune: {type(model).__name__} has {len(there)} embeddings ({', '.join(there) or 'none'}), and does "
                "not tell which is that of its inputs. Give NEFTune(embedding=…)."
            )
        return next(iter(there.values()))
