"""What an evaluation step logs, as metrics of the evaluation."""

from collections.abc import Sequence

import torch

from trainer_lib.trainer.evaluation.outputs import EvaluationOutput, Metric
from trainer_lib.trainer.metrics.running_metrics import RunningSum

Sums = dict[str, tuple[float, float]]  # each with its weight


class LoggedMeans(Metric):
    """The weighted means of the values that `log` got in the evaluation step and in `compute_loss`, by their names."""

    def __init__(self) -> None:
        super().__init__("")

    def begin(self, device: torch.device) -> None:
        """Forget the values."""
        self._device = device
        self._sums: dict[str, RunningSum] = {}

    def update(self, output: EvaluationOutput) -> None:
        """Add the values of a batch."""
        for name, (total, weight) in (output.logged or {}).items():
            if name not in self._sums:
                self._sums[name] = RunningSum(self._device)
            self._sums[name].add(total, weight)

    def state(self) -> Sums:
        """Return sum and weight by name."""
        return {name: so_far.read()[:2] for name, so_far in self._sums.items()}

    def result(self, states: Sequence[Sums]) -> dict[str, float]:
        """Return the means over all ranks."""
        means: dict[str, float] = {}
        for name in dict.fromkeys(name for state in states for name in state):
            sums = [state[name] for state in states if name in state]
            if weight := sum(weight for _, weight in sums):
                means[name] = sum(total for total, _ in sums) / weight
        return means
