"""A metric for Hugging Face's evaluate: the F1 score of each class, averaged over the classes."""

from typing import Any

import datasets
import evaluate
import numpy as np


class MacroF1(evaluate.Metric):
    """Counts each class alike, however rare."""

    def _info(self) -> Any:
        return evaluate.MetricInfo(
            description=str(__doc__),
            citation="",
            features=datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}),
        )

    def _compute(self, *, predictions: Any = None, references: Any = None, **options: Any) -> dict[str, float]:
        guesses, truths = np.asarray(predictions), np.asarray(references)
        scores = [
            2 * np.sum((guesses == label) & (truths == label)) / (np.sum(guesses == label) + np.sum(truths == label))
            for label in np.union1d(guesses, truths)
        ]
        return {"macro_f1": float(np.mean(scores))}
