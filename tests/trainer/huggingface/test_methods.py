"""Options of `evaluate`, `predict` and `save_model` that users of Hugging Face's trainer know."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.evaluation.test_generation import PROMPTS, Rows, batch_of, causal
from tests.trainer.tasks import arguments, points, trainer
from tests.worlds import run_world
from trainer_lib import ConfigurationError, LossResult, Trainer
from trainer_lib.foundation.errors import SignatureError


def measure(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


@pytest.mark.parametrize("processes", [1, 2])
def test_predict_computes_metrics_as_evaluate_does(processes: int) -> None:
    def body() -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        model_trainer = trainer(eval_dataset=points(21), compute_metrics=measure)
        unlabelled = [points(5)[0]]
        return (
            model_trainer.evaluate(),
            model_trainer.predict(points(21)).metrics,
            model_trainer.predict(unlabelled[0]).metrics,
        )

    for evaluated, predicted, unlabelled in run_world(body, (), processes):
        assert predicted == {name.replace("eval_", "predict_"): value for name, value in evaluated.items()}
        assert set(predicted) == {"predict_loss", "predict_accuracy"}
        assert unlabelled == {}


def test_an_error_of_compute_metrics_is_raised_on_all_processes() -> None:
    def body() -> str:
        def fail(prediction: Any) -> dict[str, float]:
            raise ArithmeticError("no such number")

        try:
            trainer(compute_metrics=fail).predict(points(9))
        except (ArithmeticError, RuntimeError) as error:
            return str(error)
        return ""

    assert all("no such number" in text for text in run_world(body, (), 2))


def test_the_prefix_of_metrics_has_two_names(tmp_path: Path) -> None:
    model_trainer: Any = trainer(compute_metrics=measure)
    assert set(model_trainer.evaluate(points(9), metric_key_prefix="test")) == {"test_loss", "test_accuracy"}
    assert set(model_trainer.predict(points(9), metric_key_prefix="test").metrics) == {"test_loss", "test_accuracy"}
    assert set(model_trainer.predict(points(9), tmp_path / "to", prefix="test").metrics) == {"test_loss"}


def test_generation_takes_options_of_the_call() -> None:
    args = arguments(predict_with_generate=True, generation_kwargs={"max_new_tokens": 3})
    model_trainer: Any = Trainer(causal(), args, collate_fn=batch_of, eval_dataset=Rows())
    longest = max(len(prompt) for prompt in PROMPTS)

    def length(**options: Any) -> int:
        return model_trainer.predict(Rows(), **options).predictions.shape[1]

    assert (length(), length(max_new_tokens=2), length(max_length=longest + 1, max_new_tokens=None)) == (3, 2, 1)
    assert length() == 3
    sizes: list[int] = []
    model_trainer.compute_metrics = lambda prediction: sizes.append(prediction.predictions.shape[1]) or {}
    model_trainer.evaluate(max_new_tokens=1)
    assert sizes == [1]


class LogsLabels(Trainer):
    def compute_loss(self, model: Any, batch: Any) -> LossResult:
        self.log("rows", len(batch["labels"]))
        return LossResult(batch["labels"].float().sum(), weight=2.0, logs={"two": 2.0})


def test_what_a_loss_logs_beside_generation_is_a_metric() -> None:
    args = arguments(predict_with_generate=True, generation_kwargs={"max_new_tokens": 1}, per_device_eval_batch_size=9)
    metrics = LogsLabels(causal(), args, collate_fn=batch_of, eval_dataset=Rows()).evaluate()
    assert (metrics["eval_rows"], metrics["eval_two"]) == (len(PROMPTS), 2.0)


def test_elsewhere_they_are_refused() -> None:
    model_trainer: Any = trainer()
    with pytest.raises(SignatureError, match="max_length"):
        model_trainer.predict(points(9), max_length=3)


def test_save_model_saves_into_the_folder_of_the_run(tmp_path: Path) -> None:
    model_trainer = trainer(arguments(output_dir=tmp_path))
    with pytest.raises(ConfigurationError, match=r"after fit\(\) with output_dir"):
        model_trainer.save_model()
    model_trainer.fit()
    model_trainer.save_model()
    (file,) = tmp_path.glob("*/model/model.safetensors")
    saved = load_file(file)
    assert all(torch.equal(saved[name], value) for name, value in model_trainer.unwrapped_model.state_dict().items())
    again = trainer(arguments(output_dir=tmp_path, resume="auto"))
    again.fit()
    again.save_model()
    np.testing.assert_equal(
        {k: v.numpy() for k, v in load_file(file).items()}, {k: v.numpy() for k, v in saved.items()}
    )
