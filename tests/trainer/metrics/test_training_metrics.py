"""Tests of metrics of training batches: means over all samples between two logs, on any number of ranks."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import run_world
from trainer_lib import Trainer
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.process_group import LoneProcess
from trainer_lib.trainer.metrics.running_means import RunningMeans


def confidence(predictions: Tensor, labels: Tensor) -> dict[str, Tensor]:
    chances = predictions.softmax(-1)
    return {"mean": chances.amax(-1), "right": chances.gather(1, labels[:, None])[:, 0]}


def logged(count: int = 40) -> list[dict[str, float]]:
    # Nothing is learned, so that what is measured is known.
    args = arguments(num_train_epochs=1, learning_rate=0.0, log_every=2, per_device_train_batch_size=4, shuffle=False)
    made = trainer(args, train_dataset=points(count), train_metrics={"accuracy": "accuracy", "sure": confidence})
    history = made.fit().history
    return [{name: entry[name] for name in ("accuracy", "sure_mean", "sure_right")} for entry in history]


def expected(first: int, last: int, count: int) -> dict[str, float]:
    inputs, labels = points(count)
    scores, labels = network()(inputs[first:last]), labels[first:last]
    sure = confidence(scores, labels)
    right = (scores.argmax(-1) == labels).float().mean().item()
    return {"accuracy": right, "sure_mean": sure["mean"].mean().item(), "sure_right": sure["right"].mean().item()}


def test_each_log_has_the_mean_over_its_samples() -> None:
    means = logged()
    assert len(means) == 5
    for number, values in enumerate(means):
        assert values == pytest.approx(expected(8 * number, 8 * number + 8, 40), rel=1e-6)


def test_two_processes_measure_what_one_would_of_uneven_data() -> None:
    for means in run_world(logged, (19,), 2, timeout=60):  # updates of 8, 8 and 3 samples
        assert means[0] == pytest.approx(expected(0, 16, 19), rel=1e-6)
        assert means[1] == pytest.approx(expected(16, 19, 19), rel=1e-6)


def test_a_number_of_numpy_is_logged_as_any_other() -> None:
    means = RunningMeans(LoneProcess(), torch.device("cpu"))
    values: list[Any] = [np.float32(0.5), np.int64(1), 1.5]
    for value in values:
        means.add("value", value)
    assert means.collect() == {"value": 1.0}


def test_metrics_that_are_not_means_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="train_metrics has 'f1', which is not a mean over labels or rows"):
        trainer(train_metrics=["f1"])


def test_a_step_without_outputs_gives_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    def without_outputs(self: Any, model: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    made = trainer(arguments(max_steps=2), train_metrics=["accuracy"])
    kind = type("Mine", (type(made),), {"compute_loss": without_outputs})
    kind(network(), arguments(max_steps=2), train_dataset=points(), train_metrics=["accuracy"]).fit()
    assert caplog.text.count("the training step returned no outputs") == 1


def test_a_root_and_a_perplexity_are_those_of_the_mean() -> None:
    """They are no means themselves: what is logged is the root of the mean, as in an evaluation."""
    inputs, targets = torch.arange(16.0)[:, None], torch.zeros(16, 1)
    args = arguments(max_steps=2, learning_rate=0.0, log_every=2, per_device_train_batch_size=8, shuffle=False)
    options: dict[str, Any] = {"train_dataset": (inputs, targets), "eval_dataset": (inputs, targets)}
    options |= {"train_metrics": ["mse", "rmse", "perplexity"], "metrics": ["mse", "rmse", "perplexity"]}
    torch.manual_seed(0)
    made = Trainer(nn.Linear(1, 1), args, loss_fn=nn.MSELoss(), **options)
    logged, *_ = made.fit().history
    evaluated = made.evaluate()
    for name in ("mse", "rmse", "perplexity"):
        assert logged[name] == pytest.approx(evaluated[f"eval_{name}"], rel=1e-6), name
    assert logged["rmse"] == pytest.approx(logged["mse"] ** 0.5, rel=1e-6)


def test_values_of_another_device_are_summed_there() -> None:
    """Such as those of the last layers of a model that is split across devices."""
    means = RunningMeans(LoneProcess(), torch.device("cuda", 0))
    with FakeTensorMode():
        for _ in range(2):
            means.add("value", torch.ones((), device="cuda:1"))
    total = means.mark()[0]["value"]
    assert isinstance(total, Tensor)
    assert total.device == torch.device("cuda", 1)
