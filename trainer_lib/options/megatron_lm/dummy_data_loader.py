"""Stand-ins for the schedule and the datasets that a `MegatronLMPlugin` describes."""

import math
from typing import Any, ClassVar

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, unknown
from trainer_lib.options.base import check_count

DECAYS = ("linear", "cosine", "constant", "inverse-square-root")
INCREASES = ("constant", "linear", "cosine")


class MegatronLMDummyScheduler:
    """Stands for the schedule of a `MegatronLMPlugin`; `prepare` replaces it.

    The learning rate rises over the warm-up, and then falls in the plugin's `lr_decay_style` to its `min_lr`. What the
    plugin says of iterations comes first.

    Args:
        optimizer: The optimizer that it follows.
        total_num_steps: The updates after which the learning rate is at its end.
        warmup_num_steps: The updates of the warm-up.
        **kwargs: Refused.
    """

    optimizer: Any
    total_num_steps: int | None
    warmup_num_steps: int

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        if kwargs:
            raise ConfigurationError(
                f"MegatronLMDummyScheduler does not know {', '.join(kwargs)}. Known: total_num_steps, warmup_num_steps."
            )
        check_count("warmup_num_steps", warmup_num_steps, at_least=0)
        if total_num_steps is not None:
            check_count("total_num_steps", total_num_steps, at_least=warmup_num_steps + 1)
        self.optimizer, self.total_num_steps, self.warmup_num_steps = optimizer, total_num_steps, warmup_num_steps


def decay_factor(step: int, shape: str, warmup: int, decay: int | None, least: float) -> float:
    """Return the factor of the learning rate after some updates.

    Args:
        step: The number of updates.
        shape: "linear", "cosine", "constant" or "inverse-square-root".
        warmup: The updates of the warm-up.
        decay: The updates after which the factor is at its end; only "constant" needs none.
        least: The factor at the end.

    Example:
        >>> [decay_factor(step, "linear", 2, 6, 0.5) for step in (0, 1, 2, 4, 9)]
        [0.0, 0.5, 1.0, 0.75, 0.5]
    """
    if step < warmup:
        return step / warmup
    if shape == "constant" or decay is None:
        return 1.0
    if step > decay:
        return least
    if shape == "inverse-square-root":
        return max(least, math.sqrt(max(warmup, 1)) / math.sqrt(max(step, 1)))
    done = (step - warmup) / max(decay - warmup, 1)
    left = 1 - done if shape == "linear" else (1 + math.cos(math.pi * done)) / 2
    return least + (1 - least) * left


def increase_factor(step: int, shape: str, steps: int) -> float:
    """Return how far the weight decay is from its start to its end after some updates.

    Example:
        >>> [increase_factor(step, "linear", 4) for step in (0, 2, 9)]
        [0.0, 0.5, 1.0]
    """
    done = min(step / steps, 1.0)
    return done if shape == "linear" else (1 - math.cos(math.pi * done)) / 2


class MegatronLMDummyDataLoader:
    """Stands for loaders of Megatron-LM's indexed datasets; `prepare` replaces it.

    Give it to `prepare` once for each loader that you need: the first becomes the loader to train on, the second that
    to validate on, the third that to test on. Their batches are samples of GPT: runs of `seq_length` + 1 tokens.

    Args:
        **dataset_kwargs: `data_path` (a path without `.bin` and `.idx`, a list of paths, or of weights and paths in
            turn), `splits_string` or `split` ("969,30,1"), `seq_length`, `micro_batch_size`, `seed` (1234) and
            `num_workers` (0). The plugin's `seq_length` comes in where it is left out.

    Example:
        >>> MegatronLMDummyDataLoader(data_path="data/text_document", micro_batch_size=4).dataset_args["split"]
        '969,30,1'
    """

    _DEFAULTS: ClassVar[dict[str, Any]] = {
        "data_path": None,
        "split": "969,30,1",
        "seq_length": None,
        "micro_batch_size": None,
    }
    _NUMBERS: ClassVar[dict[str, int]] = {"seed": 1234, "num_workers": 0}

    def __init__(self, **dataset_kwargs: Any) -> None:
        known = {**self._DEFAULTS, **self._NUMBERS}
        if "splits_string" in dataset_kwargs:
            dataset_kwargs["split"] = dataset_kwargs.pop("splits_string")
        for name in dataset_kwargs:
            if name not in known:
                raise ConfigurationError(unknown("argument of MegatronLMDummyDataLoader", name, known))
        self.dataset_args: dict[str, Any] = {**known, **dataset_kwargs}
        for name in ("seq_length", "micro_batch_size"):
            if self.dataset_args[name] is not None:
                check_count(name, self.dataset_args[name])
        for name in self._NUMBERS:
            check_count(name, self.dataset_args[name], at_least=0)

    def needed(self, name: str, value: Any = None) -> Any:
        """Return an argument, or another value in its place, and raise if there is neither."""
        found = self.dataset_args[name] if self.dataset_args[name] is not None else value
        if found is None:
            raise ConfigurationError(
                f"MegatronLMDummyDataLoader needs {name} (got {shown(self.dataset_args)}). Give {name}=…."
            )
        return found
