"""Metrics of all forms: the value over ranks and batches equals that of all samples at once."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from tests.trainer.evaluated import CLASSES, Bench, Texts, classify, dataset, expected, read, scores
from tests.trainer.tasks import arguments
from tests.worlds import run_world
from trainer_lib import Trainer
from trainer_lib.foundation.errors import ConfigurationError, DistributedOperationException
from trainer_lib.launchers import ProcessFailedError, run_forked
from trainer_lib.trainer.evaluation.outputs import EvaluationOutput
from trainer_lib.trainer.metrics.metric_spec import as_metric, as_metrics

SAMPLES = 23


def measured(
    make: Callable[[], Any], step: Any = classify, data: Any = None, processes: int = 2, run: Any = run_world
) -> dict[str, float]:
    """Return metrics, evaluated twice on each of several ranks, and check that all values are the same.

    Give `run=run_forked` for metrics of a library that is slow to import: forked processes have it already.
    """

    def body() -> list[dict[str, float]]:
        bench = Bench(step)
        evaluation_set = bench.set(dataset(SAMPLES) if data is None else data, make(), batch_size=3)
        return [bench.evaluate({"": evaluation_set}) for _ in range(2)]

    results = [values for process in run(body, num_processes=processes, timeout=60) for values in process]
    assert all(values == results[0] for values in results)
    alone = Bench(step)
    whole = alone.evaluate({"": alone.set(dataset(SAMPLES) if data is None else data, make(), batch_size=100)})
    for name, value in whole.items():
        np.testing.assert_allclose(results[0][name], value, rtol=1e-6, err_msg=name)
    assert list(whole) == list(results[0])
    return {name.removeprefix("eval_"): value for name, value in results[0].items()}


def compared(predictions: Tensor, labels: Tensor) -> Callable[[Any, Any], EvaluationOutput]:
    """Return an evaluation step that yields predictions and labels as they are."""
    return lambda model, batch: EvaluationOutput(predictions=batch[0], labels=batch[1])


class TestNamed:
    def test_errors_are_means_over_values(self) -> None:
        predictions, labels = torch.randn(10, 2), torch.randn(10, 2)
        values = measured(
            lambda: ["mse", "mae", "rmse"], compared(predictions, labels), TensorDataset(predictions, labels)
        )
        difference = (predictions - labels).double()
        assert values["mse"] == pytest.approx(difference.square().mean().item(), rel=1e-6)
        assert values["mae"] == pytest.approx(difference.abs().mean().item(), rel=1e-6)
        assert values["rmse"] == pytest.approx(difference.square().mean().sqrt().item(), rel=1e-6)

    def test_a_column_is_compared_with_a_row_value_by_value(self) -> None:
        predictions, labels = torch.randn(10, 1), torch.randn(10)
        values = measured(lambda: ["mse"], compared(predictions, labels), TensorDataset(predictions, labels))
        assert values["mse"] == pytest.approx((predictions[:, 0] - labels).square().mean().item(), rel=1e-6)

    def test_perplexity_is_that_of_the_mean_loss(self) -> None:
        values = measured(lambda: ["perplexity", "accuracy"])
        assert values["perplexity"] == pytest.approx(np.exp(expected(SAMPLES)["eval_loss"]), rel=1e-6)
        assert values["accuracy"] == pytest.approx(expected(SAMPLES)["eval_accuracy"])

    def test_perplexity_may_be_out_of_range(self) -> None:
        bench = Bench(lambda model, batch: EvaluationOutput(torch.tensor(1e6), 1.0))
        assert bench.evaluate({"": bench.set(dataset(1), ["perplexity"])})["eval_perplexity"] == np.inf

    @pytest.mark.parametrize("layout", ["last", "second", "classes", "padded", "tuple"])
    def test_accuracy_knows_where_the_scores_are(self, layout: str) -> None:
        labels = torch.randint(0, CLASSES, (6, 7))
        labels[:, 3] = -100
        tensor = torch.randn(6, 7, CLASSES)
        wanted = (tensor.argmax(2) == labels)[labels != -100].double().mean().item()

        def step(model: Any, batch: Any) -> EvaluationOutput:
            logits, labels = batch
            classes = logits.argmax(2)
            padded = classes.masked_fill(labels == -100, -100)  # as labels are
            shapes = {"second": logits.transpose(1, 2), "classes": classes, "padded": padded, "tuple": (logits, labels)}
            return EvaluationOutput(predictions=shapes.get(layout, logits), labels=labels)

        assert measured(lambda: ["accuracy"], step, TensorDataset(tensor, labels), 1)["accuracy"] == pytest.approx(
            wanted
        )

    def test_accuracy_of_texts(self) -> None:
        def step(model: Any, batch: Any) -> EvaluationOutput:
            texts, numbers = batch
            return EvaluationOutput(predictions=list(texts), labels=[f"text {number % 7}" for number in numbers])

        assert measured(lambda: ["accuracy"], step, Texts(10))["accuracy"] == pytest.approx(0.7)

    @pytest.mark.parametrize(
        ("metric", "predictions", "labels", "message"),
        [
            ("accuracy", torch.randn(4, 1), torch.ones(4, dtype=torch.int64), r"\(4, 1\).*\(4,\)"),
            ("accuracy", torch.randn(4), torch.ones(4, dtype=torch.int64), "a score for each class"),
            ("accuracy", torch.randn(4, 2), None, "a dataset with labels"),
            ("top5_accuracy", torch.randn(4, 3), torch.ones(4, dtype=torch.int64), "at least 5 scores"),
            ("mse", torch.randn(4, 2), torch.randn(4), r"\(4, 2\).*\(4,\)"),
            ("perplexity", torch.randn(4, 2), torch.randn(4), "needs the loss"),
        ],
    )
    def test_unsuitable_predictions_are_refused(
        self, metric: str, predictions: Tensor, labels: Any, message: str
    ) -> None:
        bench = Bench(lambda model, batch: EvaluationOutput(predictions=predictions, labels=labels))
        with pytest.raises(ConfigurationError, match=message):
            bench.evaluate({"": bench.set(dataset(4), [metric])})


class TestFunctions:
    def test_values_are_averaged_by_rows(self) -> None:
        logits, _ = scores(SAMPLES)
        values = measured(
            lambda: {
                "rows": lambda predictions, labels: predictions[:, 0],
                "mean": lambda predictions, labels: predictions[:, 0].mean(),
                "array": lambda predictions, labels: predictions[:, 0].numpy(),
                "number": lambda predictions, labels: float(predictions[:, 0].mean()),
                "flags": lambda predictions, labels: predictions[:, 0] > 0,
                "several": lambda predictions, labels: {"first": predictions[:, 0], "second": predictions[:, 1].mean()},
            }
        )
        first = logits[:, 0].double().mean().item()
        for name in ("rows", "mean", "array", "number", "several_first"):
            assert values[name] == pytest.approx(first, rel=1e-6), name
        assert values["flags"] == pytest.approx((logits[:, 0] > 0).double().mean().item())
        assert values["several_second"] == pytest.approx(logits[:, 1].double().mean().item(), rel=1e-6)

    @pytest.mark.parametrize("value", [torch.ones(2), torch.ones(3, 2), "good", None])
    def test_other_values_are_refused(self, value: Any) -> None:
        bench = Bench()
        with pytest.raises(ConfigurationError, match=r"'odd'|odd returned"):
            bench.evaluate({"": bench.set(dataset(3), {"odd": lambda predictions, labels: value})})

    def test_a_number_that_is_no_mean_over_rows_is_told_once(self, caplog: pytest.LogCaptureFixture) -> None:
        bench = Bench(compared(torch.zeros(0), torch.zeros(0)))
        metrics = {
            "spread": lambda predictions, labels: predictions.std(),
            "mean": lambda predictions, labels: predictions.mean(),
            "rows": lambda predictions, labels: predictions.square(),
        }
        values = torch.tensor([0.0, 1.0, 5.0, 9.0] * 3)
        sets = {"": bench.set(TensorDataset(values, values), metrics)}
        for _ in range(2):
            bench.evaluate(sets)
        (message,) = [record.getMessage() for record in caplog.records]
        assert message.startswith("The metric 'spread' is not a mean over rows: it is 4.113 for a batch of 4 rows, and")
        assert "compute_metrics" in message

    def test_different_names_on_different_ranks_are_an_error(self) -> None:
        def body() -> str:
            bench = Bench()
            odd = {"odd": lambda predictions, labels: {os.environ["RANK"]: 1.0}}
            with pytest.raises(DistributedOperationException) as error:
                bench.evaluate({"": bench.set(dataset(9), odd)})
            return str(error.value)

        assert all("[['0'], ['1']]" in results for results in run_world(body, timeout=60))


class Merged:
    """A count that can be merged and has no reset."""

    def __init__(self) -> None:
        self.rows, self.updates = 0, 0

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        self.rows += len(labels)
        self.updates += 1

    def merge(self, others: Sequence["Merged"]) -> None:
        self.rows += sum(other.rows for other in others)

    def compute(self) -> dict[str, Any]:
        return {"merged": self.rows, "parts": {"twice": 2 * self.rows}}


class Unmerged:
    """A value that depends on the order and cannot be merged."""

    def __init__(self) -> None:
        self.resets = 0
        self.reset()

    def reset(self) -> None:
        self.resets += 1
        self.state = torch.zeros(())

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        for row in predictions:
            self.state = self.state * 0.9 + row[0]

    def compute(self) -> Tensor:
        return self.state


class TestObjects:
    def test_are_merged_if_they_can_be(self) -> None:
        objects: list[Merged] = []

        def make() -> dict[str, Any]:
            objects.append(Merged())
            return {"merged": objects[-1]}

        values = measured(make, processes=3, run=run_forked)
        assert values == {"loss": values["loss"], "merged": SAMPLES, "merged_parts_twice": 2 * SAMPLES}
        assert objects[-1].rows == 0  # without a reset, a copy counts

    def test_have_the_rows_of_all_in_order_if_not(self) -> None:
        state = 0.0
        for score in scores(SAMPLES)[0][:, 0].tolist():
            state = state * 0.9 + score
        assert measured(lambda: {"folded": Unmerged()}, processes=3)["folded"] == pytest.approx(state, rel=1e-5)

    def test_that_cannot_be_sent_have_the_rows_of_all(self) -> None:
        class Local(Merged):
            def merge(self, others: Sequence[Merged]) -> None:
                raise AssertionError

        assert measured(lambda: {"merged": Local()})["merged"] == SAMPLES

    def test_may_see_texts(self) -> None:
        class Longest:
            def __init__(self) -> None:
                self.texts: list[str] = []

            def update(self, texts: list[str], numbers: Tensor) -> None:
                self.texts += texts

            def compute(self) -> float:
                assert self.texts == [f"TEXT {index}" for index in range(10)]
                return float(len(self.texts))

        assert measured(lambda: {"texts": Longest()}, read, Texts(10))["texts"] == 10

    def test_are_not_kept_waiting_for_a_set_larger_than_memory(self) -> None:
        from trainer_lib.trainer.evaluation import gather_batches

        class Counts(Unmerged):
            def update(self, predictions: Tensor, labels: Tensor) -> None:
                self.state = self.state + len(labels)

        def body() -> float:
            before, gather_batches._BYTES = gather_batches._BYTES, 100  # less than a batch
            try:
                bench = Bench()
                return bench.evaluate({"": bench.set(dataset(SAMPLES), {"rows": Counts()}, batch_size=2)})["eval_rows"]
            finally:
                gather_batches._BYTES = before

        assert run_world(body, num_processes=3, timeout=60) == [SAMPLES] * 3

    def test_values_that_are_not_numbers_are_refused(self) -> None:
        class Matrix(Merged):
            def compute(self) -> Any:
                return {"matrix": torch.ones(2, 2)}

        bench = Bench()
        with pytest.raises(ConfigurationError, match=r"'confusion_matrix' returned a Tensor of shape \(2, 2\)"):
            bench.evaluate({"": bench.set(dataset(3), {"confusion": Matrix()})})


class MeanOfValid(torch.nn.Module):
    """A custom loss with an `ignore_index`."""

    ignore_index = 255

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets, ignore_index=255)


@pytest.mark.parametrize(
    "loss_fn",
    [torch.nn.CrossEntropyLoss(ignore_index=255), partial(cross_entropy, ignore_index=255), MeanOfValid()],
    ids=["module", "partial", "custom"],
)
def test_metrics_leave_out_the_labels_that_the_loss_ignores(loss_fn: Any) -> None:
    inputs = torch.randn(11, 6, 4, generator=torch.Generator().manual_seed(0))  # rows of 4 "pixels"
    labels = inputs[:, :3].argmax(dim=1)
    labels[::2, 1:] = 255

    def model() -> torch.nn.Module:
        torch.manual_seed(1)
        return torch.nn.Conv1d(6, 3, 1)

    def body() -> tuple[dict[str, float], float, float]:
        args = arguments(
            max_steps=1, per_device_train_batch_size=6, per_device_eval_batch_size=3, learning_rate=0.0, shuffle=False
        )
        made = Trainer(
            model(),
            args,
            train_dataset=(inputs, labels),
            eval_dataset=(inputs, labels),
            loss_fn=loss_fn,
            metrics=["accuracy", "f1_macro"],
            train_metrics=["accuracy"],
        )
        fitted = made.fit()
        return made.evaluate(), fitted.history[0]["accuracy"], fitted.history[0]["loss"]

    outputs, valid = model()(inputs), labels != 255
    right = (outputs.argmax(dim=1) == labels)[valid].float().mean().item()
    loss = cross_entropy(outputs, labels, ignore_index=255).item()
    for values, trained, train_loss in run_world(body, num_processes=2, timeout=60):
        assert values["eval_accuracy"] == pytest.approx(right)
        assert values["eval_loss"] == pytest.approx(loss)
        assert (trained, train_loss) == (pytest.approx(right), pytest.approx(loss))
        classes = outputs.argmax(dim=1)[valid].numpy()
        assert values["eval_f1_macro"] == pytest.approx(f1_score(labels[valid].numpy(), classes, average="macro"))


def test_no_class_in_bytes_is_taken_for_the_ignored_label() -> None:
    """As a byte, -100 is 156."""
    labels = torch.tensor([[156, 156, 3], [156, 3, 156]], dtype=torch.uint8)
    classes = torch.tensor([[156, 3, 3], [156, 3, 3]])
    chances = torch.nn.functional.one_hot(classes, 160).float()
    for name in ("accuracy", "f1_macro", "auroc"):
        values: list[Any] = []
        for kept in (labels, labels.long()):
            metric = as_metric(name, name)
            metric.begin(torch.device("cpu"))
            metric.update(EvaluationOutput(predictions=chances, labels=kept))
            values.append(metric.result([metric.state()]))
        np.testing.assert_equal(values[0], values[1], err_msg=name)


def test_a_step_says_which_label_metrics_leave_out() -> None:
    predictions, labels = scores(SAMPLES)
    data = TensorDataset(predictions, labels.where(labels != -100, 255))
    kinds = ["accuracy", "top2_accuracy", "f1_macro", "auroc"]

    def step(model: Any, batch: Any) -> EvaluationOutput:
        return EvaluationOutput(predictions=batch[0], labels=batch[1], ignored_label=255)

    assert measured(lambda: kinds, step, data) == measured(
        lambda: kinds, compared(predictions, labels), TensorDataset(predictions, labels)
    )


class TestTorchMetrics:
    def test_are_exact(self) -> None:
        torchmetrics = pytest.importorskip("torchmetrics")
        classes: dict[str, Any] = {"task": "multiclass", "num_classes": CLASSES, "ignore_index": -100}

        def make() -> dict[str, Any]:
            return {
                "summed": torchmetrics.Accuracy(**classes),
                "lists": torchmetrics.AUROC(**classes),
                "whole": torchmetrics.PearsonCorrCoef(num_outputs=1),  # merges in a way of its own
                "wrapped": torchmetrics.wrappers.ClasswiseWrapper(torchmetrics.F1Score(average=None, **classes)),
                "together": torchmetrics.MetricCollection(
                    {"f1": torchmetrics.F1Score(**classes), "recall": torchmetrics.Recall(**classes)}
                ),
            }

        def step(model: Any, batch: Any) -> EvaluationOutput:
            return classify(model, batch)

        class OfFirst(torchmetrics.PearsonCorrCoef):
            def update(self, preds: Tensor, target: Tensor) -> None:
                super().update(preds[:, 0], preds[:, 1])

        def made() -> dict[str, Any]:
            return {**make(), "whole": OfFirst()}

        values = measured(made, step, processes=3, run=run_forked)
        logits, labels = scores(SAMPLES)
        at_once = make()
        at_once["whole"].update(logits[:, 0], logits[:, 1])
        for name in ("summed", "lists", "whole"):
            if name != "whole":
                at_once[name].update(logits, labels)
            assert values[name] == pytest.approx(at_once[name].compute().item(), rel=1e-5), name
        assert {"f1", "recall", *(f"wrapped_multiclassf1score_{n}" for n in range(CLASSES))} <= set(values)

    def test_parts_with_several_values_are_left_out(self, caplog: pytest.LogCaptureFixture) -> None:
        """As the list of classes of `MeanAveragePrecision`."""
        torchmetrics = pytest.importorskip("torchmetrics")

        class Detection(torchmetrics.classification.MulticlassAccuracy):
            def compute(self) -> dict[str, Tensor]:
                return {"map": super().compute(), "classes": torch.arange(CLASSES), "none": torch.empty(0)}

        values = measured(lambda: {"found": Detection(CLASSES, average="micro", ignore_index=-100)}, run=run_forked)
        assert set(values) == {"loss", "found_map"}
        assert "'found' returned 'classes', 'none' with several values, or none" in caplog.text

    @pytest.mark.slow
    def test_own_ones_are_merged_only_where_that_is_exact(self) -> None:
        torchmetrics = pytest.importorskip("torchmetrics")

        class Rows(torchmetrics.Metric):
            """Counts rows."""

            full_state_update = False

            def __init__(self) -> None:
                super().__init__()
                self.add_state("rows", torch.tensor(0.0), dist_reduce_fx="sum")

            def update(self, predictions: Tensor, labels: Tensor) -> None:
                self.rows = self.rows + len(predictions)

            def compute(self) -> Tensor:
                return self.rows

        class Unsaid(Rows):
            full_state_update = None

        class Averaged(Rows):
            def __init__(self) -> None:
                super().__init__()
                self.add_state("largest", torch.tensor(0.0), dist_reduce_fx="mean")

            def update(self, predictions: Tensor, labels: Tensor) -> None:
                super().update(predictions, labels)
                self.largest = torch.maximum(self.largest, predictions.max())

            def compute(self) -> Tensor:
                return self.largest

        class Parent(Rows):
            def __init__(self) -> None:
                super().__init__()
                self.child = Rows()

            def reset(self) -> None:
                super().reset()
                self.child.reset()

            def update(self, predictions: Tensor, labels: Tensor) -> None:
                self.child.update(predictions, labels)

            def compute(self) -> Tensor:
                return self.child.compute()

        def make() -> dict[str, Any]:
            return {"rows": Rows(), "unsaid": Unsaid(), "averaged": Averaged(), "parent": Parent()}

        handed_round = {name: metric.needs_all_rows for name, metric in as_metrics(make()).items()}
        assert handed_round == {"rows": False, "unsaid": True, "averaged": True, "parent": True}
        values = measured(make, processes=3, run=run_forked)
        assert [values[name] for name in ("rows", "unsaid", "parent")] == [SAMPLES] * 3
        assert values["averaged"] == scores(SAMPLES)[0].max()

    def test_processes_without_a_batch_have_nothing_to_merge(self) -> None:
        torchmetrics = pytest.importorskip("torchmetrics")

        def body() -> float:
            bench = Bench()
            metric = torchmetrics.AUROC(task="multiclass", num_classes=CLASSES, ignore_index=-100)
            return bench.evaluate({"": bench.set(dataset(24), {"auroc": metric}, batch_size=24)})["eval_auroc"]

        metric = torchmetrics.AUROC(task="multiclass", num_classes=CLASSES, ignore_index=-100)
        metric.update(*scores(24))
        assert run_forked(body, timeout=60) == pytest.approx([metric.compute().item()] * 2)

    def test_torcheval_is_merged(self) -> None:
        torcheval = pytest.importorskip("torcheval.metrics")

        def step(model: Any, batch: Any) -> EvaluationOutput:
            return EvaluationOutput(predictions=batch[0], labels=batch[1].clamp(min=0))

        logits, labels = scores(SAMPLES)
        values = measured(lambda: {"accuracy": torcheval.MulticlassAccuracy()}, step, run=run_forked)
        assert values["accuracy"] == pytest.approx((logits.argmax(1) == labels.clamp(min=0)).double().mean().item())


MODULE = """
import datasets
import evaluate


class Matches(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description="", citation="", inputs_description="",
            features=datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}),
        )

    def _compute(self, predictions, references):
        matches = [int(one == other) for one, other in zip(predictions, references)]
        return {"matches": sum(matches) / len(matches), "last": predictions[-1]}
"""


def test_outputs_that_compute_loss_does_not_return_are_missed() -> None:
    output = EvaluationOutput(torch.ones(()), 2, None, torch.tensor([0, 1]))
    with pytest.raises(ConfigurationError, match=r"'accuracy' needs predictions.* Return both: \(loss, outputs\)"):
        as_metric("accuracy", "accuracy").update(output)


class TestEvaluate:
    @pytest.fixture
    def module(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
        """Return what loads a metric from a file."""
        evaluate = pytest.importorskip("evaluate")
        path = tmp_path / "matches.py"
        path.write_text(MODULE)
        return lambda: evaluate.load(str(path), cache_dir=str(tmp_path / os.environ.get("RANK", "alone")))

    def test_modules_see_classes_of_all(self, module: Callable[[], Any]) -> None:
        logits, labels = scores(SAMPLES)
        values = measured(lambda: {"matches": module()}, run=run_forked)
        assert values["matches"] == pytest.approx((logits.argmax(1) == labels).double().mean().item())
        assert values["matches_last"] == logits[-1].argmax()

    @pytest.mark.slow
    def test_several_are_combined(self, module: Callable[[], Any]) -> None:
        evaluate = pytest.importorskip("evaluate")
        values = measured(lambda: {"both": evaluate.combine({"one": module(), "other": module()})}, run=run_forked)
        assert {"both_one_matches", "both_other_last"} <= set(values)

    def test_errors_are_raised_on_all_ranks(self, module: Callable[[], Any]) -> None:
        def body() -> None:
            def step(model: Any, batch: Any) -> EvaluationOutput:
                return EvaluationOutput(predictions=["a text"] * len(batch[1]), labels=batch[1])

            bench = Bench(step)
            bench.evaluate({"": bench.set(dataset(9), {"matches": module()})})

        with pytest.raises(ProcessFailedError) as error:
            run_forked(body, timeout=60)
        assert "ValueError" in str(error.value) or "matches failed on the main process" in str(error.value)

    def test_only_the_main_process_has_rows(self) -> None:
        class Module:
            def __init__(self) -> None:
                self.rows = 0

            def add_batch(self, predictions: Any, references: Any) -> None:
                assert os.environ["RANK"] == "0"
                self.rows += len(predictions)

            def compute(self) -> dict[str, float]:
                return {"rows": self.rows}

        def body() -> float:
            bench = Bench()
            return bench.evaluate({"": bench.set(dataset(SAMPLES), {"rows": Module()})})["eval_rows"]

        assert run_world(body, timeout=60) == [SAMPLES] * 2

    def test_num_process_of_evaluate_is_refused(self) -> None:
        class Loaded:
            num_process = 2

            def add_batch(self) -> None: ...

            def compute(self) -> None: ...

        with pytest.raises(ConfigurationError, match="num_process=2"):
            as_metric(Loaded(), "matches")


class TestGiven:
    def test_names_come_from_what_is_given(self) -> None:
        def own_score(predictions: Tensor, labels: Tensor) -> Tensor:
            return predictions

        assert list(as_metrics(["accuracy", own_score, Merged()])) == ["accuracy", "own_score", "merged"]
        assert list(as_metrics("accuracy")) == ["accuracy"]
        assert list(as_metrics(own_score)) == ["own_score"]
        assert as_metrics(None) == {}
        ready = as_metric("accuracy", "hits")
        assert list(as_metrics([ready])) == ["hits"]
        assert as_metrics({"other": ready})["other"].name == "other"
        assert ready.name == "hits"

    @pytest.mark.parametrize(
        ("thing", "message"),
        [
            ("acuracy", "Did you mean 'accuracy'"),
            (Merged, "class Merged. Give an object"),
            (3, "is a int"),
            (type("Late", (), {"compute": lambda self: 1.0})(), "compute_metrics"),
        ],
    )
    def test_values_that_are_not_metrics_are_refused(self, thing: Any, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            as_metric(thing, "odd")

    def test_names_that_are_taken_or_empty_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="'loss'"):
            as_metrics({"loss": "accuracy"})
        with pytest.raises(ConfigurationError, match=r"a text that is not empty \(got ''\)"):
            as_metrics({"": "accuracy"})
        with pytest.raises(ConfigurationError, match="Two metrics have the name 'accuracy'"):
            as_metrics(["accuracy", "accuracy"])


class TestComputeMetrics:
    def test_gets_all_in_order_on_the_main_process_and_tells_the_others(self) -> None:
        logits, labels = scores(SAMPLES)

        def compute(prediction: Any) -> dict[str, Any]:
            assert os.environ["RANK"] == "0"
            predictions, label_ids = prediction
            assert prediction.inputs is None
            assert prediction[0] is prediction.predictions
            assert prediction.labels is prediction.label_ids is label_ids
            np.testing.assert_array_equal(predictions, logits)
            np.testing.assert_array_equal(label_ids, labels)
            return {"sum": predictions.sum(), "eval_plain": 1.0, "parts": {"n": len(labels)}}

        def two(predictions: Any, labels: Any) -> dict[str, float]:
            return {"rows": len(predictions) + len(labels)}

        def body() -> dict[str, float]:
            bench = Bench()
            sets = {
                "": bench.set(dataset(SAMPLES), batch_size=3, compute_metrics=compute),
                "two": bench.set(dataset(SAMPLES), compute_metrics=two),
            }
            return bench.evaluate(sets)

        for values in run_world(body, num_processes=3, timeout=60):
            names = ["eval_loss", "eval_sum", "eval_plain", "eval_parts_n", "eval_two_loss", "eval_two_rows"]
            assert list(values) == names
            assert values["eval_sum"] == pytest.approx(float(logits.sum()), rel=1e-5)
            assert (values["eval_parts_n"], values["eval_two_rows"]) == (SAMPLES, 2 * SAMPLES)

    def test_rows_of_other_sizes_are_padded(self) -> None:
        seen: list[Any] = []

        def step(model: Any, batch: Any) -> EvaluationOutput:
            size = int(batch[1][0]) % 3 + 1
            flags = torch.ones(len(batch[1]), size, dtype=torch.bool)
            return EvaluationOutput(
                predictions=(batch[0][:, :size], {"flags": flags, "none": None}), labels=batch[1].bfloat16()
            )

        def compute(prediction: Any) -> dict[str, float]:
            seen.append(prediction)
            return {}

        data = TensorDataset(torch.ones(7, 5), torch.arange(7))
        bench = Bench(step)
        bench.evaluate({"": bench.set(data, batch_size=2, compute_metrics=compute)})
        (padded, structure), labels = seen[0]
        ones = np.where(np.arange(3) < np.array([1, 1, 3, 3, 2, 2, 1])[:, None], 1, -100)
        np.testing.assert_array_equal(padded, ones)
        np.testing.assert_array_equal(structure["flags"], ones)
        assert structure["flags"].dtype == np.int64
        assert structure["none"] is None
        np.testing.assert_array_equal(labels, np.arange(7.0))

    def test_other_results_are_refused_on_all_processes(self) -> None:
        def body() -> str:
            bench = Bench()
            with pytest.raises((ConfigurationError, DistributedOperationException)) as error:
                bench.evaluate({"": bench.set(dataset(9), compute_metrics=lambda prediction: 0.5)})
            return str(error.value)

        main, other = run_world(body, timeout=60)
        assert main.startswith("compute_metrics returned a float. Return numbers by name")
        assert other.startswith("compute_metrics failed on rank 0: compute_metrics returned a float. Ret")

    def test_structures_that_change_are_refused(self) -> None:
        def step(model: Any, batch: Any) -> EvaluationOutput:
            rows = batch[0]
            return EvaluationOutput(predictions=rows if len(rows) > 2 else {"rows": rows})

        bench = Bench(step)
        with pytest.raises(ConfigurationError, match=r"\['rows'\].*earlier one were it"):
            bench.evaluate({"": bench.set(dataset(6), compute_metrics=lambda prediction: {})})


def _of_scikit_learn(predictions: Tensor, labels: Tensor) -> dict[str, float]:
    from sklearn import metrics as sk

    counted = labels != -100
    chosen, actual = predictions.argmax(-1)[counted].numpy(), labels[counted].numpy()
    values: dict[str, float] = {}
    for name, function in (("f1", sk.f1_score), ("precision", sk.precision_score), ("recall", sk.recall_score)):
        for average in ("macro", "micro", "weighted"):
            values[f"{name}_{average}"] = function(actual, chosen, average=average, zero_division=cast("Any", 0))
    return values


class TestClassification:
    @pytest.mark.parametrize("classes", [3, 9])
    def test_averages_are_those_of_scikit_learn(self, classes: int) -> None:
        predictions, labels = torch.randn(23, classes), torch.randint(0, min(classes, 6), (23,))
        labels[2::5] = -100
        expected = _of_scikit_learn(predictions, labels)
        values = measured(lambda: [*expected, "f1"], compared(predictions, labels), TensorDataset(predictions, labels))
        assert values == pytest.approx({**expected, "f1": expected["f1_macro"]}, rel=1e-12)

    def test_of_two_classes_it_is_that_of_class_1(self) -> None:
        from sklearn import metrics as sk

        predictions, labels = torch.randn(23, 2), torch.randint(0, 2, (23,))
        values = measured(
            lambda: ["f1", "precision", "recall", "auroc"],
            compared(predictions, labels),
            TensorDataset(predictions, labels),
        )
        chosen = predictions.argmax(-1)
        assert values["f1"] == pytest.approx(sk.f1_score(labels, chosen), rel=1e-12)
        assert values["precision"] == pytest.approx(sk.precision_score(labels, chosen), rel=1e-12)
        assert values["recall"] == pytest.approx(sk.recall_score(labels, chosen), rel=1e-12)
        assert values["auroc"] == pytest.approx(sk.roc_auc_score(labels, predictions.softmax(-1)[:, 1]), rel=1e-12)

    def test_the_area_counts_ties_by_half_and_classes_alike(self) -> None:
        from sklearn import metrics as sk

        scores_of_one, sides = torch.randint(0, 4, (23,)).float(), torch.randint(0, 2, (23,))
        values = measured(lambda: ["auroc"], compared(scores_of_one, sides), TensorDataset(scores_of_one, sides))
        assert values["auroc"] == pytest.approx(sk.roc_auc_score(sides, scores_of_one), rel=1e-12)
        predictions, labels = torch.randn(23, 3), torch.arange(23) % 3
        values = measured(lambda: ["auroc"], compared(predictions, labels), TensorDataset(predictions, labels))
        shares = predictions.double().softmax(-1).numpy()
        assert values["auroc"] == pytest.approx(sk.roc_auc_score(labels, shares, multi_class="ovr"), rel=1e-12)

    @pytest.mark.parametrize("dim", [1, -1])
    def test_two_classes_of_tokens_are_two(self, dim: int) -> None:
        torch.manual_seed(0)
        scores, labels = torch.randn(4, 5, 2), torch.randint(0, 2, (4, 5))
        metric = as_metric("f1", "f1")
        metric.begin(torch.device("cpu"))
        metric.update(EvaluationOutput(predictions=scores.movedim(-1, dim), labels=labels))
        expected = f1_score(labels.flatten(), scores.argmax(-1).flatten())
        assert metric.result([metric.state()]) == pytest.approx(expected, rel=1e-12)

    def test_labels_that_cannot_be_counted_are_refused(self) -> None:
        metric = as_metric("f1", "f1")
        metric.begin(torch.device("cpu"))
        with pytest.raises(ConfigurationError, match=r"needs a score for each class.*threshold, 0 for logits or 0.5"):
            metric.update(EvaluationOutput(predictions=torch.randn(4), labels=torch.randint(0, 2, (4,))))
        with pytest.raises(ConfigurationError, match=r"needs labels of at least 0 \(got -1\)"):
            metric.update(EvaluationOutput(predictions=torch.randn(4, 2), labels=torch.tensor([-1, 0, 1, 1])))
        area = as_metric("auroc", "auroc")
        area.begin(torch.device("cpu"))
        with pytest.raises(ConfigurationError, match="or one score per label"):
            area.update(EvaluationOutput(predictions=torch.randint(0, 2, (4,)), labels=torch.randint(0, 2, (4,))))
