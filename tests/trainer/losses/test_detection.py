"""Losses that models of transformers divide by the boxes of a batch, which some add up over all ranks."""

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DeformableDetrConfig,
    DeformableDetrForObjectDetection,
    DetrConfig,
    DetrForObjectDetection,
    ResNetConfig,
)
from transformers import TrainingArguments as TheirArguments

from tests.trainer.exact import Updates, assert_updates, updates_of, with_fixed_statistics
from tests.trainer.fit.test_exact_updates import arguments
from tests.worlds import run_world
from trainer_lib import Trainer
from trainer_lib.launchers.fork import run_forked

BOXES = 1, 4, 2, 1, 3, 1, 1, 4, 2, 3, 1  # of each image


def detector(kind: Any) -> Any:
    torch.manual_seed(0)
    stages = ["stage1", "stage2"] if kind is DeformableDetrConfig else ["stage2"]
    sizes: Any = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    small: Any = {**sizes, "out_features": stages}
    layers: Any = {"encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads: Any = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    options: Any = {"num_queries": 5, "d_model": 32, "dropout": 0.0, "num_labels": 3, "auxiliary_loss": True}
    options |= {"use_timm_backbone": False, "backbone_config": ResNetConfig(**small)}
    if kind is DeformableDetrConfig:
        options |= {"num_feature_levels": 2, "encoder_n_points": 2, "decoder_n_points": 2}
    model_of: Any = DeformableDetrForObjectDetection if kind is DeformableDetrConfig else DetrForObjectDetection
    return with_fixed_statistics(model_of(kind(**layers, **heads, **options)))


def pictures() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "pixel_values": torch.randn(3, 32, 32, generator=generator),
            "labels": {
                "class_labels": torch.randint(3, (boxes,), generator=generator),
                "boxes": 0.3 + 0.4 * torch.rand(boxes, 4, generator=generator),
            },
        }
        for boxes in BOXES
    ]


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"pixel_values": torch.stack([row["pixel_values"] for row in rows]), "labels": [r["labels"] for r in rows]}


def loss_of(model: Any, rows: list[dict[str, Any]]) -> Tensor:
    return model(**collate(rows)).loss


@pytest.mark.filterwarnings("ignore:Grad strides")  # of a convolution's gradient, under DDP
@pytest.mark.parametrize("processes", [1, 2])
def test_a_loss_over_boxes_is_that_of_one_big_batch(processes: int) -> None:
    rows = pictures()

    def body() -> tuple[Updates, float]:
        model, sizes = detector(DeformableDetrConfig), dict[str, Any](gradient_accumulation_steps=3)
        updates = updates_of(model, rows, collate_fn=collate, per_device_train_batch_size=1, **sizes)
        options = arguments(per_device_eval_batch_size=1)
        return updates, Trainer(model, options, eval_dataset=rows, collate_fn=collate).evaluate()["eval_loss"]

    model, size = detector(DeformableDetrConfig), 3 * processes
    whole = [partial(loss_of, model, rows[start : start + size]) for start in range(0, len(rows), size)]
    with torch.no_grad():
        eval_loss = loss_of(model.eval(), rows).item()
    for actual, actual_eval_loss in run_world(body, (), processes, timeout=120) if processes > 1 else [body()]:
        assert_updates(actual, model, whole)
        assert actual_eval_loss == pytest.approx(eval_loss, rel=1e-6)


def test_predictions_of_a_detector_are_scores_and_boxes() -> None:
    model, rows = detector(DetrConfig), pictures()
    trainer = Trainer(model, arguments(per_device_eval_batch_size=4), collate_fn=collate)
    predictions, labels, _ = trainer.predict(rows)
    with torch.no_grad():
        expected = model.eval()(**collate(rows))
    assert set(predictions) == {"logits", "pred_boxes"}
    for name, values in predictions.items():
        torch.testing.assert_close(torch.from_numpy(values), expected[name])
    assert [len(of_image["boxes"]) for of_image in labels] == list(BOXES)


def test_images_without_boxes_count_as_one_box_together() -> None:
    trainer = Trainer(detector(DeformableDetrConfig), arguments(), train_dataset=pictures(), collate_fn=collate)
    of_image = {"class_labels": torch.zeros(0, dtype=torch.long), "boxes": torch.zeros(0, 4)}
    assert trainer.num_items({"labels": [of_image, of_image]}) == 1
    assert trainer.num_items({"labels": [of_image, pictures()[1]["labels"]]}) == 4


@pytest.mark.filterwarnings("ignore:Grad strides")
def test_ranks_that_reduce_boxes_in_their_forward_evaluate_equally_often(
    caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    """As many models do where Hugging Face's arguments have set up Accelerate."""
    rows = pictures()[:5]  # 2 batches for one rank, 1 for the other

    def body() -> tuple[dict[str, float], int]:
        theirs: Any = TheirArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=2, per_device_eval_batch_size=2, max_steps=1,
            learning_rate=0.0, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        with caplog.at_level(logging.WARNING):
            trainer = Trainer(
                detector(DetrConfig), theirs, train_dataset=rows[:4], eval_dataset=rows, collate_fn=collate
            )
            trainer.fit()
            metrics = trainer.evaluate()
        told = [record.getMessage() for record in caplog.records]
        return metrics, sum("that transformers reduces over the ranks" in message for message in told)

    (first, warnings), (second, _) = run_forked(body, (), 2, timeout=60, OMP_NUM_THREADS="1")
    assert first == second
    assert warnings == 1
