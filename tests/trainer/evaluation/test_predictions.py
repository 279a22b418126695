"""Predictions come in the order of the dataset, in memory and on disk, from any number of processes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from tests.trainer.evaluated import Bench, Streamed, Texts, classify, dataset, expected, read, scores
from tests.trainer.tasks import arguments
from tests.worlds import run_world
from trainer_lib import Trainer, load_predictions
from trainer_lib.foundation.errors import CheckpointError, ConfigurationError, DistributedOperationException
from trainer_lib.launchers import run_forked
from trainer_lib.trainer.evaluation.outputs import EvaluationOutput

PADDING = 99  # of tokens, say


def ragged(model: Any, batch: Any) -> EvaluationOutput:
    """Step whose rows have other sizes in each batch, within a structure."""
    numbers = batch[0]
    size = int(numbers[0]) % 4 + 1
    rows = numbers[:, None].expand(-1, size).contiguous()
    texts = [f"text {int(number)}" for number in numbers]
    predictions = {"rows": rows, "pair": (texts, numbers.float(), None)}
    return EvaluationOutput(predictions=predictions, labels=numbers > 2, padding=PADDING)


def padded(samples: int, batch_size: int) -> np.ndarray[Any, Any]:
    """Return its rows, as they are padded."""
    rows = np.full((samples, 3), PADDING)
    for number in range(samples):
        size = number // batch_size * batch_size % 4 + 1
        rows[number, :size] = number
    return rows


class TestOrder:
    @pytest.mark.parametrize("on_disk", [False, True])
    @pytest.mark.parametrize("processes", [1, 2, 3])
    def test_is_that_of_the_dataset(self, processes: int, on_disk: bool, tmp_path: Path) -> None:
        def body() -> None:
            bench, texts = Bench(), Bench(read)
            for samples in (1, 2, 7, 18):
                for streams in (False, True):
                    logits, labels = scores(samples)
                    to = tmp_path / f"{samples}{streams}" if on_disk else None
                    data = Streamed(dataset(samples)) if streams else dataset(samples)
                    predictions, label_ids, metrics = bench.predict(data, batch_size=3, to=to)
                    np.testing.assert_array_equal(predictions, logits)
                    np.testing.assert_array_equal(label_ids, labels)
                    assert list(metrics) == ["predict_loss"]
                    np.testing.assert_allclose(metrics["predict_loss"], expected(samples)["eval_loss"], rtol=1e-6)
                to = tmp_path / f"{samples}" if on_disk else None
                upper = texts.predict(Texts(samples), batch_size=3, to=to)
                assert upper.predictions == [f"TEXT {index}" for index in range(samples)]
                assert upper.label_ids.tolist() == list(range(samples))

        run_world(body, num_processes=processes, timeout=60)

    def test_structures_keep_their_shape(self, tmp_path: Path) -> None:
        def body() -> None:
            bench = Bench(ragged)
            data = TensorDataset(torch.arange(11))
            for to in (None, tmp_path / "ragged"):
                predictions = bench.predict(data, batch_size=2, to=to)
                np.testing.assert_array_equal(predictions.predictions["rows"], padded(11, 2))
                texts, numbers, nothing = predictions.predictions["pair"]
                assert texts == [f"text {number}" for number in range(11)]
                np.testing.assert_array_equal(numbers, np.arange(11.0))
                assert nothing is None
                np.testing.assert_array_equal(predictions.labels, np.arange(11) > 2)
                assert predictions.labels.dtype == np.bool_
                assert predictions.folder == to

        run_world(body, timeout=60)


class TestWithoutLabels:
    @pytest.mark.parametrize("on_disk", [False, True])
    def test_there_are_neither_labels_nor_loss(self, on_disk: bool, tmp_path: Path) -> None:
        to = tmp_path / "unlabelled" if on_disk else None
        predictions = Bench().predict(dataset(5), to=to, has_labels=False)
        assert predictions.labels is None
        assert predictions.metrics == {}
        np.testing.assert_array_equal(predictions.predictions, scores(5)[0])


class TestFolder:
    def test_holds_plain_files_that_are_mapped(self, tmp_path: Path) -> None:
        folder = tmp_path / "deeper" / "predictions"
        Bench().predict(dataset(9), to=folder)
        assert sorted(path.name for path in folder.iterdir()) == [
            "labels-0.npy",
            "predictions-0.npy",
            "predictions.json",
        ]
        np.testing.assert_array_equal(np.load(folder / "predictions-0.npy"), scores(9)[0])
        loaded = load_predictions(folder)
        assert isinstance(loaded.predictions, np.memmap)
        assert loaded.metrics == {"predict_loss": pytest.approx(expected(9)["eval_loss"], rel=1e-6)}

    def test_half_precision_and_empty_rows_survive(self, tmp_path: Path) -> None:
        def step(model: Any, batch: Any) -> EvaluationOutput:
            return EvaluationOutput(predictions=(batch[0].bfloat16(), batch[0].half()), labels=batch[0][:, :0])

        bench = Bench(step)
        brain, half = bench.predict(dataset(5), to=tmp_path / "half").predictions
        np.testing.assert_array_equal(brain, scores(5)[0].bfloat16().float())
        np.testing.assert_array_equal(half, scores(5)[0].half())
        assert load_predictions(tmp_path / "half").labels.shape == (5, 0)

    def test_what_is_there_is_not_overwritten(self, tmp_path: Path) -> None:
        (tmp_path / "precious").write_text("data")

        def body() -> str:
            def step(model: Any, batch: Any) -> EvaluationOutput:
                raise AssertionError("too late")

            with pytest.raises((ConfigurationError, DistributedOperationException)) as error:
                Bench(step).predict(dataset(5), to=tmp_path)
            return str(error.value)

        assert all("exists and is not an empty folder" in message for message in run_world(body, timeout=60))
        assert [path.name for path in tmp_path.iterdir()] == ["precious"]

    def test_an_error_leaves_nothing(self, tmp_path: Path) -> None:
        def step(model: Any, batch: Any) -> EvaluationOutput:
            if batch[1][0] == 8:
                raise ValueError("no")
            return read(model, batch)

        with pytest.raises(ValueError, match="no"):
            Bench(step).predict(Texts(10), to=tmp_path / "partial")
        assert list(tmp_path.iterdir()) == []

    def test_rows_that_cannot_be_written_are_told_to_all(self, tmp_path: Path) -> None:
        def body() -> str:
            def step(model: Any, batch: Any) -> EvaluationOutput:
                return EvaluationOutput(predictions=[{1, 2} for _ in batch[0]])

            with pytest.raises((ConfigurationError, DistributedOperationException)) as error:
                Bench(step).predict(Texts(10), to=tmp_path / "sets")
            return str(error.value)

        assert all("A row of type set cannot be written" in message for message in run_world(body, timeout=60))
        assert list(tmp_path.iterdir()) == []

    def test_what_a_killed_process_left_is_replaced(self, tmp_path: Path) -> None:
        left = tmp_path / ".again.partial"
        left.mkdir()
        (left / "predictions-0.npy").write_text("torn")
        Bench().predict(dataset(5), to=tmp_path / "again")
        assert [path.name for path in tmp_path.iterdir()] == ["again"]

    def test_folders_that_are_not_whole_are_told(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="no predictions"):
            load_predictions(tmp_path)
        folder = tmp_path / "predictions"
        Bench().predict(dataset(9), to=folder)
        manifest = folder / "predictions.json"
        text = manifest.read_text()
        with (folder / "predictions-0.npy").open("r+b") as file:
            file.truncate(200)
        with pytest.raises(CheckpointError, match="not whole"):
            load_predictions(folder)
        manifest.write_text(text.replace('"predictions-0.npy"', '"../other.npy"'))
        with pytest.raises(CheckpointError, match="leads out of"):
            load_predictions(folder)
        manifest.write_text(json.dumps({**json.loads(text), "version": 9}))
        with pytest.raises(CheckpointError, match="version 9"):
            load_predictions(folder)


class TestMemory:
    def test_views_do_not_keep_what_they_are_views_of(self) -> None:
        class Whole:
            def update(self, predictions: Tensor, labels: Tensor) -> None:
                assert predictions.untyped_storage().nbytes() == predictions.nbytes

            def compute(self) -> float:
                return 1.0

        def step(model: Any, batch: Any) -> EvaluationOutput:
            return EvaluationOutput(predictions=batch[0].repeat(1, 1000)[:, 0])

        bench = Bench(step)
        assert bench.evaluate({"": bench.set(dataset(9), {"whole": Whole()})}) == {"eval_whole": 1.0}

    def test_batches_travel_a_few_at_a_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from trainer_lib.trainer.evaluation import gather_batches

        waiting: list[int] = []
        exchange = gather_batches.BatchGatherer._exchange

        def counted(self: Any, is_done: bool, **more: Any) -> bool:
            waiting.append(len(self._waiting))
            return exchange(self, is_done, **more)

        monkeypatch.setattr(gather_batches.BatchGatherer, "_exchange", counted)
        monkeypatch.setattr(gather_batches, "_BYTES", 400)

        def body() -> list[int]:
            # Rows of 5 scores and a label are 28 bytes: 3 batches of 4 rows at once, after a first one.
            Bench(classify).predict(dataset(4 * 11), batch_size=4)
            return waiting

        assert run_forked(body, timeout=60) == [[1, 3, 2], [1, 3, 1]]


def test_a_tensor_without_dimensions_is_a_value_a_batch() -> None:
    def step(model: Any, batch: Any) -> EvaluationOutput:
        return EvaluationOutput(predictions=(batch[0], torch.tensor(float(len(batch[0])))))

    rows, sizes = Bench(step).predict(dataset(9)).predictions
    assert rows.shape == (9, 5)
    assert sizes.tolist() == [4, 4, 1]


def test_rows_of_other_dimensions_are_refused() -> None:
    def step(model: Any, batch: Any) -> EvaluationOutput:
        rows: Tensor = batch[0]
        return EvaluationOutput(predictions=rows if len(rows) == 4 else rows[:, 0])

    with pytest.raises(ConfigurationError, match="different numbers of dimensions"):
        Bench(step).predict(dataset(9))


def test_metrics_with_compute_result_get_tensors_of_all_rows() -> None:
    def computed(prediction: Any, compute_result: bool) -> dict[str, float]:
        assert compute_result
        return {"rows": float(len(prediction.predictions)), "hits": (prediction.labels >= 0).float().mean().item()}

    data = (torch.randn(11, 4), torch.arange(11) % 3)
    trainer = Trainer(nn.Linear(4, 3), arguments(), loss_fn=nn.functional.cross_entropy, compute_metrics=computed)
    assert trainer.predict(data).metrics["predict_rows"] == 11
    assert trainer.evaluate(data)["eval_hits"] == 1


class Autoencoder(nn.Module):
    """Returns a loss, and needs no labels for it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        outputs = self.layer(inputs)
        return {"loss": nn.functional.mse_loss(outputs, inputs), "outputs": outputs}


def test_a_loss_without_labels_is_enough_for_compute_metrics() -> None:
    def computed(prediction: Any) -> dict[str, float]:
        assert prediction.label_ids is None
        return {"rows": float(len(prediction.predictions))}

    data = torch.randn(11, 4)
    trainer = Trainer(Autoencoder(), arguments(), eval_dataset=data, compute_metrics=computed)
    assert trainer.evaluate()["eval_rows"] == trainer.predict(data).metrics["predict_rows"] == 11


class Detected(Dataset[Any]):
    """Images of different sizes, with different numbers of boxes."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Any:
        boxes = torch.arange(4.0 * (1 + index * 5 % 3)).reshape(-1, 4) + index
        return torch.full((3, 4 + index % 2, 4), index / 11), {"boxes": boxes, "index": torch.tensor(index)}


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images: Any, boxes: Any) -> dict[str, Any]:
        errors = [
            (image.mean() * self.scale - target["boxes"].mean()) ** 2
            for image, target in zip(images, boxes, strict=True)
        ]
        found = [{"boxes": target["boxes"] * self.scale, "scores": target["boxes"][:, 0]} for target in boxes]
        return {"loss": torch.stack(errors).mean(), "logits": found}


class LargestBox:
    """As metrics of detection: it takes a list of dicts for each, of the same length."""

    def __init__(self) -> None:
        self.largest: list[float] = []

    def update(self, predictions: Any, labels: Any) -> None:
        for prediction, label in zip(predictions, labels, strict=True):
            assert prediction["boxes"].shape == label["boxes"].shape
            self.largest.append(prediction["boxes"].max().item())

    def compute(self) -> float:
        return sum(self.largest) / len(self.largest)


def by_field(samples: Any) -> Any:
    images, targets = zip(*samples, strict=True)
    return {"images": list(images), "boxes": list(targets)}


@pytest.mark.parametrize("processes", [1, 2])
def test_lists_with_one_item_per_sample_are_rows(processes: int, tmp_path: Path) -> None:
    boxes = [Detected()[index][1]["boxes"].numpy() for index in range(11)]

    def computed(prediction: Any) -> dict[str, float]:
        return {"rows": len(prediction.predictions), "boxes": sum(len(row["boxes"]) for row in prediction.labels)}

    def body() -> None:
        options: dict[str, Any] = {"label_names": ["boxes"], "per_device_eval_batch_size": 2, "fsdp": processes > 1}
        trainer = Trainer(
            Detector(),
            arguments(**options),
            collate_fn=by_field,
            metrics={"largest": LargestBox()},
            compute_metrics=computed,
        )
        metrics = trainer.evaluate(Detected())
        assert metrics["eval_rows"] == 11
        assert metrics["eval_boxes"] == sum(map(len, boxes))
        assert metrics["eval_largest"] == pytest.approx(np.mean([row.max() for row in boxes]))
        losses = [(index / 11 - row.mean()) ** 2 for index, row in enumerate(boxes)]
        assert metrics["eval_loss"] == pytest.approx(np.mean(losses), rel=1e-6)
        for to in (None, tmp_path / "boxes"):
            found, labels, _ = trainer.predict(Detected(), to=to)
            assert [label["index"] for label in labels] == list(range(11))
            for row, label, wanted in zip(found, labels, boxes, strict=True):
                np.testing.assert_array_equal(row["boxes"], wanted)
                np.testing.assert_array_equal(label["boxes"], wanted)

    run_world(body, num_processes=processes, timeout=60)


def test_lists_of_columns_keep_their_columns() -> None:
    """Also in a batch of as many rows as there are columns."""

    def step(model: Any, batch: Any) -> EvaluationOutput:
        return EvaluationOutput(predictions=[batch[0], batch[0][:, 0]], labels=batch[1])

    whole, first = Bench(step).predict(dataset(10), batch_size=4).predictions
    np.testing.assert_array_equal(whole, scores(10)[0])
    np.testing.assert_array_equal(first, scores(10)[0][:, 0])
