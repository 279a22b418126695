"""What editors, `help()` and completion show of the public classes."""

import inspect
import pydoc
import re
import typing
from typing import Any

import pytest

from tests.trainer.tasks import trainer
from trainer_lib import Trainer, TrainingArguments
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.trainer.arguments.type_hints import choices
from trainer_lib.trainer.evaluation.prediction_results import Predictions


class Derived(Trainer):
    def __init__(self, model: Any, *, temperature: float = 1.0, **options: Any) -> None:
        super().__init__(model, **options)
        self.temperature = temperature


@pytest.mark.parametrize("kind", [Trainer, TrainingArguments, Derived])
def test_a_class_shows_the_parameters_of_its_constructor(kind: type[Any]) -> None:
    expected = list(inspect.signature(kind.__init__).parameters)[1:]
    assert list(inspect.signature(kind).parameters) == expected
    text = re.sub(r".\x08", "", pydoc.render_doc(kind))  # bold, as a terminal prints it
    written = re.sub(r"\n \|\s+", " ", text).replace(
        "( ", "("
    )  # Python 3.13 writes each parameter into a line of its own
    assert f"{kind.__name__}({'*, ' if kind is TrainingArguments else ''}{expected[0]}" in written


def test_arguments_show_their_defaults() -> None:
    parameters = inspect.signature(TrainingArguments).parameters
    assert parameters["learning_rate"].default == 5e-5
    assert parameters["max_grad_norm"].default == 1.0


def test_the_types_of_enumerated_arguments_are_what_the_checks_allow() -> None:
    hints = typing.get_type_hints(TrainingArguments)
    enumerated = {name: allowed for name, hint in hints.items() if (allowed := choices(hint))}
    assert set(enumerated) == {
        "mixed_precision",
        "on_save_error",
        "on_exception",
        "on_nonfinite",
        "on_bad_sample",
        "per_device_train_batch_size",
        "num_workers",
    }
    make: Any = TrainingArguments
    for name, allowed in enumerated.items():
        for choice in allowed:
            assert getattr(make(**{name: choice}), name) == choice
        with pytest.raises(ConfigurationError) as caught:
            make(**{name: "elephant"})
        assert all(choice in str(caught.value) for choice in allowed)


def test_the_annotation_of_predict_names_its_result() -> None:
    assert typing.get_type_hints(Trainer.predict)["return"] is Predictions


def test_completion_offers_public_methods_only() -> None:
    offered = dir(trainer())
    assert {"fit", "evaluate", "predict", "compute_loss", "train_dataloader", "state", "args"} <= set(offered)
    assert {"search", "preview", "save_model", "push_to_hub", "export", "unwrapped_model"} <= set(offered)
    assert not {"prepare_models", "as_result", "weighs_nothing", "guard", "averages", "is_rehearsing"} & set(offered)
