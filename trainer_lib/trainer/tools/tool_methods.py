"""The methods of a `Trainer` that train in a sandbox: check, previews, finders and the search."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer_lib.trainer.checks.foreign_calls import explains_form
from trainer_lib.trainer.trainer_interface import TrainerInterface

if TYPE_CHECKING:
    from trainer_lib.trainer.tools.check_report import CheckReport
    from trainer_lib.trainer.tools.learning_rate_finder import LearningRateSweep
    from trainer_lib.trainer.tools.preview import Preview
    from trainer_lib.trainer.tools.search.search_result import SearchResult
    from trainer_lib.trainer.tools.search.search_space import Space


class ToolMethods:
    """The tools of a `Trainer`."""

    def check(self: TrainerInterface) -> "CheckReport":
        """Run two updates, two evaluations, a save and a resume on the real model and data, and return a report.

        The report says whether a resumed run equals an uninterrupted one bit for bit, or where it differs, and what the
        whole run will take: time, memory, batch, learning rate, files. Nothing is left in the output folder, and the
        trainer's state does not change. With several ranks, all of them must call it.

        Example:
            >>> import torch
            >>> from trainer_lib import Trainer, TrainingArguments
            >>> data = (torch.randn(64, 4), torch.randint(2, (64,)))
            >>> args = TrainingArguments(use_cpu=True, progress_bar=False)
            >>> loss_fn = torch.nn.functional.cross_entropy
            >>> report = Trainer(torch.nn.Linear(4, 2), args, train_dataset=data, loss_fn=loss_fn).check()
            >>> report.passed, report.steps_per_epoch
            (True, 8)
        """
        from trainer_lib.trainer.tools.run_check import check

        return check(self)

    def preview(self: TrainerInterface, batches: int = 2) -> "Preview":
        """Return a summary of the first training batches, as the model gets them.

        The batches are collated, on the device, and changed by callbacks such as `Mixup`. With several ranks, each rank
        sees its own batches, and all ranks must call it. The trainer's state does not change.

        Args:
            batches: The number of batches.
        """
        from trainer_lib.trainer.tools.preview import preview

        return preview(self, batches)

    @explains_form
    def find_learning_rate(
        self: TrainerInterface, lowest: float = 1e-7, highest: float = 10.0, updates: int = 100
    ) -> "LearningRateSweep":
        """Train with a rising learning rate, and return the losses and the rate at which they fall fastest.

        The rate grows by the same factor with each update, without a schedule. The sweep ends when the mean of the last
        three losses is above four times that of the first three, or a loss is NaN or Inf. The trainer's state does not
        change.

        Args:
            lowest: The first learning rate.
            highest: The last learning rate, unless the sweep ends early.
            updates: The number of updates between them.

        Raises:
            ConfigurationError: If there are several optimizers, or no data.
        """
        from trainer_lib.trainer.tools.learning_rate_finder import find_learning_rate

        return find_learning_rate(self, lowest, highest, updates)

    @explains_form
    def find_batch_size(self: TrainerInterface, largest: int = 1024, updates: int = 2) -> int:
        """Return the largest batch size per rank that fits into memory.

        The search trains with the batch size of the arguments, and doubles it until a batch does not fit into memory,
        or halves it until one does. With several ranks, the result fits on each of them. The trainer's state does not
        change.

        Args:
            largest: The largest size to try. Sizes above the number of samples of a rank are not tried.
            updates: The number of updates with each size.

        Raises:
            NoExecutableBatchSizeError: If not even a single sample fits.
        """
        from trainer_lib.trainer.tools.batch_size_finder import find_batch_size

        return find_batch_size(self, largest, updates)

    @explains_form
    def search(
        self: TrainerInterface,
        space: "Space",
        n: int = 20,
        *,
        metric: str | None = None,
        greater_is_better: bool | None = None,
        study: Any = None,
        backend: str = "optuna",
        resources_per_trial: Mapping[str, float] | None = None,
    ) -> "SearchResult":
        """Train `n` times with arguments that optuna or Ray Tune proposes, and return the best ones.

        Each trial starts from the current weights, in its own run folder in `output_dir/search`. The search does not
        change the model. A trial that runs out of memory or whose metric is NaN or Inf fails, and the search continues.

        Args:
            space: The values of each argument: a list, a range `(low, high)`, or `(low, high, "log")`; or a function of
                optuna's trial that returns arguments by name; with Ray also its domains: `tune.loguniform(1e-5, 1e-2)`.
            n: The number of trials.
            metric: The metric to optimize, from the last evaluation; by default the one that selects the best
                checkpoint.
            greater_is_better: Whether higher is better; inferred for common metric names.
            study: An optuna study to continue, or a `ray.tune.TuneConfig` with a scheduler and search algorithm; by
                default a new one, seeded by `seed`.
            backend: "optuna": one trial after the other, on all ranks. "ray": trials at the same time, each on one
                process of a Ray cluster; without a cluster, Ray is started on this machine.
            resources_per_trial: With Ray, the resources of a trial; by default one core, and a GPU if the trainer uses
                one.

        Raises:
            MissingPackageError: If the extra `search` or `ray` is not installed.
        """
        from trainer_lib.trainer.tools.search.search import search

        return search(self, space, n, metric, greater_is_better, study, backend, resources_per_trial)
