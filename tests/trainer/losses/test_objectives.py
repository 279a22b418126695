"""Losses as sums with weights, from loss functions and from models."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.trainer.tasks import arguments, network, points
from trainer_lib import ConfigurationError, LossResult, Trainer, TrainingArguments
from trainer_lib.precision.base import FullPrecision
from trainer_lib.state.accumulation_window import sum_from_mean
from trainer_lib.trainer.losses.label_shift import is_shifted_by_name
from trainer_lib.trainer.losses.loss_result import summed
from trainer_lib.trainer.losses.model_io import call_model, count_items
from trainer_lib.trainer.losses.objectives import LossFunction, ModelLoss, without_cache

INPUTS, TARGETS = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, -100, 2])
BATCH = {"inputs": INPUTS, "labels": TARGETS}


class Dividing(nn.Module):
    """A model like those of transformers: its loss is a sum divided by a given number, or a mean."""

    uses_items = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 5)
        self.given: list[Any] = []

    def loss_function(self) -> None:
        """The attribute by which models of transformers are recognized."""

    def forward(self, inputs: Tensor, labels: Tensor | None = None, **options: Any) -> dict[str, Tensor]:
        scores = self.layer(inputs)
        if labels is None:
            return {"logits": scores}
        items = options.get("num_items_in_batch")
        self.given.append(items)
        if items is None or not self.uses_items:
            return {"logits": scores, "loss": cross_entropy(scores, labels)}
        return {"logits": scores, "loss": cross_entropy(scores, labels, reduction="sum") / items}


class Ignoring(Dividing):
    uses_items = False


def model_loss(model: nn.Module) -> ModelLoss:
    return ModelLoss(model, count_items, FullPrecision())


def loss_sum(objective: ModelLoss, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    """Return a loss as the Trainer completes it: a mean has no weight yet."""
    result = objective(model, batch)
    if result.weight is not None:
        return result.loss, result.weight
    weight = count_items(batch)
    return sum_from_mean(result.loss, weight), weight


@pytest.mark.parametrize("cls", [Dividing, Ignoring])
def test_a_mean_becomes_a_sum_for_all_kinds_of_models(cls: type[Dividing]) -> None:
    model = cls()
    objective = model_loss(model)
    wanted = cross_entropy(model.layer(INPUTS), TARGETS, reduction="sum")
    wanted.backward()
    assert model.layer.weight.grad is not None
    gradient = model.layer.weight.grad.clone()
    for _ in range(3):
        loss, weight = loss_sum(objective, model, BATCH)
        assert weight == 3
        torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
        model.zero_grad()
        loss.backward()
        torch.testing.assert_close(model.layer.weight.grad, gradient, rtol=1e-6, atol=1e-7)


def test_a_model_that_ignores_num_items_gets_it_only_once() -> None:
    model = Ignoring()
    objective = model_loss(model)
    for _ in range(3):
        objective(model, BATCH)
    assert [num_items is None for num_items in model.given] == [False, True, True]


class Strict(Dividing):
    """A model that passes what it gets on to a module that takes nothing but its input."""

    def forward(self, inputs: Tensor, labels: Tensor | None = None, **options: Any) -> dict[str, Tensor]:
        scores = self.layer(inputs, **options)
        return {"logits": scores, "loss": scores.square().mean() if labels is None else cross_entropy(scores, labels)}


class Declared(Strict):
    accepts_loss_kwargs = False  # as models of transformers say


class Adapter(nn.Module):
    """A model like those of PEFT: its forward takes any names, the model within may not."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.strict = Strict()

        def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            return self.strict(inputs, labels)

        def loss_function(self) -> None:
            """As in models of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()
        self.loss_function = self.inner.loss_function

    def get_base_model(self) -> nn.Module:
        return self.inner

    def forward(self, **batch: Any) -> dict[str, Tensor]:
        return self.inner(**batch)


@pytest.mark.parametrize(
    ("cls", "batch"),
    [
        (Strict, {"inputs": INPUTS}),
        (Strict, {"inputs": INPUTS, "labels": None}),
        (Declared, BATCH),
        (Adapter, BATCH),
    ],
    ids=["no labels", "labels of None", "declared", "within an adapter"],
)
def test_a_model_that_takes_no_number_of_items_gets_none(cls: type[nn.Module], batch: dict[str, Any]) -> None:
    model = cls()
    result = model_loss(model)(model, batch)
    assert result.weight is None  # the mean of the model
    torch.testing.assert_close(result.loss, model(**batch)["loss"])


def test_names_of_labels_tell_which_batches_have_a_number_of_items() -> None:
    class Renaming(Dividing):
        def forward(self, inputs: Tensor, classes: Tensor, **options: Any) -> dict[str, Tensor]:  # type: ignore[override]
            return super().forward(inputs, classes, **options)

    model = Renaming()
    batch = {"inputs": INPUTS, "classes": TARGETS}
    objective = ModelLoss(model, lambda _: count_items(BATCH), FullPrecision(), label_names=["classes"])
    assert objective(model, batch).weight == 3
    assert model.given[0].item() == 3


def test_a_model_that_divides_gets_the_number_of_valid_items() -> None:
    model = Dividing()
    objective = model_loss(model)
    for _ in range(2):
        objective(model, BATCH)
    assert [num_items.item() for num_items in model.given] == [3, 3]
    assert [num_items.requires_grad for num_items in model.given] == [True, False]  # asked once


def test_hooks_on_outputs_run_in_the_backward_alone() -> None:
    model, calls = Dividing(), list[float]()
    model.register_forward_hook(lambda *values: values[-1]["loss"].register_hook(calls.append) and None)
    loss = model_loss(model)(model, BATCH).loss
    assert calls == []
    loss.backward()
    assert len(calls) == 1


@pytest.mark.parametrize("cls", [Dividing, Ignoring])
def test_a_batch_without_valid_items_has_loss_zero(cls: type[Dividing]) -> None:
    model = cls()
    objective = model_loss(model)
    for _ in range(2):  # the first batch too
        loss, weight = loss_sum(objective, model, {"inputs": INPUTS, "labels": torch.full((4,), -100)})
        assert (loss.item(), weight) == (0.0, 0.0)
        loss.backward()
        assert model.layer.weight.grad is not None
        assert not model.layer.weight.grad.any()


@torch.no_grad()
def test_in_evaluations_the_model_computes_the_mean_itself() -> None:
    model = Dividing()
    loss, _ = loss_sum(model_loss(model), model, BATCH)
    assert model.given == [None]
    torch.testing.assert_close(loss, cross_entropy(model.layer(INPUTS), TARGETS, reduction="sum"))


def test_without_labels_there_is_no_loss() -> None:
    model = Dividing()
    outputs, result = model_loss(model).evaluate(model, {"inputs": INPUTS})
    assert result is None
    torch.testing.assert_close(outputs["logits"], model.layer(INPUTS))

    function = LossFunction(cross_entropy, model.layer, None)
    outputs, result = function.evaluate(model.layer, {"input": INPUTS})
    assert result is None
    torch.testing.assert_close(outputs, model.layer(INPUTS))


def test_items_of_a_loss_function_of_torch_are_counted() -> None:
    layer = Dividing().layer
    result = LossFunction(nn.CrossEntropyLoss(ignore_index=1), layer, None)(layer, (INPUTS, TARGETS.clamp(min=0)))
    wanted = cross_entropy(layer(INPUTS), TARGETS.clamp(min=0), ignore_index=1, reduction="sum")
    torch.testing.assert_close(result.loss, wanted)
    assert result.weight == 3
    assert result.outputs.shape == (4, 5)


def test_a_loss_function_may_return_its_weight() -> None:
    layer = Dividing().layer

    def loss_fn(outputs: Tensor, targets: Tensor) -> LossResult:
        return LossResult(outputs.sum(), weight=2, logs={"largest": outputs.max()})

    result = LossFunction(loss_fn, layer, None)(layer, (INPUTS, TARGETS))
    assert result.weight == 2
    torch.testing.assert_close(result.outputs, layer(INPUTS))
    assert result.logs is not None


class PerItem(nn.Module):
    """A sum over a number of items, or a plain sum: the form of `compute_loss_func` of Hugging Face's Trainer."""

    def forward(self, scores: Tensor, targets: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
        loss = cross_entropy(scores, targets, reduction="sum")
        return loss if num_items_in_batch is None else loss / num_items_in_batch


def per_item(scores: Tensor, targets: Tensor, *, num_items_in_batch: Tensor) -> Tensor:
    return PerItem()(scores, targets, num_items_in_batch)


def ignoring_items(scores: Tensor, targets: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    return cross_entropy(scores, targets)


@pytest.mark.parametrize("loss_fn", [PerItem(), per_item, ignoring_items])
def test_a_loss_function_that_takes_num_items_in_batch_gets_it(loss_fn: Any, caplog: pytest.LogCaptureFixture) -> None:
    inputs, targets = points(22)
    targets = targets.masked_fill(torch.arange(22) % 3 == 0, -100)
    targets[:4] = -100  # a micro-batch without targets

    def losses(loss_fn: Any) -> tuple[list[float], float, str]:
        args = arguments(num_train_epochs=1, per_device_train_batch_size=4, gradient_accumulation_steps=2)
        data = (inputs, targets)
        trainer = Trainer(network(), args, train_dataset=data, eval_dataset=data, loss_fn=loss_fn)
        history = trainer.fit().history
        logged = [entry["loss"] for entry in history if "loss" in entry]
        return logged, trainer.evaluate()["eval_loss"], trainer.parts.loss.describe()

    wanted, wanted_eval, _ = losses(cross_entropy)
    logged, evaluated, text = losses(loss_fn)
    assert wanted
    assert logged == pytest.approx(wanted, rel=1e-6)
    assert evaluated == pytest.approx(wanted_eval, rel=1e-6)
    assert "averaged over all targets" in text
    assert "is not a mean" not in caplog.text


def test_a_custom_loss_function_gets_the_outputs_unchanged() -> None:
    model = Dividing()
    seen: list[Any] = []

    def loss_fn(outputs: Any, targets: Tensor) -> Tensor:
        seen.append(outputs)
        return cross_entropy(outputs["logits"], targets)

    result = LossFunction(loss_fn, model, None)(model, BATCH)
    assert list(seen[0]) == ["logits"]
    assert result.weight is None  # a mean over what num_items counts


def test_causal_models_are_recognized_inside_adapters() -> None:
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    causal = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=13))

    class Adapted(nn.Module):
        def get_base_model(self) -> nn.Module:
            return causal

    assert is_shifted_by_name(causal)
    assert is_shifted_by_name(Adapted())
    assert not is_shifted_by_name(nn.Linear(2, 2))
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    assert not is_shifted_by_name(BertForMaskedLM(BertConfig(**sizes, intermediate_size=16, vocab_size=13)))


LOGITS = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("loss_fn", "outputs", "targets"),
    [
        (nn.MultiLabelSoftMarginLoss(), LOGITS, (LOGITS > 0).float()),
        (nn.functional.multilabel_soft_margin_loss, LOGITS[:, 0], (LOGITS[:, 0] > 0).float()),
        (nn.PoissonNLLLoss(), LOGITS[:, :1], LOGITS.abs()),
        (nn.PoissonNLLLoss(), LOGITS[:, :1], LOGITS.abs()[:, :, :1]),
        (nn.PoissonNLLLoss(), LOGITS[:, :, :1], LOGITS.abs()[:, :1]),
        (nn.functional.soft_margin_loss, LOGITS, LOGITS[:, :1].sign()),
        (nn.HingeEmbeddingLoss(), LOGITS[:, :, :1], LOGITS[:, :1].sign()),
        (nn.functional.smooth_l1_loss, LOGITS[:, :, :1], LOGITS[:, :1]),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_losses_of_parts_add_up_to_that_of_the_whole_batch(loss_fn: Any, outputs: Tensor, targets: Tensor) -> None:
    total = summed(loss_fn)
    assert total is not None
    parts = [total(outputs[start:stop], targets[start:stop]) for start, stop in ((0, 2), (2, 5))]
    mean = sum(loss for loss, _ in parts) / sum(weight for _, weight in parts)
    torch.testing.assert_close(mean, loss_fn(outputs, targets), rtol=1e-6, atol=0)


@pytest.mark.parametrize("loss_fn", [F.mse_loss, F.l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits])
def test_weights_of_elements_divide_a_mean_as_in_torch(loss_fn: Any) -> None:
    weighted = functools.partial(loss_fn, weight=LOGITS.abs())
    targets = (LOGITS > 0).float()
    total = summed(weighted)
    assert total is not None
    loss, weight = total(LOGITS, targets)
    torch.testing.assert_close(loss / weight, weighted(LOGITS, targets), rtol=1e-6, atol=0)


@pytest.mark.parametrize("targets", [[0, 1, 2, 3, 0], [1, 1, 1, 1, 1], [3, 255, 3, 3, 0]])
def test_targets_in_bytes_have_the_weights_of_their_classes(targets: list[int]) -> None:
    """As an index, bytes are a mask for torch."""
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]), ignore_index=255)
    classes = torch.tensor(targets, dtype=torch.uint8)
    total = summed(loss_fn)
    assert total is not None
    loss, weight = total(LOGITS[:, 0], classes)
    torch.testing.assert_close(loss / weight, loss_fn(LOGITS[:, 0], classes.long()), rtol=1e-6, atol=0)


def test_no_class_in_bytes_is_taken_for_the_ignored_label() -> None:
    """As a byte, -100 is 156."""
    assert count_items({"labels": torch.full((2, 3), 156, dtype=torch.uint8)}) == 6
    logits, targets = torch.randn(300, 160), torch.arange(300) % 160
    total = summed(nn.CrossEntropyLoss(weight=torch.arange(160.0)))
    assert total is not None
    for each in (targets, targets.to(torch.uint8)):
        loss, weight = total(logits, each)
        torch.testing.assert_close(loss / weight, cross_entropy(logits, targets, torch.arange(160.0)))


def test_changed_attributes_of_a_loss_module_take_effect() -> None:
    """Changed smoothing or class weights take effect; a reduction other than a mean is refused."""
    loss_fn = nn.CrossEntropyLoss()
    total = summed(loss_fn)
    assert total is not None
    logits, targets = LOGITS[:, 0], torch.tensor([0, 1, 2, 3, 0])
    for name, value in (("label_smoothing", 0.3), ("weight", torch.tensor([1.0, 2.0, 3.0, 4.0])), ("ignore_index", 3)):
        setattr(loss_fn, name, value)
        loss, weight = total(logits, targets)
        torch.testing.assert_close(loss / weight, loss_fn(logits, targets), rtol=1e-6, atol=0)
        assert loss_fn.reduction == "mean"
    loss_fn.reduction = "sum"
    with pytest.raises(ConfigurationError, match=r"\(got 'sum'\)"):
        total(logits, targets)


@pytest.mark.parametrize(
    "value", [None, 0.5, torch.ones(2), (torch.ones(2), torch.ones(2)), LossResult(torch.ones(2), 2)]
)
def test_a_compute_loss_without_a_scalar_tensor_is_an_error(value: Any) -> None:
    class Own(Trainer):
        def compute_loss(self, model: Any, batch: Any) -> Any:
            return value

    own = Own(network(), arguments(max_steps=1), train_dataset=points(8))
    with pytest.raises(ConfigurationError, match=r"^compute_loss returned"):
        own.fit()


class Penalized(Trainer):
    def compute_loss(self, model: Any, batch: Any) -> Any:
        result: Any = super().compute_loss(model, batch)
        return result.mean + 0.1 * model.layer.weight.square().sum(), result.outputs


@pytest.mark.parametrize("cls", [Dividing, Ignoring])
def test_a_penalty_is_added_to_the_mean_of_the_loss_of_the_model(cls: type[Dividing]) -> None:
    args = arguments(max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=2, shuffle=False)
    history = Penalized(cls(), args, train_dataset=BATCH).fit().history
    model = cls()
    loss = model(**BATCH)["loss"] + 0.1 * model.layer.weight.square().sum()
    loss.backward()
    norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    assert history[0]["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert history[0]["grad_norm"] == pytest.approx(norm.norm().item(), rel=1e-6)


def test_a_mean_of_no_items_is_zero() -> None:
    for weight in (0, torch.tensor(0)):
        assert LossResult(torch.tensor(0.0), weight).mean == 0
    assert LossResult(torch.tensor(6.0), torch.tensor(1.5)).mean == 4
    assert LossResult(torch.tensor(6.0)).mean == 6


def test_a_result_that_is_taken_for_a_number_is_told() -> None:
    class Doubled(Trainer):
        def compute_loss(self, model: Any, batch: Any) -> Any:
            result: Any = super().compute_loss(model, batch)
            return result * 2

    doubled = Doubled(network(), arguments(max_steps=1), train_dataset=points(8), loss_fn=cross_entropy)
    with pytest.raises(ConfigurationError, match=r"returned a tuple .* super\(\)\.compute_loss\(…\)\.mean"):
        doubled.fit()


def test_targets_that_are_probabilities_weigh_one_each() -> None:
    outputs, targets = torch.randn(4, 5, 3), torch.rand(4, 5, 3).softmax(1)
    total = summed(nn.CrossEntropyLoss())
    assert total is not None
    loss, weight = total(outputs, targets)[:2]
    assert float(weight) == 4 * 3  # of each place; the classes lie along dimension 1
    assert float(loss) == pytest.approx(float(cross_entropy(outputs, targets, reduction="sum")), rel=1e-6)


def _caches(model: Any, **options: Any) -> list[bool]:
    """Return whether a cache was filled, for the forwards of a training step, an evaluation and predictions."""
    rows = [{"input_ids": torch.arange(6), "labels": torch.arange(6)}] * 2
    arguments = TrainingArguments(max_steps=1, progress_bar=False, use_cpu=True)
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, **options)
    trainer.fit()
    seen: list[bool] = []
    model.register_forward_hook(lambda *call: seen.append(call[-1].past_key_values is not None))
    trainer.fit()
    trainer.predict([{"input_ids": torch.arange(6)}] * 2)
    return seen


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8}
    return LlamaForCausalLM(LlamaConfig(hidden_size=8, intermediate_size=8, **sizes))


def _shifted(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("options", [{}, {"loss_fn": _shifted}], ids=["the model's loss", "a function"])
def test_models_of_transformers_fill_no_cache(options: dict[str, Any]) -> None:
    assert set(_caches(_llama(), **options)) == {False}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of PEFT
def test_a_batch_may_ask_for_a_cache_and_so_do_prefixes_of_peft() -> None:
    from peft import LoraConfig, PrefixTuningConfig, get_peft_model

    asked = {"input_ids": torch.arange(6)[None], "use_cache": True}
    model = _llama()
    assert call_model(model, asked, **without_cache(model)).past_key_values is not None
    adapted: Any = get_peft_model(_llama(), LoraConfig(task_type="CAUSAL_LM"))
    compiled: Any = torch.compile(_llama())
    assert without_cache(adapted) == without_cache(compiled) == {"use_cache": False}
    prefixed: Any = get_peft_model(_llama(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    assert without_cache(prefixed) == without_cache(nn.Linear(1, 1)) == {}
