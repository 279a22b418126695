"""Tests of sample predictions."""

import base64
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from tests.callbacks.loops import folder_of
from tests.callbacks.test_observers import Tables
from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import run_world
from trainer_lib.callbacks import JsonlLog, Predictions
from trainer_lib.callbacks.trackers import TrackerCallback
from trainer_lib.events import Run
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.runs.report.sample_tables import sample_tables


def shown(history: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    return [line for line in lines if line["event"] == "predictions"]


class Notes(list[Any]):
    """The callbacks of a trainer: none, but what they would be told is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.facts: list[Any] = []

    def fire(self, event: str, run: Run, name: str, facts: Any) -> None:
        assert (event, name) == ("on_event", "predictions")
        self.facts.append(facts)


def cells(show: Predictions, tokenizer: Any = None, is_shifted: bool = False, **parts: Any) -> tuple[Any, Any]:
    """Return columns and rows of an evaluation of one batch."""
    notes = Notes()
    shift = SimpleNamespace(answer=is_shifted)
    run = Run(trainer=SimpleNamespace(events=notes, processing_class=tokenizer, label_shift=shift), **parts)
    show.on_evaluate_set_begin(run, "", 1)
    show.on_evaluate_batch_end(run)  # of one that was left before its end
    show.on_evaluate_set_begin(run, "", 1)
    show.on_evaluate_batch_end(run)
    show.on_evaluate_set_end(run, "", {})
    (facts,) = notes.facts
    return facts["columns"], facts["rows"]


def test_the_first_samples_of_each_evaluation_are_in_history_and_trackers(tmp_path: Path) -> None:
    inputs, labels = points()
    model, tables = network(), Tables()
    args = arguments(output_dir=tmp_path, learning_rate=0.0, per_device_eval_batch_size=3)
    sets = {"near": (inputs, labels), "far": (10 * inputs[:2], labels[:2])}
    trainer(
        args, model=model, eval_dataset=sets, callbacks=[Predictions(4), TrackerCallback(tables)]
    ).fit()  # two passes, of which each ends with an evaluation
    lines = shown(folder_of(tmp_path) / "history.jsonl")
    assert [(line["step"], line["set"]) for line in lines] == [(5, "near"), (5, "far"), (10, "near"), (10, "far")]
    with torch.no_grad():
        classes = model(inputs).argmax(1).tolist()
    near = lines[0]
    assert near["columns"] == ["sample", "input", "prediction", "label"]
    assert [[row[0], *row[2:]] for row in near["rows"]] == [
        [index, classes[index], int(labels[index])] for index in range(4)
    ]
    first = [float(number) for number in near["rows"][0][1].split(", ")]
    assert first == pytest.approx(inputs[0].tolist(), rel=1e-3)
    assert len(lines[1]["rows"]) == 2  # there are no more
    assert lines[2]["rows"] == near["rows"]  # the same ones
    assert [(name, step) for name, _, _, step in tables.tables] == [
        ("predictions/near", 5),
        ("predictions/far", 5),
        ("predictions/near", 10),
        ("predictions/far", 10),
    ]
    assert tables.tables[0][1:3] == (near["columns"], near["rows"])


def test_samples_have_their_numbers_on_two_processes(tmp_path: Path) -> None:
    def body() -> None:
        args = arguments(max_steps=1, per_device_train_batch_size=4, per_device_eval_batch_size=2)
        history = JsonlLog(tmp_path / "history.jsonl")
        trainer(args, eval_dataset=points(), callbacks=[Predictions(4), history]).fit()

    run_world(body, timeout=60)
    (line,) = shown(tmp_path / "history.jsonl")
    assert [row[0] for row in line["rows"]] == [0, 1, 4, 5]  # those between are the other process's


def letters(tokens: list[int]) -> str:
    return "".join(chr(ord("a") + token) for token in tokens)


def one_hot(*rows: list[int]) -> Tensor:
    return nn.functional.one_hot(torch.tensor(rows), 8).float()


def test_texts_are_decoded_where_labels_count() -> None:
    tokens = torch.tensor([[0, 1, 2, 3], [4, 5, 6, -1]])
    batch = {
        "input_ids": tokens,
        "attention_mask": tokens >= 0,
        "labels": torch.tensor([[-100, 1, 2, 3], [4, 5, 6, -100]]),
    }
    outputs = one_hot([1, 2, 7, 0], [5, 7, 0, 0])
    columns, rows = cells(Predictions(decode=letters), batch=batch, outputs=outputs, is_shifted=True)
    assert columns == ["input_ids", "prediction", "label"]
    # What stands at a place is what comes next: of "abcd" after "a", "b" and "c" it is "bch".
    assert rows == [["abcd", "bch", "bcd"], ["efg", "fh", "fg"]]
    _, rows = cells(Predictions(1, letters), batch=batch, outputs=outputs)
    assert rows == [["abcd", "cha", "bcd"]]
    # What was generated is tokens already, of a length of its own.
    _, rows = cells(Predictions(1, letters), batch=batch, outputs=torch.tensor([[7, 7, -100]] * 2), is_shifted=True)
    assert rows == [["abcd", "hh", "bcd"]]


def test_parts_of_inputs_and_outputs_have_columns_of_their_own() -> None:
    values = torch.tensor([[0.5, 1.0]])
    columns, rows = cells(Predictions(), batch=[values], outputs={"score": values[:, 0], "loss": None})
    assert (columns, rows) == (["input", "prediction score"], [["0.5, 1.0", 0.5]])
    columns, rows = cells(Predictions(), batch={"x": values, "names": [("a", 1)]}, outputs=(values[:, 0], values[:, 1]))
    assert columns == ["x", "names", "prediction 1", "prediction 2"]
    assert rows == [["0.5, 1.0", "('a', 1)", 0.5, 1.0]]


def test_the_trainer_s_tokenizer_decodes_unless_decode_is_given() -> None:
    def decode(tokens: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return letters(tokens).upper()

    processor = SimpleNamespace(tokenizer=SimpleNamespace(decode=decode))
    parts: dict[str, Any] = {"batch": (torch.tensor([[0, 1]]), torch.tensor([3])), "outputs": one_hot([5])[0:1, 0]}
    assert cells(Predictions(), processor, **parts)[1] == [["AB", 5, 3]]
    assert cells(Predictions(decode=letters), processor, **parts)[1] == [["ab", 5, 3]]
    assert cells(Predictions(), **parts)[1] == [["0, 1", 5, 3]]


def test_large_tensors_are_shown_by_shape_and_range_and_texts_are_cut() -> None:
    images = torch.zeros(2, 3, 4, 4)
    images[0, 0, 0, 0] = 1.5
    batch = {"image": images, "text": ["x" * 600, "short"], "labels": torch.zeros(2, 4, 4, dtype=torch.long)}
    outputs = torch.zeros(2, 5, 4, 4)
    outputs[0, 3] = 1.0
    columns, rows = cells(Predictions(), batch=batch, outputs=outputs)
    assert columns == ["image", "text", "prediction", "label"]
    assert rows[0] == ["3×4×4, 0.0 to 1.5", "x" * 499 + "…", "4×4, 3 to 3", "4×4, 0 to 0"]
    assert rows[1][1] == "short"
    columns, rows = cells(
        Predictions(), batch=[torch.ones(2, 1), torch.tensor([0.12345, 2.0])], outputs=torch.ones(2, 1)
    )
    assert (columns, rows[0]) == (["input", "prediction", "label"], ["1.0", "1.0", 0.1235])


def test_images_are_in_the_history_once(tmp_path: Path) -> None:
    images = torch.rand(8, 3, 100, 200, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    data = (images, torch.tensor([0, 1] * 4))
    args = arguments(output_dir=tmp_path, num_train_epochs=2)
    trainer(args, model=model, train_dataset=data, eval_dataset=data, callbacks=[Predictions(2)]).fit()
    first, second = shown(folder_of(tmp_path) / "history.jsonl")
    assert "images" not in second
    assert [[image is not None for image in row] for row in first["images"]] == [[False, True, False, False]] * 2
    pictures: list[Any] = []
    for row, image in zip(first["images"], images, strict=False):
        picture = Image.open(io.BytesIO(base64.b64decode(row[1].removeprefix("data:image/png;base64,"))))
        expected = image[:, ::3, ::3]  # at most 96 pixels on a side
        expected = 255 * (expected - expected.min()) / (expected.max() - expected.min())
        np.testing.assert_allclose(np.asarray(picture), expected.permute(1, 2, 0).numpy(), atol=0.51)
        pictures.append(row[1])
    (tables,) = sample_tables([first, second])
    assert [[row[1]["image"] for row in record["rows"]] for record in tables["records"]] == [pictures] * 2


def test_a_batch_without_outputs_shows_nothing() -> None:
    with pytest.raises(ValueError, match="expected 1, got 0"):
        cells(Predictions(), batch=torch.ones(2, 1))


@pytest.mark.parametrize("wrong", [lambda: Predictions(0), lambda: Predictions(decode="x")])  # type: ignore[arg-type]
def test_bad_options_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^Predictions\((samples|decode)\) must be .*\(got "):
        wrong()
