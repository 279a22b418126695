"""The samples and tokens that a run was trained on, the same numbers on every rank."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from trainer_lib.trainer.fit.context import FitContext
from trainer_lib.trainer.losses.model_io import batch_size, count_tokens


class SampleCounts:
    """Counts samples, and tokens where they are asked for.

    Most loaders know how many samples all ranks read in a round. What a rank knows of itself alone (the samples of
    batches that come ready, tokens) travels to the others with the gradients of an update.

    Args:
        context: Whose training data is counted.
    """

    def __init__(self, context: FitContext) -> None:
        self._run, self._loader, self._group = context.run, context.loader, context.accelerator.data_group
        self._counts_tokens = context.run.args.counts_tokens
        self._samples = 0
        self._tokens: int | Tensor = 0

    def read(self, batch: Any) -> None:
        """Note what a batch of this rank holds, which repeats no sample."""
        loader = self._loader
        if loader.samples_in_round is None:
            self._samples += loader.samples_in_batch or batch_size(batch)
        if self._counts_tokens:
            self._tokens = self._tokens + count_tokens(batch)

    @property
    def pending(self) -> list[float | Tensor]:
        """What this rank read since the last update, as ranks tell each other; empty where each knows all."""
        samples = [float(self._samples)] if self._loader.samples_in_round is None else []
        return [*samples, self._tokens] if self._counts_tokens else [*samples]

    def add(self, totals: Iterable[float | Tensor]) -> None:
        """Count what all ranks read, in the order of `pending`."""
        state, numbers = self._run.state, iter(totals)
        if self._loader.samples_in_round is None:
            state.samples += round(float(next(numbers)))
            self._samples = 0
        if self._counts_tokens:
            state.tokens = (state.tokens or 0) + round(float(next(numbers)))
            self._tokens = 0

    def gather(self) -> None:
        """Count what all ranks read by a message of its own, where no gradients take the numbers along."""
        if self._counts_tokens or self._loader.samples_in_round is None:
            gathered = self._group.all_gather_objects([float(number) for number in self.pending])
            self.add(sum(numbers) for numbers in zip(*gathered, strict=True))
