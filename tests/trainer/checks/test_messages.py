"""Tests of what is said about labels, sets and metrics that do not fit, and in which batch."""

from typing import Any

import pytest
from torch import Tensor, nn

from tests.trainer.tasks import arguments, points, trainer
from trainer_lib import Trainer
from trainer_lib.events import Callback, Run
from trainer_lib.foundation.errors import ConfigurationError, StateError

INPUTS, SIDES = points(16)


def test_labels_that_are_texts_are_to_be_numbered() -> None:
    samples = [(row, "right" if side else "left") for row, side in zip(INPUTS, SIDES, strict=True)]
    with pytest.raises(ConfigurationError, match=r"as targets, got texts such as '(left|right)'\. Give each class a"):
        trainer(train_dataset=samples).fit()


def test_a_function_in_the_place_of_data_is_named() -> None:
    def samples() -> Any:
        yield INPUTS[0], SIDES[0]

    with pytest.raises(ConfigurationError, match=r"is the generator function 'samples': give list\(samples\(\)\)"):
        trainer(train_dataset=samples).fit()
    with pytest.raises(ConfigurationError, match=r"is the function 'points', and not its result: call it"):
        trainer(train_dataset=points).fit()


class FailsOnThird(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.batches = nn.Linear(6, 2), 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.batches += 1
        if self.batches == 3:
            raise ValueError("no good")
        return self.layer(inputs)


@pytest.mark.parametrize(
    ("data", "message"), [({"dev": points(16)}, "the evaluation set 'dev'"), (None, "the prediction")]
)
def test_an_error_of_an_evaluation_says_in_which_set_and_batch(data: Any, message: str) -> None:
    made = trainer(arguments(per_device_eval_batch_size=4), model=FailsOnThird(), eval_dataset=data)
    with pytest.raises(ValueError, match="no good") as caught:
        made.evaluate() if data else made.predict(INPUTS)
    (note,) = caught.value.__notes__
    assert note.startswith(f"In batch 3 of {message}, with the batch ")


def test_an_error_of_a_metric_says_in_which_batch() -> None:
    def picky(predictions: Tensor, labels: Tensor) -> Tensor:
        assert len(labels) == 4
        return predictions.argmax(-1) == labels

    made = trainer(arguments(per_device_eval_batch_size=4), eval_dataset=points(6), metrics={"picky": picky})
    with pytest.raises(AssertionError) as caught:
        made.evaluate()
    (note,) = caught.value.__notes__
    assert note.startswith("In the metric 'picky', in batch 2 of the evaluation, with predictions (2, 2) float32")


def test_an_evaluation_without_labels_says_what_is_missing(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trainer().evaluate(INPUTS) == {}
    assert "The evaluation measured nothing: its batches have no labels" in caplog.text
    assert capsys.readouterr().out == ""
    with pytest.raises(ConfigurationError, match=r"measured nothing.*leave eval_dataset out"):
        trainer(eval_dataset=INPUTS).fit()


@pytest.mark.parametrize("options", [{"metrics": ["accuracy"]}, {"compute_metrics": lambda rows: {"rows": len(rows)}}])
def test_metrics_without_an_evaluation_set_are_an_error(options: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"{next(iter(options))}=… is computed in evaluations, but there is no evaluation set"
    ):
        trainer(**options).fit()


def test_metrics_for_evaluations_by_hand_pass() -> None:
    made = trainer(arguments(max_steps=1, eval_every="never"), metrics=["accuracy"])
    made.fit()
    assert set(made.evaluate(points(8))) == {"eval_loss", "eval_accuracy"}


class NeedsABeginning(Callback):
    def on_fit_begin(self, run: Run) -> None:
        self.began = run.state.step

    def on_fit_end(self, run: Run) -> None:
        assert self.began <= run.state.step


def test_a_run_that_cannot_begin_ends_with_its_own_error(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    trainer(arguments(output_dir=tmp_path, max_steps=1)).fit()
    (run,) = tmp_path.iterdir()
    caplog.clear()
    wider = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 3))
    made = Trainer(wider, arguments(max_steps=1), train_dataset=points(), callbacks=[NeedsABeginning()])
    with pytest.raises(StateError, match="another model"):
        made.fit(resume=run)
    messages = [record for record in caplog.records if "NeedsABeginning" in record.getMessage()]
    assert [record.getMessage() for record in messages] == [
        "The callback NeedsABeginning raised in on_fit_end at step 0: "
        "AttributeError: 'NeedsABeginning' object has no attribute 'began'"
    ]
    assert messages[0].exc_info is None
