"""Evaluations with given scores, for tests in which every number is known."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from trainer_lib import Accelerator
from trainer_lib.events import Callback, Dispatcher, Run
from trainer_lib.trainer.evaluation.eval_loop import EvaluationSet, Evaluator
from trainer_lib.trainer.evaluation.outputs import EvaluationOutput
from trainer_lib.trainer.evaluation.prediction_results import Predictions
from trainer_lib.trainer.metrics.metric_spec import as_metrics

CLASSES = 5


def scores(samples: int) -> tuple[Tensor, Tensor]:
    """Return scores, and labels of which some do not count."""
    generator = torch.Generator().manual_seed(samples)
    tensor = torch.randn(samples, CLASSES, generator=generator)
    labels = torch.randint(0, CLASSES, (samples,), generator=generator)
    labels[1::4] = -100
    return tensor, labels


def dataset(samples: int) -> TensorDataset:
    """Return them as a dataset."""
    return TensorDataset(*scores(samples))


class Streamed(IterableDataset[Any]):
    """Samples one after the other, without a length."""

    def __init__(self, samples: Dataset[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[index] for index in range(len(self.samples)))  # type: ignore[arg-type]


class Texts(Dataset[Any]):
    """Texts with the number in them."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[str, int]:
        return f"text {index}", index


class Given(nn.Module):
    """Hands scores on, and has a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, inputs: Any) -> Any:
        return inputs * self.scale if isinstance(inputs, Tensor) else inputs


def classify(model: Any, batch: Any) -> EvaluationOutput:
    """Step on scores and labels."""
    inputs, labels = batch
    outputs = model(inputs)
    loss = F.cross_entropy(outputs, labels, reduction="sum")
    return EvaluationOutput(loss, (labels != -100).sum(), outputs, labels)


def read(model: Any, batch: Any) -> EvaluationOutput:
    """Step on texts and their numbers."""
    texts, numbers = batch
    return EvaluationOutput(predictions=[text.upper() for text in texts], labels=numbers)


class Bench:
    """An evaluator with all that it needs."""

    def __init__(self, step: Any = classify, *callbacks: Callback, model: nn.Module | None = None, **options: Any):
        self.accelerator = Accelerator(cpu=True, **options)
        self.model = self.accelerator.prepare_model(Given() if model is None else model)
        self.evaluator = Evaluator(self.accelerator, Dispatcher(callbacks), step)
        self.run = Run(accelerator=self.accelerator, model=self.model)

    def loader(self, data: Any, batch_size: int | None = 4, **options: Any) -> Any:
        """Return a prepared loader."""
        return self.accelerator.prepare_data_loader(DataLoader(data, batch_size, **options))

    def set(self, data: Any, metrics: Any = None, batch_size: int = 4, **options: Any) -> EvaluationSet:
        """Return a set."""
        return EvaluationSet(loader=self.loader(data, batch_size), metrics=as_metrics(metrics), **options)

    def evaluate(self, sets: Mapping[str, EvaluationSet], prefix: str = "eval") -> dict[str, float]:
        """Evaluate."""
        return self.evaluator.evaluate(self.run, self.model, sets, prefix)

    def predict(self, data: Any, batch_size: int = 4, to: Path | None = None, **options: Any) -> Predictions:
        """Predict."""
        return self.evaluator.predict(self.run, self.model, self.loader(data, batch_size), to=to, **options)


def expected(samples: int) -> dict[str, float]:
    """Return loss, accuracy and accuracy among the best two by hand, over all samples at once."""
    logits, labels = scores(samples)
    counted = labels != -100
    logits, labels = logits[counted], labels[counted]
    best_two = logits.topk(2).indices
    return {
        "eval_loss": F.cross_entropy(logits.double(), labels).item(),
        "eval_accuracy": (logits.argmax(1) == labels).double().mean().item(),
        "eval_top2_accuracy": (best_two == labels[:, None]).any(1).double().mean().item(),
    }
