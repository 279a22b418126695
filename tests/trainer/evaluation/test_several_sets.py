"""Tests of the mean of a metric over several evaluation sets."""

import pytest

from tests.trainer.tasks import arguments, points, trainer
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
