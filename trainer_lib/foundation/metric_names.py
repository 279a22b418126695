"""This file is the names of metrics: whether more of one is better, and which one is meant."""

import re
from collections.abc import Collection, Mapping

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, did_you_mean

_MORE_IS_BETTER = """
    accuracy acc f1 fbeta precision recall sensitivity specificity auc auroc auprc ap map mrr ndcg hits exact_match em
    bleu sacrebleu google_bleu rouge rougel rougelsum meteor chrf bertscore mcc matthews_correlation pearson pearsonr
    spearman spearmanr kendall r2 r_squared explained_variance kappa iou jaccard dice psnr ssim reward rewards
    log_likelihood pass_rate win_rate
"""
_LESS_IS_BETTER = """
    loss perplexity ppl error error_rate err mse rmse mae mape msle rmsle wer cer ter mer nll negative_log_likelihood
    cross_entropy log_loss hinge brier brier_score ece bits_per_byte bits_per_token bpb bpc fid kl kl_divergence
    hamming_distance
"""
_KNOWN = {
    **dict.fromkeys(_MORE_IS_BETTER.split(), True),
    **dict.fromkeys(_LESS_IS_BETTER.split(), False),
}
# What comes after a metric's name and does not turn it round: `f1_macro`, `recall@10`, `accuracy_top5`.
_QUALIFIER = re.compile(r"macro|micro|weighted|samples|mean|avg|average|overall|score|at|top|top\d+|\d+")


def greater_is_better_for(metric: str, given: bool | None = None) -> bool:
    """Return whether more of a metric is better: as was given, else as its name tells.

    Args:
        metric: Its name, such as `eval_loss`, `eval_test_accuracy` or `f1_macro`.
        given: What the user said; `None` goes by the name.

    Raises:
        ConfigurationError: If nothing was given and the name is not a well-known one.

    Example:
        >>> greater_is_better_for("eval_loss"), greater_is_better_for("eval_news_f1_macro")
        (False, True)
    """
    if given is not None:
        if not isinstance(given, bool):
            raise ConfigurationError(
                f"greater_is_better={shown(given)} must be True, False, or None to go by the name."
            )
        return given
    words = re.findall(r"[a-z0-9]+", metric.lower())
    while words:
        # The longest known ending counts: `negative_log_likelihood` ends with a metric of which more is better.
        for start in range(len(words)):
            name = "_".join(words[start:])
            known = _KNOWN.get(name, _KNOWN.get(name.rstrip("0123456789")))
            if known is not None:
                return known
        if not _QUALIFIER.fullmatch(words.pop()):
            break
    raise ConfigurationError(
        f"Whether more of the metric {metric!r} is better cannot be told from its name. "
        "Say greater_is_better=True or greater_is_better=False."
    )


def sets_of_metric(metric: str, sets: Collection[str]) -> list[str]:
    """Return the evaluation sets that a metric is computed on: one, all for a mean, none if its name has no set.

    Args:
        metric: Its name, also without the "eval_" that it begins with.
        sets: The names of all sets.

    Example:
        >>> sets_of_metric("eval_dev_hard_loss", ["dev", "dev_hard"]), sets_of_metric("mean_loss", ["dev", "test"])
        (['dev_hard'], ['dev', 'test'])
    """
    name = metric.removeprefix("eval_")
    owners = [one for one in sets if one and name.startswith(f"{one}_")]
    if owners:
        return [max(owners, key=len)]
    return list(sets) if name.startswith("mean_") else []


def read_metric(metric: str, metrics: Mapping[str, float], told_by: str) -> float:
    """Return the value of a metric.

    Args:
        metric: Its name, also without the "eval_" that it begins with.
        metrics: Those of an evaluation.
        told_by: Who names it, for the error.

    Raises:
        ConfigurationError: If it is not among them.
    """
    metric = metric if metric in metrics or f"eval_{metric}" not in metrics else f"eval_{metric}"
    if metric not in metrics:
        known = ", ".join(sorted(metrics)) or "none"
        raise ConfigurationError(
            f"{told_by} goes by the metric {metric!r}, which the evaluation does not have. "
            f"It has: {known}.{did_you_mean(metric, metrics)}"
        )
    return float(metrics[metric])
