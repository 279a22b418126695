"""Built-in metrics of causal language models: each prediction is compared with the next label, as in the loss."""

import dataclasses
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.trainer.tasks import arguments
from trainer_lib import Trainer
from trainer_lib.trainer.evaluation.outputs import EvaluationOutput

WORDS = 7


def model() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    dropout: dict[str, Any] = {f"{name}_pdrop": 0.0 for name in ("resid", "embd", "attn")}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=WORDS, **sizes, **dropout))


def rows() -> dict[str, Tensor]:
    tokens = torch.randint(0, WORDS, (16, 9), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[:, :2] = -100
    labels[3, 5:] = -100
    return {"input_ids": tokens, "labels": labels}


def hits(name: str = "accuracy", shift: int = 1) -> float:
    """Return the share of labels that are right `shift` positions before, by hand."""
    data = rows()
    logits = model()(input_ids=data["input_ids"]).logits
    logits, labels = logits[:, : logits.shape[1] - shift], data["labels"][:, shift:]
    chosen = logits.topk(2 if name == "top2_accuracy" else 1).indices == labels[..., None]
    return float(chosen.any(-1)[labels != -100].float().mean())


class Shifting(Trainer):
    def evaluation_step(self, model: Any, batch: Any) -> EvaluationOutput:
        output = super().evaluation_step(model, batch)
        return dataclasses.replace(output, predictions=output.predictions[:, :-1], labels=batch["labels"][:, 1:])


class OwnLoss(Trainer):
    def compute_loss(self, model: Any, batch: Any) -> Any:
        outputs = model(**batch)
        return outputs.loss + 0.0, outputs


@pytest.mark.parametrize("kind", [Trainer, Shifting, OwnLoss])
def test_predictions_are_compared_with_the_next_labels(kind: type[Trainer]) -> None:
    def share(predictions: Tensor, labels: Tensor) -> Tensor:
        assert predictions.shape[1] == (8 if kind is Shifting else 9)  # as they are
        return labels.new_zeros(len(labels), dtype=torch.float32)

    metrics = {name: name for name in ("accuracy", "top2_accuracy", "recall_micro")} | {"share": share}
    values = kind(model(), arguments(), eval_dataset=rows(), metrics=metrics).evaluate()
    assert values["eval_accuracy"] == pytest.approx(hits(), rel=1e-6)
    assert values["eval_recall_micro"] == pytest.approx(hits(), rel=1e-6)
    assert values["eval_top2_accuracy"] == pytest.approx(hits("top2_accuracy"), rel=1e-6)
    assert hits() != pytest.approx(hits(shift=0), rel=1e-3)


def test_training_metrics_are_too() -> None:
    args = arguments(max_steps=1, learning_rate=0.0, log_every=1, per_device_train_batch_size=16)
    made = Trainer(model(), args, train_dataset=rows(), train_metrics=["accuracy"])
    assert made.fit().history[0]["accuracy"] == pytest.approx(hits(), rel=1e-6)


def test_labels_of_a_loss_function_are_those_of_the_same_positions() -> None:
    def loss(outputs: Any, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())

    made = Trainer(model(), arguments(), eval_dataset=rows(), metrics=["accuracy"], loss_fn=loss)
    assert made.evaluate()["eval_accuracy"] == pytest.approx(hits(shift=0), rel=1e-6)


def test_a_token_classifier_compares_the_same_positions() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": WORDS}
    config = transformers.BertConfig(vocab_size=WORDS, intermediate_size=8, **sizes)
    bert = transformers.BertForTokenClassification(config).eval()
    data = rows()
    chosen, valid = bert(input_ids=data["input_ids"]).logits.argmax(-1), data["labels"] != -100
    values = Trainer(bert, arguments(), eval_dataset=data, metrics=["accuracy"]).evaluate()
    expected = (chosen == data["labels"])[valid].float().mean()
    assert values["eval_accuracy"] == pytest.approx(float(expected), rel=1e-6)
