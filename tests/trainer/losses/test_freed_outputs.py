"""What a model returned is freed before its backward, unless an override or a callback can see it."""

import functools
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer.tasks import arguments
from tests.worlds import run_world
from trainer_lib import LossResult, Trainer
from trainer_lib.callbacks.throughput import Throughput
from trainer_lib.events import Callback, Dispatcher, Run
from trainer_lib.trainer.evaluation.outputs import EvaluationOutput
from trainer_lib.utils import TorchDynamoPlugin

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


def test_outputs_that_a_loss_function_returns_are_freed_too() -> None:
    def loss_fn(logits: Tensor, labels: Tensor) -> LossResult:
        return LossResult(cross_entropy(logits, labels, reduction="sum"), len(labels), {"logits": logits})

    model, callback = Classifier(has_loss=False), AfterTheBackward()
    for callbacks in ([], [callback]):
        trainer = Trainer(model, arguments(max_steps=1), train_dataset=ROWS, loss_fn=loss_fn, callbacks=callbacks)
        trainer.fit()
    assert model.kept == [False, True]
    assert len(callback.shapes) == 1


class CallsInAFunction(Trainer):
    """Computes the loss of a function around the model."""

    def compute_loss(self, model: Any, batch: Any) -> Any:
        return super().compute_loss(functools.partial(model), batch)


def test_a_compute_loss_may_put_a_function_around_a_model_with_a_loss() -> None:
    assert fitted(Classifier(has_loss=True), CallsInAFunction).run.state.step == 2


def test_a_compute_loss_put_on_the_class_trainer_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    original, seen = Trainer.compute_loss, list[torch.dtype]()

    def compute_loss(self: Trainer, model: Any, batch: Any) -> Any:
        result = original(self, model, batch)
        assert isinstance(result, LossResult)
        seen.append(result.outputs["logits"].dtype)
        return result

    monkeypatch.setattr(Trainer, "compute_loss", compute_loss)
    fitted(Classifier(has_loss=True), args={"mixed_precision": "bf16"})
    assert seen == [torch.float32, torch.float32]


def test_a_training_step_put_on_the_class_trainer_sees_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    original, shapes = Trainer.training_step, list[Sequence[int]]()

    def training_step(self: Trainer, model: Any, batch: Any) -> LossResult | None:
        result = original(self, model, batch)
        assert result is not None
        shapes.append(result.outputs["logits"].shape)
        return result

    monkeypatch.setattr(Trainer, "training_step", training_step)
    fitted(Classifier(has_loss=True))
    assert shapes == [(4, CLASSES), (4, CLASSES)]


@pytest.mark.parametrize("event", ["on_loss", "on_micro_batch_end"])
def test_a_method_set_on_a_callback_that_reads_no_outputs_sees_them(event: str) -> None:
    callback, sees = ShowsBatches(), SeesOutputs()
    setattr(callback, event, sees.see)
    fitted(Classifier(has_loss=True), callbacks=[callback])
    assert sees.shapes == [(4, CLASSES), (4, CLASSES)]


@pytest.mark.parametrize("event", ["on_loss", "on_micro_batch_end"])
def test_a_method_put_on_the_class_of_a_callback_sees_outputs(monkeypatch: pytest.MonkeyPatch, event: str) -> None:
    shapes: list[Sequence[int]] = []
    monkeypatch.setattr(Throughput, event, lambda self, run: shapes.append(run.outputs["logits"].shape))
    fitted(Classifier(has_loss=True))
    assert shapes == [(4, CLASSES), (4, CLASSES)]


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


def test_forward_hooks_of_a_model_see_fp32() -> None:
    """They did before a Trainer left logits in 16 bits, and can compute a loss from them."""
    model, dtypes = LossOfHalves(), list[torch.dtype]()

    def add(module: nn.Module, inputs: Any, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        del module, inputs
        dtypes.append(outputs["logits"].dtype)
        return {**outputs, "loss": outputs["loss"] + outputs["logits"].square().mean()}

    model.register_forward_hook(add)
    trainer = fitted(model, args={"mixed_precision": "bf16"})
    trainer.evaluate(ROWS)
    assert set(dtypes) == {torch.float32}


class HooksModel(Callback):
    """Sets a forward hook on all modules, on the model as it is prepared (by DDP), or on a compiled one."""

    def __init__(self, where: str) -> None:
        self._where, self.dtypes = where, list[torch.dtype]()

    def on_fit_begin(self, run: Run) -> None:
        model: Any = {"prepared": run.model, "compiled": run.trainer.model}.get(self._where)
        self._handle = (
            register_module_forward_hook(self._see) if model is None else model.register_forward_hook(self._see)
        )

    def on_fit_end(self, run: Run) -> None:
        self._handle.remove()

    def _see(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if isinstance(outputs, dict):
            self.dtypes.append(outputs["logits"].dtype)


@pytest.mark.parametrize(("where", "processes"), [("everywhere", 1), ("compiled", 1), ("prepared", 2)])
def test_forward_hooks_around_a_model_see_fp32(where: str, processes: int) -> None:
    def body() -> list[torch.dtype]:
        model, hooks = LossOfHalves(), HooksModel(where)
        given = torch.compile(model, backend="eager") if where == "compiled" else model
        fitted(given, callbacks=[hooks], args={"mixed_precision": "bf16"})
        return hooks.dtypes

    for dtypes in run_world(body, (), processes) if processes > 1 else [body()]:
        assert dtypes
        assert set(dtypes) == {torch.float32}


@pytest.mark.parametrize("precision", ["bf16", "bf16-true"])
def test_a_prepared_model_that_another_calls_returns_fp32(precision: str) -> None:
    """Only the outer model's outputs stay in 16 bits: the loss is computed from those of the inner one."""
    dtypes: list[torch.dtype] = []

    class Student(LossOfHalves):
        def __init__(self) -> None:
            super().__init__()
            self.teachers: list[nn.Module] = []  # not a part of the model

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            outputs = super().forward(inputs, labels)
            for teacher in self.teachers:
                targets = teacher(inputs, labels)["logits"].detach()
                dtypes.append(targets.dtype)
                outputs["loss"] = outputs["loss"] + (outputs["logits"] - targets).square().mean()
            return outputs

    student = Student()
    args = arguments(max_steps=1, per_device_train_batch_size=4, mixed_precision=precision)
    trainer = Trainer(student, args, train_dataset=ROWS)
    student.teachers.append(trainer.accelerator.prepare_model(LossOfHalves(), evaluation_mode=True))
    trainer.fit()
    trainer.evaluate(ROWS)
    assert set(dtypes) == {torch.float32}


class Evaluated(Classifier):
    """Remembers in each forward without gradients whether the outputs of the one before are still in memory."""

    def __init__(self, has_loss: bool) -> None:
        super().__init__(has_loss)
        self._outputs: Any = lambda: None

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
        if not torch.is_grad_enabled():
            self.kept.append(self._outputs() is not None)
        return super().forward(inputs, labels)


class SeesEvaluations(SeesOutputs):
    """Sees the predictions of each batch."""

    def on_evaluate_batch_end(self, run: Run) -> None:
        self.see(run)


class ShowsBatches(Callback):
    """Listens to each batch, and looks at no outputs."""

    reads_outputs = False

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def on_evaluate_batch_end(self, run: Run) -> None:
        self.outputs.append(run.outputs)


class ShowsOutputs(ShowsBatches):
    """Derived from one that reads none, and reads them."""


def evaluated(model: Any, callbacks: Sequence[Callback] = (), **options: Any) -> dict[str, float]:
    args = arguments(per_device_eval_batch_size=4, mixed_precision=options.pop("precision", "no"))
    loss_fn = None if getattr(model, "has_loss", True) else cross_entropy
    return Trainer(model, args, loss_fn=loss_fn, callbacks=callbacks, **options).evaluate(ROWS)


@pytest.mark.parametrize("options", [{}, {"metrics": "accuracy"}, {"callbacks": [SeesEvaluations()]}])
@pytest.mark.parametrize("has_loss", [True, False])
def test_outputs_of_an_evaluation_are_freed_before_the_next_batch(has_loss: bool, options: dict[str, Any]) -> None:
    model = Evaluated(has_loss)
    evaluated(model, **options)
    assert model.kept == [False, False]


@pytest.mark.parametrize("has_labels", [True, False])
def test_predictions_are_freed_before_the_next_batch(has_labels: bool) -> None:
    model = Evaluated(has_loss=True)
    rows = ROWS if has_labels else [{"inputs": row["inputs"]} for row in ROWS]
    predictions = Trainer(model, arguments(per_device_eval_batch_size=4)).predict(rows).predictions
    assert predictions.shape == (8, CLASSES)
    assert model.kept == [False, False]


def test_a_callback_may_evaluate_between_two_batches_of_a_prediction() -> None:
    class EvaluatesOnce(Callback):
        losses: ClassVar[list[float]] = []

        def on_predict_batch_end(self, run: Run) -> None:
            if not self.losses:
                self.losses.append(run.trainer.evaluate(ROWS)["eval_loss"])

    args = arguments(per_device_eval_batch_size=4)
    alone = Trainer(Classifier(has_loss=True), args).predict(ROWS).predictions
    between = Trainer(Classifier(has_loss=True), args, callbacks=[EvaluatesOnce()]).predict(ROWS).predictions
    assert len(EvaluatesOnce.losses) == 1
    assert (between == alone).all()


def test_callbacks_see_predictions_of_an_evaluation() -> None:
    callback, shows, derived = SeesEvaluations(), ShowsBatches(), ShowsOutputs()
    evaluated(Classifier(has_loss=True), [callback])
    assert callback.shapes == [(4, CLASSES), (4, CLASSES)]
    evaluated(Classifier(has_loss=True), [shows])
    assert shows.outputs == [None, None]
    evaluated(Classifier(has_loss=True), [derived])
    assert [outputs.shape for outputs in derived.outputs] == [(4, CLASSES), (4, CLASSES)]


def test_outputs_are_freed_again_once_their_reader_is_gone() -> None:
    dispatcher = Dispatcher([AtTheLoss(), ShowsBatches()])
    assert dispatcher.outputs_readers == {"on_loss"}
    dispatcher.remove(AtTheLoss)
    assert dispatcher.outputs_readers == set()


def test_an_own_evaluation_step_is_called_where_only_the_loss_is_measured() -> None:
    class Twice(Trainer):
        def evaluation_step(self, model: Any, batch: Any) -> EvaluationOutput:
            output = super().evaluation_step(model, batch)
            assert output.predictions.shape == (4, CLASSES)
            assert output.loss_sum is not None
            return replace(output, loss_sum=2 * output.loss_sum)

    (once, twice) = (
        kind(Classifier(has_loss=True), arguments(per_device_eval_batch_size=4)).evaluate(ROWS)["eval_loss"]
        for kind in (Trainer, Twice)
    )
    assert twice == pytest.approx(2 * once)


@pytest.mark.slow
def test_a_compiled_model_compiles_once_whether_predictions_are_seen_or_not() -> None:
    graphs: list[bool] = []

    def count(graph: Any, inputs: list[Tensor]) -> Any:
        del inputs
        graphs.append(torch.is_grad_enabled())
        return graph.forward

    plugin = TorchDynamoPlugin(backend=count)
    args = arguments(max_steps=2, per_device_train_batch_size=4, mixed_precision="bf16", compile=plugin)
    trainer = Trainer(LossOfHalves(), args, train_dataset=ROWS)
    trainer.fit()
    trainer.evaluate(ROWS)
    trainer.predict(ROWS)
    assert graphs == [True, False]


@pytest.mark.parametrize("precision", ["bf16", "bf16-true"])
def test_predictions_become_fp32_only_where_somebody_sees_them(precision: str) -> None:
    """The loss is the same, to the bit."""
    found: list[tuple[int, float]] = []
    cases: list[dict[str, Any]] = [{}, {"callbacks": [ShowsBatches()]}, {"metrics": "accuracy"}]
    for options in (*cases, {"callbacks": [SeesEvaluations()]}):
        torch.manual_seed(0)
        with CountsConversions() as counter:
            metrics = evaluated(LossOfHalves(), precision=precision, **options)
        found.append((counter.count, metrics["eval_loss"]))
    assert [count for count, _ in found] == [0, 0, 2, 2]
    assert len({loss for _, loss in found}) == 1


@pytest.mark.parametrize("precision", ["bf16", "bf16-true"])
def test_who_calls_the_model_between_steps_gets_fp32(precision: str) -> None:
    dtypes: list[torch.dtype] = []

    class Calls(Callback):
        def on_step_end(self, run: Run) -> None:
            model: Any = run.model
            dtypes.append(model(**run.batch)["logits"].dtype)

    fitted(LossOfHalves(), callbacks=[Calls()], args={"mixed_precision": precision})
    assert dtypes == [torch.float32, torch.float32]
