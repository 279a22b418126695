"""The evaluation loop: metrics over one or several sets, and prediction."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from torch.utils.data import DataLoader

from trainer_lib.collectives.agreement import run_on_main_process
from trainer_lib.collectives.object_collectives import gather_per_rank
from trainer_lib.data_loader.prepared_loader import PreparedLoader
from trainer_lib.events import Dispatcher, Run
from trainer_lib.foundation.errors import (
    ConfigurationError,
    DistributedOperationException,
)
from trainer_lib.foundation.lengths import length_of
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.trainer.data.compiled_batches import CompiledBatches
from trainer_lib.trainer.evaluation.eval_batches import EvalBatches, Step
from trainer_lib.trainer.evaluation.eval_loaders import prepared_for_evaluation
from trainer_lib.trainer.evaluation.eval_mode import eval_mode
from trainer_lib.trainer.evaluation.gather_batches import BatchGatherer
from trainer_lib.trainer.evaluation.interrupted_eval import EvaluationInterrupted
from trainer_lib.trainer.evaluation.outputs import EvaluationOutput, Metric, as_numbers
from trainer_lib.trainer.evaluation.prediction_files import MANIFEST, check_free
from trainer_lib.trainer.evaluation.prediction_results import (
    Collector,
    ComputedMetrics,
    Predictions,
    Writer,
    computed,
    load_predictions,
)
from trainer_lib.trainer.metrics.logged_means import LoggedMeans
from trainer_lib.trainer.metrics.metric_spec import computed_metrics
from trainer_lib.trainer.metrics.running_metrics import mean_loss

if TYPE_CHECKING:
    from trainer_lib.accelerator import Accelerator
    from trainer_lib.data_loader.order.permutation import Positions

NOTHING_MEASURED = (
    "The evaluation measured nothing: its batches have no labels, so there is no loss, and no metric is given that "
    "works without labels. Give samples with labels: (inputs, targets), a dict with 'labels', or "
    "TrainingArguments(label_names=[…]) for labels of another name."
)

Models = nn.Module | Mapping[str, nn.Module]


@frozen_dataclass(kw_only=True, eq=False)
class EvaluationSet:
    """A set to evaluate on.

    Attributes:
        loader: Its prepared loader.
        metrics: The metrics besides the loss, by name.
        compute_metrics: A function of all predictions and labels that returns further metrics.
        limit: How many batches each rank evaluates; `None` for all.
        order: The samples in the order in which the loader reads them; `None`: in the order of the data.
    """

    loader: PreparedLoader
    metrics: Mapping[str, Metric] = field(default_factory=dict[str, Metric])
    compute_metrics: Callable[..., Any] | None = None
    limit: int | None = None
    order: "Positions | None" = None


class Evaluator:
    """Evaluates and predicts, with the same numbers for any world size and batch size.

    Only sums and the metrics' own states are kept of a batch; `compute_metrics` and predictions in memory alone need
    all rows. An evaluation does not change training.

    Args:
        accelerator: The accelerator.
        dispatcher: The callbacks.
        step: Returns an `EvaluationOutput` for a model and a batch. It runs without gradients. Ranks may have different
            numbers of batches, so it must not communicate.
        step_of_loss: Does so without predictions, where nobody sees them. By default `step`.
    """

    def __init__(
        self, accelerator: "Accelerator", dispatcher: Dispatcher, step: Step, step_of_loss: Step | None = None
    ) -> None:
        self._accelerator, self._dispatcher = accelerator, dispatcher
        in_lockstep = accelerator.strategy.is_in_lockstep
        compiled = CompiledBatches(accelerator.state.dynamo_plugin)
        self._batches = EvalBatches(dispatcher, step, step_of_loss or step, in_lockstep, compiled)

    def prepared(self, loader: DataLoader[Any]) -> PreparedLoader:
        """Return a loader that is sharded across ranks and not saved in checkpoints."""
        return prepared_for_evaluation(self._accelerator, loader)

    def evaluate(
        self, run: Run, model: Models, sets: Mapping[str, EvaluationSet], prefix: str, over_sets: Sequence[str] = ()
    ) -> dict[str, float]:
        """Return the metrics of all sets as `prefix_name`, or `prefix_set_name` for a set with a name.

        Args:
            run: The run.
            model: The prepared model, or several by name.
            sets: The sets by name; a single one may be called "".
            prefix: The prefix of the metrics' names.
            over_sets: Metrics whose mean over several sets is returned too, as `prefix_mean_name`.

        Raises:
            ConfigurationError: If a set is empty.
            DistributedOperationException: If the ranks evaluate different sets or metrics.
            EvaluationInterrupted: If `run.control.leaves` returns True on any rank.
        """
        measured = {name: _all_metrics(eval_set) for name, eval_set in sets.items()}
        self._check_same_on_all_ranks(measured)
        metrics: dict[str, float] = {}
        with eval_mode(run, _listed(model), self._accelerator), self._dispatcher.eval_weights(run):
            self._dispatcher.fire("on_evaluate_begin", run)
            evaluated = self._evaluated(model)
            for name, eval_set in sets.items():
                batches = self._length(eval_set.loader, eval_set.limit)
                self._dispatcher.fire("on_evaluate_set_begin", run, name, batches)
                outputs = self._batches.outputs(
                    run,
                    evaluated,
                    eval_set.loader,
                    eval_set.limit,
                    "on_evaluate",
                    _set_label(name),
                    needs_predictions=len(measured[name]) > 1,  # more than the loss
                )
                with_logged = [*measured[name], LoggedMeans()]
                values = self._measure(name, outputs, with_logged, eval_set.order)
                of_set = _prefixed(prefix, name, zip(with_logged, values, strict=True))
                if (bad := eval_set.loader.quarantine) is not None:
                    bad.sync_across_ranks()
                    of_set["_".join(part for part in (prefix, name, "left_out") if part)] = len(bad.agreed)
                self._dispatcher.fire("on_evaluate_set_end", run, name, of_set)
                metrics |= of_set
            metrics |= _means(metrics, prefix, list(sets), over_sets)
            run.metrics = metrics
            self._dispatcher.fire("on_evaluate_end", run, metrics)
        return metrics

    def predict(
        self,
        run: Run,
        model: Models,
        loader: PreparedLoader,
        *,
        to: Path | None = None,
        has_labels: bool = True,
        limit: int | None = None,
        order: "Positions | None" = None,
        prefix: str = "predict",
        compute_metrics: Callable[..., Any] | None = None,
    ) -> Predictions:
        """Return the step's predictions for all samples, in the order of the set, on every rank.

        Args:
            run: The run.
            model: The prepared model, or several by name.
            loader: The set's prepared loader.
            to: A folder that the main process writes predictions to batch by batch, instead of keeping them in memory.
            has_labels: Whether to return the labels, and to measure the loss.
            limit: How many batches each rank predicts; `None` for all.
            order: The samples in the order in which the loader reads them; `None`: in the order of the data.
            prefix: The prefix of the metrics' names.
            compute_metrics: A function of all predictions and labels that returns further metrics. It is called if
                there are labels or a loss, and everything is in memory.

        Raises:
            ConfigurationError: If the set is empty, or the folder is not.
        """
        collector = Collector("predictions") if to is None else Writer(to)
        metrics: list[Metric] = [collector, *([mean_loss(), LoggedMeans()] if has_labels else [])]
        if to is not None:
            self._on_main_process(f"Predictions in {to}", lambda: check_free(to))
        averaged = self._dispatcher.eval_weights(run)
        with eval_mode(run, _listed(model), self._accelerator), averaged, _abandoned_on_error(collector):
            self._dispatcher.fire("on_predict_begin", run, self._length(loader, limit))
            outputs = self._batches.outputs(run, self._evaluated(model), loader, limit, "on_predict", "the prediction")
            if not has_labels:
                outputs = ([replace(part, loss_sum=None, labels=None) for part in parts] for parts in outputs)
            collected, *values = self._measure("", outputs, metrics, order)
            measured = _prefixed(prefix, "", zip(metrics[1:], values, strict=True))
            if compute_metrics is not None and to is None and has_labels:
                predictions, labels = collected
                if labels is not None or values[0] != {}:  # some models need no labels for their loss
                    measured |= self._computed(compute_metrics, predictions, labels, prefix)
            if isinstance(collector, Writer):
                self._on_main_process(f"Predictions in {to}", lambda: collector.commit(measured))
            self._dispatcher.fire("on_predict_end", run)
        if to is None:
            predictions, labels = collected
            return Predictions(predictions, labels, measured)
        # A rank that cannot see the main process's disk gets only the metrics.
        return load_predictions(to) if (to / MANIFEST).is_file() else Predictions(None, None, measured, to)

    # -- across ranks --------------------------------------------------------------------------------------------

    def _measure(
        self,
        name: str,
        outputs: Iterator[list[EvaluationOutput]],
        metrics: Sequence[Metric],
        order: "Positions | None",
    ) -> list[Any]:
        """Return the values of the metrics, reduced across ranks."""
        for metric in metrics:
            metric.order = order
            metric.begin(self._accelerator.device)
        batches = self._update(name, outputs, metrics)
        reports = self._exchange_states(metrics, batches)
        if any(report.is_interrupted for report in reports):
            raise EvaluationInterrupted
        if not any(report.batches for report in reports):
            raise ConfigurationError(f"The set{name and f' {name!r}'} has no samples, so there is nothing to evaluate.")
        return [metric.result(_states_of(metric, index, reports)) for index, metric in enumerate(metrics)]

    def _update(self, name: str, outputs: Iterator[list[EvaluationOutput]], metrics: Sequence[Metric]) -> int:
        """Update the metrics with this rank's batches, those that need all rows with all ranks'; count the batches."""
        accelerator = self._accelerator
        local = [metric for metric in metrics if not metric.needs_all_rows]
        gatherer = BatchGatherer(accelerator.data_group, metrics, accelerator.is_main_process)
        batches = 0
        for parts in outputs:
            batches += 1
            for part in parts:
                updated = metrics[0]
                try:
                    for updated in local:
                        updated.update(part)
                except Exception as error:
                    _add_note(error, updated, name, batches, part)
                    raise
                del part  # the next batch needs the memory of its predictions
            gatherer.add(parts)
        gatherer.close(self._batches.is_interrupted)
        return batches

    def _exchange_states(self, metrics: Sequence[Metric], batches: int) -> "list[_RankReport]":
        """Return the metrics' states on each rank that read other batches than the ranks before it."""
        is_interrupted = self._batches.is_interrupted
        states = [] if is_interrupted else [self._local_state(metric, batches) for metric in metrics]
        by_rank = gather_per_rank((batches, states, is_interrupted))
        return [_RankReport(*by_rank[rank]) for rank in self._accelerator.state.first_readers]

    def _local_state(self, metric: Metric, batches: int) -> Any:
        """Return the state of a metric on this rank; `None` if this rank did not update it."""
        has_updated = self._accelerator.is_main_process if metric.main_process_only else batches > 0
        return metric.state() if has_updated else None

    def _check_same_on_all_ranks(self, sets: Mapping[str, Sequence[Metric]]) -> None:
        """Raise, on all ranks, unless all evaluate the same sets with the same metrics."""
        local = [
            f"{metric.name or 'compute_metrics'}{name and f' of {name}'}" for name in sets for metric in sets[name]
        ]
        ranks: list[list[str]] = gather_per_rank(local)
        if all(names == ranks[0] for names in ranks):
            return
        common = set(ranks[0]).intersection(*ranks[1:])
        lines = [f"rank {rank}: {', '.join(n for n in names if n not in common)}" for rank, names in enumerate(ranks)]
        raise DistributedOperationException(
            "The ranks evaluate different metrics, or in another order. Besides the metrics in common:\n  "
            + "\n  ".join(lines)
            + "\nGive the same metrics, in the same order, on all ranks."
        )

    def _computed(self, function: Callable[..., Any], predictions: Any, labels: Any, prefix: str) -> dict[str, float]:
        """Return a function's metrics of predictions and labels, computed on the main process."""
        values = run_on_main_process(
            self._accelerator.group,
            "compute_metrics",
            lambda: computed(function, predictions, labels),
            DistributedOperationException,
        )
        return _prefixed(prefix, "", iter([(ComputedMetrics(function), values)]))

    def _on_main_process(self, action: str, function: Callable[[], None]) -> None:
        """Call a function on the main process; its error is raised on all ranks."""
        run_on_main_process(self._accelerator.group, action, function, DistributedOperationException)

    def _evaluated(self, model: Models) -> Any:
        evaluated = self._accelerator.strategy.evaluation_module
        if isinstance(model, nn.Module):
            return evaluated(model)
        return {name: evaluated(module) for name, module in model.items()}

    def _length(self, loader: PreparedLoader, limit: int | None) -> int | None:
        lengths = [length for length in (length_of(loader), limit) if length is not None]
        return min(lengths, default=None)


def _set_label(name: str) -> str:
    """Return what error messages call a set."""
    return f"the evaluation set {name!r}" if name else "the evaluation"


class _RankReport(NamedTuple):
    """What a rank sends to the others at the end of a set."""

    batches: int
    states: list[Any]
    is_interrupted: bool  # whether this rank left the evaluation


def _states_of(metric: Metric, index: int, reports: Sequence[_RankReport]) -> list[Any]:
    """Return the states of a metric: that of the main process, or those of all ranks that had batches."""
    states = [report.states[index] for report in (reports[:1] if metric.main_process_only else reports)]
    return [state for state in states if state is not None]


def _add_note(error: Exception, metric: Metric, of_set: str, batch: int, output: EvaluationOutput) -> None:
    from trainer_lib.trainer.safety.error_context import described

    error.add_note(
        f"In the metric {metric.name!r}, in batch {batch} of {_set_label(of_set)}, with predictions "
        f"{described(output.predictions)} and labels {described(output.labels)}."
    )


@contextmanager
def _abandoned_on_error(collector: Metric) -> Generator[None]:
    try:
        yield
    except BaseException:
        if isinstance(collector, Writer):
            collector.abandon()
        raise


def _all_metrics(eval_set: EvaluationSet) -> list[Metric]:
    computed = [] if eval_set.compute_metrics is None else [computed_metrics(eval_set.compute_metrics)]
    return [mean_loss(), *eval_set.metrics.values(), *computed]


def _prefixed(prefix: str, name: str, values: Iterator[tuple[Metric, Any]]) -> dict[str, float]:
    stem = "_".join(part for part in (prefix, name) if part)
    metrics: dict[str, float] = {}
    for metric, value in values:
        for key, number in as_numbers(metric.name, value).items():
            full = key if key.startswith(f"{stem}_") or not stem else f"{stem}_{key}"
            if full in metrics:
                raise ConfigurationError(f"Two metrics have the name {full!r}. Give one of them another name.")
            metrics[full] = number
    return metrics


def _means(metrics: Mapping[str, float], prefix: str, sets: Sequence[str], names: Sequence[str]) -> dict[str, float]:
    """Return the mean of each metric over the sets, with equal weights."""
    means: dict[str, float] = {}
    for name in names if len(sets) > 1 else ():
        values = [metrics.get(f"{prefix}_{of_set}_{name}") for of_set in sets]
        numbers = [value for value in values if value is not None]
        if len(numbers) == len(values):
            means[f"{prefix}_mean_{name}"] = sum(numbers) / len(numbers)
    return means


def _listed(model: Models) -> list[nn.Module]:
    return [model] if isinstance(model, nn.Module) else list(model.values())
