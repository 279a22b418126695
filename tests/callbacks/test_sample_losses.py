"""Tests of the losses of training samples."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from tests.callbacks.loops import folder_of
from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import run_world
from trainer_lib import Trainer
from trainer_lib.callbacks import SampleLosses, top_losses
from trainer_lib.events import Run
from trainer_lib.foundation.errors import ConfigurationError


def test_the_largest_losses_are_those_of_the_model(tmp_path: Path) -> None:
    inputs, labels = points()
    losses = SampleLosses(top=5)
    model = network()
    args = arguments(output_dir=tmp_path, learning_rate=0.0, num_train_epochs=1)
    trainer(args, model=model, callbacks=[losses]).fit()
    with torch.no_grad():
        each = cross_entropy(model(inputs), labels, reduction="none")
    values, order = each.sort(descending=True)
    assert [sample for sample, _ in losses.top(40)] == order.tolist()
    assert [loss for _, loss in losses.top(40)] == pytest.approx(values.tolist(), rel=1e-5)
    assert [sample for sample, _ in top_losses(folder_of(tmp_path))] == order[:5].tolist()
    history = [json.loads(line) for line in (folder_of(tmp_path) / "history.jsonl").read_text().splitlines()]
    (message,) = [line for line in history if line["event"] == "top_losses"]
    assert message["indices"] == order[:5].tolist()


def test_custom_losses_and_losses_of_all_ranks(tmp_path: Path) -> None:
    def own_loss(batch: Any, outputs: Any) -> Tensor:
        del outputs
        return batch[0][:, 0]

    def body() -> None:
        args = arguments(output_dir=tmp_path, num_train_epochs=1, per_device_train_batch_size=4)
        trainer(args, callbacks=[SampleLosses(top=40, losses=own_loss)]).fit()

    run_world(body, timeout=60)
    first = points()[0][:, 0]
    assert [sample for sample, _ in top_losses(folder_of(tmp_path), 40)] == first.argsort(descending=True).tolist()


@pytest.mark.parametrize(
    ("outputs", "targets", "expected"),
    [
        (torch.tensor([[1.0, 3.0], [0.0, 0.0]]), torch.tensor([[1.0, 1.0], [0.0, 2.0]]), [2.0, 2.0]),
        (torch.tensor([[2.0], [0.0]]), torch.tensor([1.0, 0.0]), [1.0, 0.0]),
        (torch.zeros(2, 3, 4), torch.tensor([[1, 2, 0], [1, -100, -100]]), [1.3862944] * 2),
        (torch.zeros(2, 4, 3), torch.tensor([[1, 2, 0], [1, -100, -100]]), [1.3862944] * 2),
    ],
    ids=["squares", "one number each", "texts", "images"],
)
def test_losses_of_samples_by_kind(outputs: Tensor, targets: Tensor, expected: list[float]) -> None:
    run = Run(batch={"inputs": outputs, "labels": targets}, outputs={"logits": outputs})
    assert SampleLosses()._of_samples(run).tolist() == pytest.approx(expected)


def test_losses_are_those_of_loss_fn(tmp_path: Path) -> None:
    inputs, labels = points()
    sides = torch.stack([1.0 - labels, labels.float()], dim=1)
    for loss_fn in (
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 3.0])),
        partial(binary_cross_entropy_with_logits, pos_weight=torch.tensor([1.0, 3.0])),
    ):
        losses, model = SampleLosses(), network()
        args = arguments(learning_rate=0.0, num_train_epochs=1)
        trainer(args, model=model, train_dataset=(inputs, sides), loss_fn=loss_fn, callbacks=[losses]).fit()
        weight = torch.tensor([1.0, 3.0])
        with torch.no_grad():
            each = binary_cross_entropy_with_logits(model(inputs), sides, pos_weight=weight, reduction="none").mean(1)
        assert dict(losses.top(40)) == pytest.approx(dict(enumerate(each.tolist())), rel=1e-5)


@pytest.mark.parametrize(
    "loss_fn", [nn.CrossEntropyLoss(ignore_index=0), partial(cross_entropy, ignore_index=0)], ids=["module", "function"]
)
def test_targets_that_loss_fn_ignores_do_not_count(loss_fn: Any) -> None:
    targets = torch.tensor([[1, 2, 0, 0], [1, 2, 3, 1]])
    losses, model = SampleLosses(), nn.Conv1d(3, 4, 1)
    inputs = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    args = arguments(learning_rate=0.0, num_train_epochs=1)
    trainer(args, model=model, train_dataset=(inputs, targets), loss_fn=loss_fn, callbacks=[losses]).fit()
    with torch.no_grad():
        each = [float(loss_fn(model(row[None]), target[None])) for row, target in zip(inputs, targets, strict=True)]
    assert dict(losses.top(2)) == pytest.approx(dict(enumerate(each)), rel=1e-5)


def test_losses_of_nan_come_first(tmp_path: Path) -> None:
    def own_loss(batch: Any, outputs: Any) -> Tensor:
        del outputs
        return batch[0][:, 0]

    inputs, labels = points()
    inputs = inputs.clone()
    inputs[[0, 7], 0] = torch.nan
    losses = SampleLosses(top=5, losses=own_loss)
    args = arguments(output_dir=tmp_path, num_train_epochs=1, learning_rate=0.0, on_nonfinite="skip")
    trainer(args, train_dataset=(inputs, labels), callbacks=[losses]).fit()
    order = inputs[:, 0].nan_to_num(torch.inf).argsort(descending=True, stable=True).tolist()
    top = [sample for sample, _ in losses.top(5)]
    assert (sorted(top[:2]), top[2:]) == ([0, 7], order[2:5])
    assert [sample for sample, _ in top_losses(folder_of(tmp_path), 5)] == top


def test_a_loss_without_reduction_option_ends_the_run() -> None:
    def own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets)

    with pytest.raises(
        ConfigurationError, match=r"needs a loss_fn with a `reduction` option\. Give SampleLosses\(losses=…\)"
    ):
        trainer(loss_fn=own_loss, callbacks=[SampleLosses()]).fit()

    class WithoutOutputs(Trainer):
        def compute_loss(self, model: Any, batch: Any) -> Tensor:
            return cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(ConfigurationError, match="needs outputs and targets in one tensor each"):
        WithoutOutputs(network(), arguments(), train_dataset=points(), callbacks=[SampleLosses()]).fit()


def test_split_batches_are_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            if len(inputs) > 16:
                raise torch.OutOfMemoryError("out of memory")
            return self.inner(inputs)

    losses = SampleLosses()
    args = arguments(per_device_train_batch_size="auto", global_batch_size=20)
    result = trainer(args, model=Large(), callbacks=[losses]).fit()
    assert result.status == "finished"
    assert losses.top(1) == []
    assert caplog.text.count("SampleLosses leaves out batches that are split") == 1


def test_losses_of_texts_are_those_of_the_model_that_compares_them_itself() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    tokens = torch.randint(20, (6, 5), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[0, :3] = labels[1, 4] = -100
    losses = SampleLosses()
    args = arguments(learning_rate=0.0, num_train_epochs=1, per_device_train_batch_size=3)
    data = {"input_ids": tokens, "labels": labels}
    for dropout in (module for module in model.modules() if isinstance(module, nn.Dropout)):
        dropout.p = 0.0
    trainer(args, model=model, train_dataset=data, loss_fn=None, callbacks=[losses]).fit()
    with torch.no_grad():
        rows = zip(tokens, labels, strict=True)
        each = [float(model(input_ids=row[None], labels=label[None]).loss) for row, label in rows]
    assert dict(losses.top(6)) == pytest.approx(dict(enumerate(each)), rel=1e-5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: SampleLosses(top=0), r"SampleLosses\(top\) must be .*\(got 0\)"),
        (lambda: SampleLosses(losses=3), r"SampleLosses\(losses\) must be .*\(got 3\)"),  # type: ignore[arg-type]
    ],
)
def test_bad_options_are_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        wrong()


def test_losses_of_another_shape_end_the_run() -> None:
    callback = SampleLosses(losses=lambda batch, outputs: outputs)
    with pytest.raises(ConfigurationError, match=r"needs losses of shape \(8,\), one per sample \(got \(8, 2\)\)"):
        trainer(callbacks=[callback]).fit()
