"""What a model returned is freed before its backward, unless an override or a callback can see it."""

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer.tasks import arguments
from trainer_lib import LossResult, Trainer
from trainer_lib.events import Callback, Run

CLASSES = 5
ROWS = [{"inputs": row, "labels": torch.tensor(1)} for row in torch.randn(8, 3, generator=torch.Generator())]


class Classifier(nn.Module):
    """Remembers in each backward whether its last outputs are still in memory."""

    def __init__(self, has_loss: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, CLASSES)
        self.has_loss = has_loss
        self.kept: list[bool] = []
        self.layer.weight.register_post_accumulate_grad_hook(lambda _: self.kept.append(self._outputs() is not None))

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.layer(inputs)
        self._outputs = weakref.ref(logits)
        return (
            {"loss": cross_entropy(logits, labels), "logits": logits}
            if self.has_loss and labels is not None
            else logits
        )


class SeesOutputs(Callback):
    """Keeps the shapes of what models returned."""

    def __init__(self) -> None:
        self.shapes: list[Sequence[int]] = []

    def see(self, run: Run) -> None:
        outputs = run.outputs
        self.shapes.append((outputs["logits"] if isinstance(outputs, dict) else outputs).shape)


class AtTheLoss(SeesOutputs):
    """Sees them before the backward."""

    def on_loss(self, run: Run) -> None:
        self.see(run)


class AfterTheBackward(SeesOutputs):
    """Sees them after it."""

    def on_micro_batch_end(self, run: Run) -> None:
        self.see(run)


class WithOutputs(Trainer):
    """Returns the outputs beside the loss."""

    def compute_loss(self, model: Any, batch: Any) -> Any:
        outputs = model(batch["inputs"])
        return cross_entropy(outputs, batch["labels"]), outputs


class WithOwnStep(Trainer):
    """Looks at the outputs of a step."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.shapes: list[Sequence[int]] = []

    def training_step(self, model: Any, batch: Any) -> LossResult | None:
        result = super().training_step(model, batch)
        assert result is not None
        self.shapes.append(result.outputs["logits"].shape)
        return result


def fitted(model: Any, kind: type[Trainer] = Trainer, **options: Any) -> Trainer:
    args = {"max_steps": 2, "per_device_train_batch_size": 4, **options.pop("args", {})}
    trainer = kind(
        model,
        arguments(**args),
        train_dataset=ROWS,
        loss_fn=None if getattr(model, "has_loss", True) else cross_entropy,
        **options,
    )
    trainer.fit()
    return trainer


@pytest.mark.parametrize("precision", ["no", "bf16", "bf16-true"])
@pytest.mark.parametrize("has_loss", [True, False])
def test_outputs_are_freed_before_the_backward(has_loss: bool, precision: str) -> None:
    model = Classifier(has_loss)
    fitted(model, args={"mixed_precision": precision})
    assert model.kept == [False, False]


def test_outputs_that_compute_loss_returns_are_freed_too() -> None:
    model = Classifier(has_loss=False)
    fitted(model, WithOutputs)
    assert model.kept == [False, False]


@pytest.mark.parametrize("has_loss", [True, False])
@pytest.mark.parametrize("kind", [AtTheLoss, AfterTheBackward])
def test_callbacks_see_outputs(kind: type[SeesOutputs], has_loss: bool) -> None:
    model, callback = Classifier(has_loss), kind()
    fitted(model, callbacks=[callback])
    assert callback.shapes == [(4, CLASSES), (4, CLASSES)]
    assert model.kept == [True, True]


def test_metrics_of_training_batches_are_measured() -> None:
    trainer = fitted(Classifier(has_loss=True), train_metrics="accuracy", args={"log_every": 1})
    assert all(0 <= entry["accuracy"] <= 1 for entry in trainer.state.history if "loss" in entry)


def test_an_own_training_step_sees_outputs() -> None:
    trainer = fitted(Classifier(has_loss=True), WithOwnStep)
    assert trainer.shapes == [(4, CLASSES), (4, CLASSES)]  # type: ignore[attr-defined]


class CountsConversions(TorchDispatchMode):
    """Counts tensors of the size of the logits that become fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        is_conversion = function is torch.ops.aten._to_copy.default and result.dtype == torch.float32
        self.count += is_conversion and result.shape == (4, CLASSES) and args[0].dtype == torch.bfloat16
        return result


class LossOfHalves(nn.Module):
    """Computes its loss without converting logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, CLASSES)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        del labels
        logits = self.layer(inputs)
        return {"loss": logits[:, 0].sum() * 1e-3, "logits": logits}


@pytest.mark.parametrize("precision", ["bf16", "bf16-true"])
def test_logits_become_fp32_only_where_somebody_sees_them(precision: str) -> None:
    """The loss that the model returns is fp32 either way."""
    counts, dtypes = [], []

    class LooksAtLoss(Callback):
        def on_step_end(self, run: Run) -> None:
            assert run.loss_sum is not None
            dtypes.append(run.loss_sum.dtype)

    for callbacks in ([LooksAtLoss()], [LooksAtLoss(), AfterTheBackward()]):
        with CountsConversions() as counter:
            fitted(LossOfHalves(), callbacks=callbacks, args={"mixed_precision": precision})
        counts.append(counter.count)
    assert counts == [0, 2]
    assert set(dtypes) == {torch.float32}


@pytest.mark.parametrize("precision", ["bf16", "bf16-true"])
def test_who_calls_the_model_between_steps_gets_fp32(precision: str) -> None:
    dtypes: list[torch.dtype] = []

    class Calls(Callback):
        def on_step_end(self, run: Run) -> None:
            model: Any = run.model
            dtypes.append(model(**run.batch)["logits"].dtype)

    fitted(LossOfHalves(), callbacks=[Calls()], args={"mixed_precision": precision})
    assert dtypes == [torch.float32, torch.float32]
