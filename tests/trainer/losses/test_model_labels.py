"""The items of losses of transformers whose labels do not show them: CTC, and maps that ignore another label."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    BeitConfig,
    BeitForImageClassification,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)

from tests.trainer.exact import with_fixed_statistics
from tests.trainer.fit.test_exact_updates import Gradients, arguments, assert_equal, train
from tests.worlds import run_world
from trainer_lib import Trainer

COUNT = 11
NO_DROPOUT = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout")


def recognizer(reduction: str = "mean") -> nn.Module:
    torch.manual_seed(0)
    small: Any = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    convolutions: Any = {"conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (4, 2), "num_feat_extract_layers": 2}
    positions: Any = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    exact: Any = {**dict.fromkeys(NO_DROPOUT, 0.0), "layerdrop": 0.0, "mask_time_prob": 0.0}
    norms: Any = {"feat_extract_norm": "layer", "do_stable_layer_norm": True}
    config = Wav2Vec2Config(
        vocab_size=9, ctc_loss_reduction=reduction, **small, **convolutions, **positions, **exact, **norms
    )
    return Wav2Vec2ForCTC(config)


def recordings() -> list[dict[str, Tensor]]:
    """Sounds with texts of 1 to 5 letters."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(120, 160, (COUNT,), generator=generator).tolist()
    letters = torch.randint(1, 6, (COUNT,), generator=generator).tolist()
    return [
        {
            "input_values": torch.randn(length, generator=generator),
            "attention_mask": torch.ones(length, dtype=torch.long),
            "labels": torch.randint(1, 9, (count,), generator=generator),
        }
        for length, count in zip(lengths, letters, strict=True)
    ]


def painter(labels: int = 5) -> nn.Module:
    torch.manual_seed(0)
    sizes: Any = {"num_labels": labels}
    config = SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 8], num_attention_heads=[1, 1],
        patch_sizes=[3, 3], strides=[2, 2], mlp_ratios=[2, 2], decoder_hidden_size=8, **sizes,
        classifier_dropout_prob=0.0, drop_path_rate=0.0,
    )  # fmt: skip
    return with_fixed_statistics(SegformerForSemanticSegmentation(config))


def pictures() -> list[dict[str, Tensor]]:
    """Pictures of whose pixels different shares have no label, which is 255."""
    generator = torch.Generator().manual_seed(1)
    rows: list[dict[str, Tensor]] = []
    for share in torch.rand(COUNT, generator=generator).tolist():
        labels = torch.randint(5, (16, 16), generator=generator)
        unknown = torch.rand(16, 16, generator=generator) < share
        pixels = torch.randn(3, 16, 16, generator=generator)
        rows.append({"pixel_values": pixels, "labels": labels.masked_fill(unknown, 255)})
    return rows


def masks() -> list[dict[str, Tensor]]:
    """Pictures with labels of one class."""
    return [{**row, "labels": torch.where(row["labels"] == 255, 255, row["labels"] % 2)} for row in pictures()]


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    values = {name: [row[name] for row in rows] for name in rows[0]}
    return {
        name: pad_sequence(parts, batch_first=True, padding_value=-100 * (name == "labels"))
        for name, parts in values.items()
    }


def trained(model: Any, rows: Any) -> tuple[Gradients, float]:
    options = arguments(per_device_train_batch_size=2, per_device_eval_batch_size=2, gradient_accumulation_steps=3)
    trainer = Trainer(model, options, train_dataset=rows, eval_dataset=rows, collate_fn=collate)
    return train(trainer), trainer.evaluate()["eval_loss"]


def by_hand(model: Any, rows: Any, size: int) -> tuple[Gradients, float]:
    expected = Gradients()
    for start in range(0, len(rows), size):
        model.zero_grad()
        loss = model(**collate(rows[start : start + size])).loss
        loss.backward()
        expected.steps.append([part.grad.clone() for part in model.parameters() if part.grad is not None])
        expected.losses.append(loss.item())
        expected.norms.append(float(torch.nn.utils.get_total_norm(expected.steps[-1])))
    with torch.no_grad():
        return expected, model.eval()(**collate(rows)).loss.item()


@pytest.mark.filterwarnings("ignore:Grad strides")  # of a convolution's gradient, under DDP
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("make", "data"),
    [(recognizer, recordings), (painter, pictures), (lambda: painter(1), masks)],
    ids=["speech recognition", "segmentation", "one class"],
)
def test_an_update_and_an_evaluation_are_those_of_one_big_batch(make: Any, data: Any, processes: int) -> None:
    rows = data()

    def body() -> tuple[Gradients, float]:
        return trained(make(), rows)

    expected, eval_loss = by_hand(make(), rows, 6 * processes)
    for actual, actual_eval_loss in run_world(body, (), processes, timeout=120) if processes > 1 else [body()]:
        assert_equal(actual, expected)
        assert actual_eval_loss == pytest.approx(eval_loss, rel=1e-6)


def test_labels_of_255_count_in_image_classification() -> None:
    """The configurations of some models have an ignored label although another head is trained."""
    small: Any = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BeitConfig(image_size=16, patch_size=8, **small)
    assert config.semantic_loss_ignore_index == 255
    trainer = Trainer(BeitForImageClassification(config), arguments(), train_dataset=pictures())
    assert trainer.num_items({"labels": torch.tensor([255, 3])}) == 2


def test_summed_ctc_losses_give_a_warning_that_names_the_setting(caplog: pytest.LogCaptureFixture) -> None:
    rows = recordings()[:6]
    with caplog.at_level(logging.WARNING):
        actual, _ = trained(recognizer("sum"), rows)
    assert sum('model.config.ctc_loss_reduction = "mean"' in record.getMessage() for record in caplog.records) == 1
    expected = by_hand(recognizer("sum"), rows, 2)[0]  # as in Hugging Face's Trainer: the mean of the micro-batches
    assert actual.losses == pytest.approx([sum(expected.losses) / 3], rel=1e-6)
