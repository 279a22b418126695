"""The names of metrics: whether higher is better, and which evaluation set and value a name refers to."""

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
# Suffixes of a metric's name that do not change its direction: `f1_macro`, `recall@10`, `accuracy_top5`.
_QUALIFIER = r"macro|micro|weighted|samples|mean|avg|average|overall|score|at|top|top\d+|\d+"


def greater_is_better_for(metric: str, given: bool | None = None) -> bool:
    """Return whether a higher value of a metric is better: as given, or inferred from its name.

    Args:
        metric: Its name, such as `eval_loss`, `eval_test_accuracy` or `f1_macro`.
        given: The value of the option; `None` infers it from the name.

    Raises:
        ConfigurationError: If nothing was given and the name is not a common metric.

    Example:
        >>> greater_is_better_for("eval_loss"), greater_is_better_for("eval_news_f1_macro")
        (False, True)
    """
    if given is not None:
        if not isinstance(given, bool):
            raise ConfigurationError(
                f"greater_is_better={shown(given)} must be True, False, or None to infer it from the name."
            )
        return given
    words = re.findall(r"[a-z0-9]+", metric.lower())
    while words:
        # The longest known ending counts: `negative_log_likelihood` ends with `log_likelihood`, where higher is better.
        for start in range(len(words)):
            name = "_".join(words[start:])
            known = _KNOWN.get(name, _KNOWN.get(name.rstrip("0123456789")))
            if known is not None:
                return known
        if not re.fullmatch(_QUALIFIER, words.pop()):
            break
    raise ConfigurationError(
        f"Whether higher is better cannot be inferred from the name of the metric {metric!r}."
        f"{did_you_mean(metric.removeprefix('eval_'), _KNOWN)} "
        "Give greater_is_better=True or greater_is_better=False."
    )


def sets_of_metric(metric: str, sets: Collection[str]) -> list[str]:
    """Return the evaluation sets that a metric is computed on: one, all for a mean, or none if its name has no set.

    Args:
        metric: Its name, with or without "eval_".
        sets: The names of all evaluation sets.

    Example:
        >>> sets_of_metric("eval_dev_hard_loss", ["dev", "dev_hard"]), sets_of_metric("mean_loss", ["dev", "test"])
        (['dev_hard'], ['dev', 'test'])
    """
    name = metric.removeprefix("eval_")
    prefixes = [eval_set for eval_set in sets if eval_set and name.startswith(f"{eval_set}_")]
    if prefixes:
        return [max(prefixes, key=len)]
    return list(sets) if name.startswith("mean_") else []


def read_metric(metric: str, metrics: Mapping[str, float], user: str) -> float:
    """Return the value of a metric.

    Args:
        metric: Its name, with or without "eval_".
        metrics: The metrics of an evaluation.
        user: The callback or option that uses the metric, for the error.

    Raises:
        ConfigurationError: If the evaluation does not have the metric.
    """
    metric = metric if metric in metrics or f"eval_{metric}" not in metrics else f"eval_{metric}"
    if metric not in metrics:
        known = ", ".join(sorted(metrics)) or "none"
        raise ConfigurationError(
            f"{user} uses the metric {metric!r}, which the evaluation does not have. "
            f"It has: {known}.{did_you_mean(metric, metrics)}"
        )
    return float(metrics[metric])
