"""A warning at the first batch for losses whose micro-batches do not add up to one big batch."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from transformers import BertConfig, BertForPreTraining, MixtralConfig, MixtralForCausalLM

from tests.trainer.fit.test_exact_updates import arguments, samples, sentences, train
from tests.trainer.losses.test_label_shift import batches, shrunk, tiny
from tests.worlds import run_world
from trainer_lib import Callback, LossResult, Run, Trainer

TEXT = "is not a mean over the items of a batch"


def pretraining() -> Any:
    torch.manual_seed(0)
    data = [{**row, "next_sentence_label": torch.tensor(index % 2)} for index, row in enumerate(batches(8))]
    return BertForPreTraining(shrunk(BertConfig())), data


def experts(coefficient: float) -> Any:
    torch.manual_seed(0)
    config = shrunk(MixtralConfig(router_aux_loss_coef=coefficient, output_router_logits=True), causal=True)
    return MixtralForCausalLM(config), batches(8)


def warnings_of(caplog: pytest.LogCaptureFixture, model: Any, data: Any, **more: Any) -> list[str]:
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, **more.pop("options", {})}
    with caplog.at_level(logging.WARNING):
        train(Trainer(model, arguments(**options), train_dataset=data, **more))
    return [record.getMessage() for record in caplog.records if TEXT in record.getMessage()]


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of each sample against all others of its batch."""
    similar = normalize(outputs) @ normalize(outputs).T
    return cross_entropy(similar, torch.arange(len(outputs))) + 0 * targets.sum()


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss whose classes have weights, of which `num_items` does not know."""
    return cross_entropy(outputs, targets, weight=torch.tensor([1.0, 5.0, 0.1, 2.0, 3.0]))


class Weighted(nn.Module):
    """A loss with state, whose calls change it."""

    weight: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([1.0, 5.0, 0.1, 2.0, 3.0]))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return cross_entropy(outputs, targets, weight=self.weight)


def known(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss over the values that are known."""
    counts = ~targets.isnan()
    return (outputs[counts] - targets[counts]).square().mean()


def plain(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets)


def summed(outputs: Tensor, targets: Tensor) -> LossResult:
    return LossResult(cross_entropy(outputs, targets, reduction="sum"), weight=len(targets))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 5))


@pytest.mark.parametrize(
    ("make", "is_named"),
    [
        (pretraining, True),
        (lambda: experts(0.1), True),
        (lambda: experts(0.0), False),
        (lambda: (tiny("GPT2LMHeadModel"), batches(8)), False),
        (lambda: (tiny("BartForCausalLM"), batches(8)), False),
        (lambda: (tiny("T5ForConditionalGeneration"), batches(8)), False),
    ],
    ids=["two losses", "experts", "experts without", "causal", "not shifted", "encoder and decoder"],
)
def test_model_losses_that_are_not_means_give_a_warning(
    make: Any, is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, data = make()
    assert len(warnings_of(caplog, model, data)) == is_named


@pytest.mark.parametrize(("loss_fn", "is_named"), [(contrastive, True), (plain, False), (summed, False)])
def test_loss_functions_that_are_not_means_give_a_warning(
    loss_fn: Any, is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warnings = warnings_of(caplog, network(), samples(8), loss_fn=loss_fn)
    assert len(warnings) == is_named
    assert all(loss_fn.__name__ in text for text in warnings)


def test_weights_that_differ_after_the_first_samples_give_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    inputs, targets = samples(8)
    targets[:5] = 1
    texts = warnings_of(caplog, network(), (inputs, targets), loss_fn=weighted)
    assert len(texts) == 1
    assert "return LossResult(sum, weight=number) from loss_fn" in texts[0]


@pytest.mark.parametrize("size", [2, 8])
def test_masked_values_give_a_warning_although_one_sample_has_none(size: int, caplog: pytest.LogCaptureFixture) -> None:
    inputs, values = torch.randn(16, 6), torch.randn(16, 5)
    values[1, :3] = values[4] = torch.nan
    options = {"per_device_train_batch_size": size}
    assert len(warnings_of(caplog, network(), (inputs, values), loss_fn=known, options=options)) == 1


def test_a_loss_module_with_buffers_gives_a_warning_and_keeps_them(caplog: pytest.LogCaptureFixture) -> None:
    loss_fn = Weighted()
    assert len(warnings_of(caplog, network(), samples(8), loss_fn=loss_fn)) == 1
    assert loss_fn.calls == 4
    assert loss_fn.training


def test_an_update_of_a_single_batch_is_not_checked(caplog: pytest.LogCaptureFixture) -> None:
    assert not warnings_of(
        caplog, network(), samples(8), loss_fn=contrastive, options={"gradient_accumulation_steps": 1}
    )


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # a linear layer with bias returns a view
@pytest.mark.parametrize("options", [{}, {"fsdp": True}], ids=["DDP", "FSDP2"])
def test_an_update_over_several_ranks_is_checked(options: dict[str, Any]) -> None:
    def body() -> bool:
        warnings: list[str] = []
        logger = logging.getLogger("trainer_lib.trainer.losses.mean_check")
        handler = logging.Handler()
        handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
        logger.addHandler(handler)
        train(Trainer(network(), arguments(**options), train_dataset=samples(16), loss_fn=contrastive))
        logger.removeHandler(handler)
        return any(TEXT in text for text in warnings)

    assert run_world(body, (), 2, timeout=60)[0]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_check_has_no_side_effects(accumulation: int) -> None:
    """BatchNorm statistics and dropout equal those of a run with a loss of torch, which is not checked."""

    def weights(loss_fn: Any) -> list[Tensor]:
        model = network()
        options = arguments(gradient_accumulation_steps=accumulation, learning_rate=0.1, seed=3)
        train(Trainer(model, options, train_dataset=samples(16), loss_fn=loss_fn))
        return list(model.state_dict().values())

    for actual, expected in zip(weights(plain), weights(cross_entropy), strict=True):
        assert torch.equal(actual, expected)


def test_the_check_hides_changes_in_place_from_the_update() -> None:
    """Scores divided by a temperature in place, and labels that are masked in place."""
    temperature = 2.0

    def in_place(outputs: Tensor, targets: Tensor) -> Tensor:
        outputs /= temperature
        targets[targets == 0] = -100
        return cross_entropy(outputs, targets)

    def out_of_place(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs / temperature, targets.masked_fill(targets == 0, -100))

    def losses(loss_fn: Any) -> list[float]:
        data = [{"input": row, "labels": label} for row, label in zip(*samples(16), strict=True)]
        return train(
            Trainer(network(), arguments(gradient_accumulation_steps=2), train_dataset=data, loss_fn=loss_fn)
        ).losses

    assert losses(in_place) == losses(out_of_place)


def test_token_labels_of_other_models_are_not_masked(caplog: pytest.LogCaptureFixture) -> None:
    """A model outside of transformers may not ignore -100."""

    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Embedding(11, 5)

        def forward(self, tokens: Tensor, labels: Tensor) -> Any:
            assert (labels >= 0).all()
            return {"loss": cross_entropy(self.head(tokens).flatten(0, -2), labels.flatten())}

    tokens, _ = sentences(8)
    data = [{"tokens": row, "labels": row % 5} for row in tokens]
    assert not warnings_of(caplog, Careful(), data)


def test_the_check_leaves_the_precision_of_matrix_products() -> None:
    seen: list[str] = []

    class Sees(Callback):
        def on_step_end(self, run: Run) -> None:
            seen.append(torch.get_float32_matmul_precision())

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        args = arguments(gradient_accumulation_steps=2, max_steps=3, num_train_epochs=99)
        Trainer(network(), args, train_dataset=samples(16), loss_fn=contrastive, callbacks=[Sees()]).fit()
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == ["high"] * 3


def test_a_loss_function_is_checked_in_a_few_batches_only() -> None:
    calls: list[int] = []

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(len(targets))
        return contrastive(outputs, targets)

    args = arguments(gradient_accumulation_steps=2, max_steps=12, num_train_epochs=99)
    Trainer(network(), args, train_dataset=samples(16), loss_fn=loss_fn).fit()
    whole = max(calls)
    assert calls[:3] == [whole // 2, whole // 2, whole], "two halves, and both together"
    assert calls[-16:] == [whole] * 16, "what is trained on alone"
