"""Labels of a batch that was sent to an accelerator are counted on the host; the meta device has no values to count."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.trainer.losses.test_objectives import Dividing
from trainer_lib.data_loader import prepare_data_loader
from trainer_lib.data_loader.host_values import host_value, send_remembered
from trainer_lib.precision.base import FullPrecision
from trainer_lib.trainer.evaluation.outputs import EvaluationOutput
from trainer_lib.trainer.losses.loss_result import count_valid, summed
from trainer_lib.trainer.losses.model_io import count_items, count_tokens
from trainer_lib.trainer.losses.objectives import ModelLoss
from trainer_lib.trainer.metrics.running_metrics import MeanMetric, named_metric

LABELS = torch.tensor([[-100, 1, 2], [-100, -100, 0]])


def prepared(row: Callable[[int], Any], collate: Any = None) -> Any:
    """Return the only batch of a loader, on a device without values."""
    rows: Any = [row(index) for index in range(2)]
    loader = DataLoader(rows, batch_size=2, collate_fn=collate)
    (batch,) = prepare_data_loader(loader, device=torch.device("meta"), put_on_device=True)
    return batch


def named(index: int) -> dict[str, Tensor]:
    return {"inputs": torch.ones(3), "labels": LABELS[index]}


def test_labels_of_tuples_are_counted() -> None:
    batch = prepared(lambda index: (torch.ones(3), LABELS[index]))
    assert batch[1].is_meta
    assert host_value(batch[0]) is batch[0], "inputs may be large, and nobody counts them"
    assert count_items(batch) == 3.0
    assert count_items(batch, shifted=True) == 3.0


def test_labels_of_mappings_are_counted() -> None:
    assert count_items(prepared(named)) == 3.0
    assert count_items(prepared(lambda index: {"labels": LABELS[index].abs()}), shifted=True) == 4.0


def test_labels_of_batches_that_are_moved_in_place_are_counted() -> None:
    transformers = pytest.importorskip("transformers")

    def collate(rows: list[Any]) -> Any:
        return transformers.BatchEncoding({"labels": torch.stack([row["labels"] for row in rows])})

    batch = prepared(named, collate)
    assert batch["labels"].is_meta
    assert count_items(batch) == 3.0


def test_tokens_and_spans_are_counted() -> None:
    tokens = {"input_ids": LABELS.abs(), "attention_mask": (LABELS >= 0).long()}
    assert count_tokens(prepared(lambda index: {name: value[index] for name, value in tokens.items()})) == 3
    ends = torch.tensor([1, 5])  # the second one is after the text
    spans = {"input_ids": LABELS.abs(), "start_positions": ends, "end_positions": ends}
    assert count_items(prepared(lambda index: {name: value[index] for name, value in spans.items()})) == 1.0


@pytest.mark.parametrize(
    "change", [lambda labels: labels.add_(1), lambda labels: labels.clone(), lambda labels: labels[:1]]
)
def test_what_was_changed_on_the_device_is_counted_there(change: Callable[[Tensor], Tensor]) -> None:
    labels = prepared(named)["labels"]
    count = count_valid(change(labels))
    assert isinstance(count, Tensor)
    assert count.is_meta


def test_what_has_no_versions_is_counted_on_the_device() -> None:
    with torch.inference_mode():
        assert isinstance(count_items(prepared(named)), Tensor)


def test_a_batch_that_is_gone_is_forgotten() -> None:
    batch = send_remembered([LABELS.clone()], "meta")
    host = weakref.ref(host_value(batch[0]))
    assert host() is not None
    del batch
    assert host() is None


def test_weights_of_classes_need_no_values() -> None:
    """Picking the labels that count would wait for how many there are."""
    loss = summed(nn.CrossEntropyLoss(weight=torch.ones(3, device="meta")))
    assert loss is not None
    _, weight = loss(torch.ones(6, 3, device="meta"), LABELS.flatten().to("meta"))
    assert isinstance(weight, Tensor)
    assert weight.is_meta


def test_a_model_gets_the_number_of_items_on_the_device_of_its_batch() -> None:
    """From the host, it would be copied, and waited for, in each step."""
    model = Dividing().to("meta")
    batch = send_remembered({"inputs": torch.ones(3, 6), "labels": torch.tensor([0, -100, 2])}, "meta")
    result = ModelLoss(model, count_items, FullPrecision())(model, batch)
    assert result.weight == 2.0
    assert model.given[-1].is_meta


def test_an_accuracy_asks_for_no_value_on_the_device() -> None:
    output = EvaluationOutput(predictions=torch.ones(3, 2, device="meta"), labels=torch.zeros(3, device="meta").long())
    for kind in ("accuracy", "top2_accuracy"):
        metric = named_metric(kind, kind)
        assert isinstance(metric, MeanMetric)
        hits, count = metric.measured(output)[kind]
        assert isinstance(hits, Tensor)
        assert isinstance(count, Tensor)
