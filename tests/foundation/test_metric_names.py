"""Tests of metric names: their direction, their evaluation set and their value."""

import pytest

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.metric_names import greater_is_better_for, read_metric


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("loss", False),
        ("eval_loss", False),
        ("eval_accuracy_test_loss", False),  # a set called accuracy_test
        ("eval_loss_accuracy", True),
        ("eval_f1", True),
        ("eval_f1_macro", True),
        ("f1-score", True),
        ("eval/recall@10", True),
        ("eval_top5_accuracy", True),
        ("accuracy_top_5", True),
        ("eval_rouge1", True),
        ("eval_rougeLsum", True),
        ("map50", True),
        ("roc_auc", True),
        ("log_likelihood", True),
        ("negative_log_likelihood", False),
        ("word_error_rate", False),
        ("mean_absolute_error", False),
        ("Perplexity", False),
    ],
)
def test_well_known_names_tell_what_is_better(metric: str, expected: bool) -> None:
    assert greater_is_better_for(metric) is expected


def test_what_was_given_counts_more_than_the_name() -> None:
    assert greater_is_better_for("eval_loss", True) is True
    assert greater_is_better_for("eval_accuracy", False) is False


@pytest.mark.parametrize("metric", ["eval_harmony", "eval_loss_ratio", "macro", "lossy", "", "2"])
def test_other_names_are_asked_for(metric: str) -> None:
    with pytest.raises(ConfigurationError, match="Give greater_is_better=True or greater_is_better=False"):
        greater_is_better_for(metric)


def test_what_is_no_answer_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"greater_is_better='max' must be True, False, or None"):
        greater_is_better_for("eval_loss", "max")  # type: ignore[arg-type]


def test_a_metric_that_is_not_there_names_those_that_are() -> None:
    metrics = {"eval_loss": 0.5, "eval_accuracy": 0.25}
    assert read_metric("eval_accuracy", metrics, "EarlyStopping") == 0.25
    with pytest.raises(ConfigurationError, match=r"EarlyStopping uses .* 'acuracy'.*It has: eval_accuracy, eval_loss"):
        read_metric("acuracy", metrics, "EarlyStopping")
    assert read_metric("accuracy", metrics, "EarlyStopping") == 0.25
    with pytest.raises(ConfigurationError, match=r"Did you mean 'eval_accuracy'\?"):
        read_metric("eval_accuracyy", metrics, "EarlyStopping")
    with pytest.raises(ConfigurationError, match=r"It has: none\.$"):
        read_metric("eval_loss", {}, "EarlyStopping")
