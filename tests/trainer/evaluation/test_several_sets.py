"""Tests of the mean of a metric over several evaluation sets."""

from typing import Any

import pytest
from torch.nn.functional import cross_entropy

from tests.trainer.tasks import arguments, network, points, trainer
from trainer_lib import LossResult, Trainer
from trainer_lib.foundation.errors import ConfigurationError

SETS = {"dev": points(8), "test": points(24)}


@pytest.mark.parametrize("metric", ["mean_accuracy", "eval_mean_accuracy"])
def test_the_best_is_that_by_the_mean_over_the_sets(metric: str) -> None:
    args = arguments(eval_every=2, metric_for_best=metric)
    result = trainer(args, eval_dataset=SETS, metrics=["accuracy"]).fit()
    means = {}
    for entry in result.history:
        if "eval_mean_accuracy" in entry:
            of_sets = entry["eval_dev_accuracy"], entry["eval_test_accuracy"]
            assert entry["eval_mean_accuracy"] == pytest.approx(sum(of_sets) / 2, rel=1e-12)
            means[entry["step"]] = entry["eval_mean_accuracy"]
    assert list(means) == [2, 4, 6, 8, 10]
    assert result.state.best is not None
    assert result.state.best.metric == "eval_mean_accuracy"
    assert result.state.best.value == max(means.values())


class Logs(Trainer):
    """Logs the share of the first class."""

    def compute_loss(self, model: Any, batch: Any) -> Any:
        self.log("score", (batch[1] == 0).double().mean())
        return LossResult(cross_entropy(model(batch[0]), batch[1], reduction="sum"), weight=len(batch[1]))


@pytest.mark.parametrize("kind", ["logged", "computed"])
def test_the_best_may_be_by_the_mean_of_a_metric_whose_name_is_known_only_later(kind: str) -> None:
    args = arguments(eval_every=5, metric_for_best="mean_score", greater_is_better=True)
    data: dict[str, Any] = {"train_dataset": points(), "eval_dataset": SETS}
    if kind == "logged":
        result = Logs(network(), args, **data).fit()
    else:
        share = {"compute_metrics": lambda made: {"score": float((made.label_ids == 0).mean())}}
        result = trainer(args, **data, **share).fit()
    shares = [float((targets == 0).double().mean()) for _, targets in SETS.values()]
    assert result.state.best is not None
    assert result.state.best.metric == "eval_mean_score"
    assert result.state.best.value == pytest.approx(sum(shares) / 2, rel=1e-12)


def test_nothing_is_added_unless_it_is_asked_for() -> None:
    assert set(trainer(eval_dataset=SETS).evaluate()) == {"eval_dev_loss", "eval_test_loss"}
    args = arguments(metric_for_best="mean_loss")
    assert set(trainer(args, eval_dataset=SETS).evaluate()) == {"eval_dev_loss", "eval_test_loss", "eval_mean_loss"}


def test_a_mean_of_what_is_not_measured_is_refused() -> None:
    args = arguments(metric_for_best="mean_f1")
    with pytest.raises(ConfigurationError, match=r"is not a metric of the evaluations.*eval_mean_loss"):
        trainer(args, eval_dataset=SETS).fit()
    with pytest.raises(ConfigurationError, match=r"is not a metric of the evaluations.*write on_log\(run, values\)"):
        trainer(arguments(metric_for_best="mean_loss"), eval_dataset=points(8)).fit()
