"""Generation reads samples by length; predictions, files and metrics have the order of the data."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.trainer.evaluation.test_generation import END, OPTIONS, PAD, alone, causal
from tests.worlds import run_world
from trainer_lib import Trainer, TrainingArguments
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.trainer.data.dataloaders import eval_loader
from trainer_lib.trainer.data.eval_samplers import generation_lengths, order_of
from trainer_lib.trainer.evaluation.outputs import EvaluationOutput
from trainer_lib.trainer.evaluation.prediction_results import load_predictions
from trainer_lib.trainer.evaluation.row_buffers import places_of

LENGTHS = [3, 9, 2, 5, 9, 4, 7, 2, 6, 3, 8]
PROMPTS = [[5 + (7 * row + place) % 30 for place in range(length)] for row, length in enumerate(LENGTHS)]


def samples() -> list[dict[str, Any]]:
    return [{"prompt_input_ids": prompt, "input_ids": prompt, "labels": prompt[:2]} for prompt in PROMPTS]


def left_padded(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    size = max(len(row["prompt_input_ids"]) for row in rows)
    tokens = [[PAD] * (size - len(row["prompt_input_ids"])) + row["prompt_input_ids"] for row in rows]
    inputs = torch.tensor(tokens)
    labels = torch.tensor([row["labels"] for row in rows])
    mask = (inputs != PAD).long()
    return {"prompt_input_ids": inputs, "prompt_attention_mask": mask, "input_ids": inputs, "labels": labels}


class Widths(Trainer):
    """Notes how wide batches are, and predicts tokens beside texts."""

    texts = False

    def evaluation_step(self, model: Any, batch: Any) -> EvaluationOutput:
        self.widths = [*getattr(self, "widths", []), batch["input_ids"].shape[1]]
        output = super().evaluation_step(model, batch)
        if not self.texts:
            return output
        texts = [" ".join(map(str, row)) for row in batch["labels"].tolist()]
        return EvaluationOutput(predictions={"tokens": output.predictions, "texts": texts}, padding=output.padding)

    def compute_loss(self, model: Any, batch: Any) -> Any:
        return batch["labels"].float().mean()


def trainer(**options: Any) -> Widths:
    arguments: dict[str, Any] = {"predict_with_generate": True, "generation_kwargs": OPTIONS}
    return Widths(
        causal(),
        TrainingArguments(use_cpu=True, progress_bar=False, per_device_eval_batch_size=2, **(arguments | options)),
        collate_fn=left_padded,
        compute_metrics=first_row,
    )


def first_row(prediction: Any) -> dict[str, float]:
    predictions, labels = prediction
    return {"first": predictions[0, 0], "labels": (labels[:, 0] == 5).sum()}


def test_what_is_read_by_length_comes_back_in_the_order_of_the_data(tmp_path: Path) -> None:
    def body() -> Any:
        plain, ordered = trainer(), trainer()
        loader: DataLoader[Any] = DataLoader(samples(), 2, collate_fn=left_padded)  # type: ignore[arg-type]
        expected, found = plain.predict(loader), ordered.predict(samples())
        np.testing.assert_array_equal(found.predictions, expected.predictions)
        np.testing.assert_array_equal(found.labels, expected.labels)
        assert found.metrics == pytest.approx(expected.metrics)
        ordered.texts = True
        written = ordered.predict(samples(), to=tmp_path / "predictions")
        ordered.texts = False
        metrics = ordered.evaluate(samples())
        assert [metrics[f"eval_{name}"] for name in ("first", "labels")] == [found.predictions[0, 0], 1]
        return found.predictions, load_predictions(written.folder or ""), plain.widths, ordered.widths

    (found, written, plain, ordered), (other, *_) = run_world(body, num_processes=2, timeout=60)
    np.testing.assert_array_equal(found, other)
    for row, prompt in zip(found.tolist(), PROMPTS, strict=True):
        continuation = alone(causal(), prompt)
        assert row[: len(continuation)] == continuation
        assert set(row[len(continuation) :]) <= {PAD, END}  # never -100, so that a tokenizer can decode each row
    np.testing.assert_array_equal(written.predictions["tokens"], found)
    assert written.predictions["texts"] == [" ".join(map(str, prompt[:2])) for prompt in PROMPTS]
    assert ordered[:3] == [9, 6, 3]  # of 11 samples in batches of 2, rank 0 has the batches 0, 2 and 4
    assert sum(ordered[:3]) < sum(plain)


def test_a_loader_of_a_limited_set_is_read_by_length_too() -> None:
    limited = trainer(limit_eval_batches=3)
    expected = limited.predict(samples())
    found = limited.predict(limited.eval_dataloader(samples()))
    np.testing.assert_array_equal(found.predictions, expected.predictions)
    assert limited.widths[:3] == limited.widths[3:] == [9, 5, 3]


@pytest.mark.parametrize(
    ("dataset", "lengths"),
    [
        ([{"input_ids": [1, 2, 3], "labels": [4]}, {"input_ids": [1], "labels": [4]}], [4, 2]),
        ([{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [1], "labels": [1]}], [3, 1]),
        ([{"input_ids": torch.ones(2), "labels": torch.tensor(0)}], [2]),
        ([{"length": 7, "input_ids": [1]}], [7]),
        ([{"length": "7 tokens", "input_ids": [1]}], [1]),
        ([{"length": "7 tokens"}], None),
        ([{"pixels": 3}], None),
        ([[1, 2]], None),
        ([], None),
    ],
)
def test_lengths_are_those_of_prompt_and_answer(dataset: Any, lengths: Any) -> None:
    assert generation_lengths(dataset, "length") == lengths


def test_samples_are_read_once_for_their_lengths() -> None:
    class Counting(Dataset[Any]):
        reads = 0

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            self.reads += 1
            return {"input_ids": [1] * (index + 1), "labels": [2]}

    dataset = Counting()
    for _ in range(2):
        loader = eval_loader(dataset, longest_samples_first=True)
        assert list(order_of(loader)) == [2, 1, 0]  # type: ignore[arg-type]
    assert dataset.reads == 1 + 3


def test_limits_choose_the_first_samples_of_the_data() -> None:
    loader = eval_loader(samples(), batch_size=2, limit_batches=2, longest_samples_first=True, collate_fn=left_padded)
    assert list(loader.sampler) == [1, 3, 0, 2]


def test_equal_lengths_and_samples_that_may_be_skipped_keep_their_order() -> None:
    assert order_of(eval_loader([{"input_ids": [1]}] * 3, longest_samples_first=True)) is None
    assert order_of(trainer(on_bad_sample="skip").eval_dataloader(samples())) is None
    assert order_of(trainer(predict_with_generate=False, generation_kwargs={}).eval_dataloader(samples())) is None


def test_rows_that_belong_to_no_sample_are_an_error() -> None:
    with pytest.raises(ConfigurationError, match="returned 5 rows of labels for 2 samples"):
        places_of(np.array([1, 0]), 5, "labels")


def test_several_sequences_a_sample_stay_together() -> None:
    options = {**OPTIONS, "num_beams": 2, "num_return_sequences": 2}
    single = trainer(generation_kwargs={**OPTIONS, "num_beams": 2}).predict(samples()).predictions
    several = trainer(generation_kwargs=options).predict(samples()).predictions
    assert len(several) == 2 * len(samples())
    np.testing.assert_array_equal(several[::2, : single.shape[1]], single)


def test_a_generation_config_may_be_an_object_or_a_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GenerationConfig(max_new_tokens=3, pad_token_id=38, eos_token_id=END)
    config.save_pretrained(tmp_path)
    for value in (config, str(tmp_path)):
        rows = trainer(generation_kwargs={"generation_config": value}).predict(samples()).predictions
        assert rows.shape[1] == 3
