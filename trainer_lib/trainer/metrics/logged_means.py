"""What an evaluation step logs, as metrics of the evaluation."""

from collections.abc import Sequence

import torch

from trainer_lib.process_group import LoneProcess
from trainer_lib.trainer.evaluation.outputs import EvaluationOutput, Metric
from trainer_lib.trainer.metrics.running_means import RunningMeans


class LoggedMeans(Metric):
    """The weighted means of the values that `log` got in the evaluation step and in `compute_loss`, by their names."""

    def __init__(self) -> None:
        super().__init__("")

    def begin(self, device: torch.device) -> None:
        """Forget the values."""
        self._means = RunningMeans(LoneProcess(), device)  # each rank its own until the end

    def update(self, output: EvaluationOutput) -> None:
        """Add the values of a batch."""
        for name, (total, weight) in (output.logged or {}).items():
            self._means.add_sum(name, total, weight)

    def state(self) -> dict[str, list[float]]:
        """Return sum and weight by name."""
        return self._means.state_dict()

    def result(self, states: Sequence[dict[str, list[float]]]) -> dict[str, float]:
        """Return the means over all ranks."""
        sums: dict[str, list[float]] = {}
        for name, numbers in (entry for state in states for entry in state.items()):
            sums[name] = [so_far + number for so_far, number in zip(sums.get(name, (0.0, 0.0)), numbers, strict=True)]
        return {name: total / weight for name, (total, weight) in sums.items() if weight}
