"""Whatever kind of model: its updates are those of whole batches, of which they take the model's own mean loss."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from tests.trainer.exact import CompleteUpdates, Updates, assert_updates, updates_of
from tests.worlds import run_world
from trainer_lib import ParameterGroup, Trainer, TrainingArguments
from trainer_lib.foundation.errors import ConfigurationError

IGNORED = -100
ROWS = 7  # with 2 × 2 samples an update: one of 4, one of 2 + 1


@dataclass
class Answer:
    """An output as a dataclass."""

    scores: Tensor
    loss: Tensor | None = None


class Returning(nn.Module):
    """A classifier that returns what it is told to, of its scores and its loss."""

    def __init__(self, returns: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
        self.returns = returns

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Any:
        scores = self.layers(inputs)
        return scores if targets is None else self.returns(scores, cross_entropy(scores, targets))


def model_output(scores: Tensor, loss: Tensor) -> Any:
    from transformers.modeling_outputs import SequenceClassifierOutput

    return SequenceClassifierOutput(loss=loss, logits=scores)  # type: ignore[arg-type]  # tensors of other names


RETURNS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "loss": lambda scores, loss: loss,
    "dict": lambda scores, loss: {"scores": scores, "loss": loss},
    "loss first": lambda scores, loss: (loss, scores),
    "loss last": lambda scores, loss: (scores, loss),
    "list": lambda scores, loss: [scores, None, loss],
    "dataclass": Answer,
    "ModelOutput": model_output,
}


def samples(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 6, generator=generator), torch.randint(5, (count,), generator=generator)


@pytest.mark.parametrize("kind", RETURNS)
def test_a_model_may_return_its_loss_in_many_ways(kind: str) -> None:
    inputs, targets = samples(ROWS)
    model = Returning(RETURNS[kind])
    actual = updates_of(model, (inputs, targets))
    layers = model.layers

    def whole(start: int) -> Callable[[], Tensor]:
        return lambda: cross_entropy(layers(inputs[start : start + 4]), targets[start : start + 4])

    assert_updates(actual, model, [whole(0), whole(4)])


@pytest.mark.parametrize("kind", RETURNS)
def test_it_is_evaluated_and_predicts_the_same(kind: str) -> None:
    inputs, targets = samples(ROWS)
    model = Returning(RETURNS[kind])
    trainer = Trainer(model, quiet(), eval_dataset=(inputs, targets), metrics=None if kind == "loss" else ["accuracy"])
    metrics, scores = trainer.evaluate(), model.layers(inputs)
    assert metrics["eval_loss"] == pytest.approx(cross_entropy(scores, targets).item(), rel=1e-6)
    if kind != "loss":  # which tells nothing else
        assert metrics["eval_accuracy"] == pytest.approx((scores.argmax(1) == targets).float().mean().item())
        torch.testing.assert_close(torch.tensor(trainer.predict((inputs, targets)).predictions), scores.detach())


def test_a_model_with_a_loss_function_takes_tuples() -> None:
    inputs, targets = samples(ROWS)[0], torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(3))
    model = Returning(RETURNS["loss"]).layers
    assert_updates(
        updates_of(model, (inputs, targets), loss_fn=mse_loss),
        model,
        [lambda: mse_loss(model(inputs[:4]), targets[:4]), lambda: mse_loss(model(inputs[4:]), targets[4:])],
    )


def test_a_model_may_need_no_targets() -> None:
    """An autoencoder gets one tensor, and is evaluated by the loss it returns."""

    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(6, 6)

        def forward(self, inputs: Tensor) -> dict[str, Tensor]:
            return {"loss": mse_loss(self.inner(inputs).tanh(), inputs), "codes": self.inner(inputs)}

    inputs = samples(ROWS)[0]
    model = Autoencoder()
    assert_updates(
        updates_of(model, inputs),
        model,
        [lambda: model(inputs[:4])["loss"], lambda: model(inputs[4:])["loss"]],
    )
    metrics = Trainer(model, quiet(), eval_dataset=inputs).evaluate()
    assert metrics == {"eval_loss": pytest.approx(model(inputs)["loss"].item(), rel=1e-6)}


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        (lambda scores, loss: scores, r"a Tensor of shape \(2, 5\), and no loss"),
        (lambda scores, loss: {"scores": scores}, "a dict with scores, and no loss"),
        (lambda scores, loss: (loss, loss), "a tuple, and no loss"),
        (lambda scores, loss: Answer(scores), "a Answer with scores, loss, and no loss"),
    ],
)
def test_a_model_without_a_loss_is_told_what_to_do(returns: Callable[[Tensor, Tensor], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"returned {message}. Give Trainer\\(loss_fn=…\\)"):
        updates_of(Returning(returns), samples(ROWS))


def test_gradients_have_their_true_size_when_callbacks_see_them() -> None:
    inputs, targets = samples(ROWS)
    model = Returning(RETURNS["loss"]).layers
    updates = updates_of(model, (inputs, targets), loss_fn=cross_entropy, updates=CompleteUpdates())
    assert_updates(
        updates,
        model,
        [lambda: cross_entropy(model(inputs[:4]), targets[:4]), lambda: cross_entropy(model(inputs[4:]), targets[4:])],
    )


@pytest.mark.parametrize("processes", [1, 2])
def test_frozen_groups_have_no_gradients_on_any_number_of_processes(processes: int) -> None:
    inputs, targets = samples(ROWS)
    frozen = ParameterGroup("0.*", frozen=True)

    def layers() -> nn.Module:
        return Returning(RETURNS["loss"]).layers

    def body() -> Updates:
        options: dict[str, Any] = {"parameter_groups": [frozen], "gradient_accumulation_steps": 2 // processes}
        return updates_of(layers(), (inputs, targets), loss_fn=cross_entropy, **options)

    model = layers()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith("0."))
    whole = [
        lambda: cross_entropy(model(inputs[:4]), targets[:4]),
        lambda: cross_entropy(model(inputs[4:]), targets[4:]),
    ]
    for updates in run_world(body, num_processes=processes, timeout=60):
        assert_updates(updates, model, whole)


# -- transformers --------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 13,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
FIVE: dict[str, Any] = {"num_labels": 5}
ONE: dict[str, Any] = {"num_labels": 1}
Case = tuple[nn.Module, dict[str, Tensor]]


def tokens(generator: torch.Generator, length: int = 8) -> dict[str, Tensor]:
    """Return sentences of several lengths, padded."""
    lengths = torch.tensor([8, 3, 5, 2, 7, 4, 6])
    ids = torch.randint(1, 13, (ROWS, length), generator=generator)
    mask = (torch.arange(length) < lengths[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def labels_where(ids: Tensor, chosen: Tensor) -> Tensor:
    return ids.masked_fill(~chosen, IGNORED)


def causal(generator: torch.Generator) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=13, n_positions=8, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    batch = tokens(generator)
    labels = labels_where(batch["input_ids"], batch["attention_mask"] > 0)
    return GPT2LMHeadModel(config), {**batch, "labels": labels}


def mixture(generator: torch.Generator) -> Case:
    """Has a second loss, of its router, beside that of its tokens."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {name: SMALL[name] for name in list(SMALL)[:5]}
    config = MixtralConfig(
        **sizes, num_key_value_heads=2, num_local_experts=2, output_router_logits=True, router_aux_loss_coef=0.5
    )
    batch = tokens(generator)
    labels = labels_where(batch["input_ids"], batch["attention_mask"] > 0)
    return MixtralForCausalLM(config), {**batch, "labels": labels}


def masked(generator: torch.Generator) -> Case:
    from transformers import BertConfig, BertForMaskedLM

    batch = tokens(generator)
    chosen = (torch.rand(ROWS, 8, generator=generator) < 0.4) & (batch["attention_mask"] > 0)
    chosen[2:4] = False  # the second batch has nothing to learn from
    return BertForMaskedLM(BertConfig(**SMALL)), {**batch, "labels": labels_where(batch["input_ids"], chosen)}


def to_sequence(generator: torch.Generator) -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    first: dict[str, Any] = {"decoder_start_token_id": 0}
    config = T5Config(vocab_size=13, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0, **first)
    answers = tokens(generator, length=5)
    labels = labels_where(answers["input_ids"], answers["attention_mask"] > 0)
    return T5ForConditionalGeneration(config), {**tokens(generator), "labels": labels}


def tagging(generator: torch.Generator) -> Case:
    from transformers import BertConfig, BertForTokenClassification

    batch = tokens(generator)
    tags = torch.randint(5, (ROWS, 8), generator=generator)
    model = BertForTokenClassification(BertConfig(**SMALL, **FIVE))
    return model, {**batch, "labels": labels_where(tags, batch["attention_mask"] > 0)}


def answering(generator: torch.Generator) -> Case:
    from transformers import BertConfig, BertForQuestionAnswering

    places = {name: torch.randint(8, (ROWS,), generator=generator) for name in ("start_positions", "end_positions")}
    return BertForQuestionAnswering(BertConfig(**SMALL)), {**tokens(generator), **places}


def classes(generator: torch.Generator) -> Case:
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(BertConfig(**SMALL, **FIVE))
    return model, {**tokens(generator), "labels": torch.randint(5, (ROWS,), generator=generator)}


def several_classes(generator: torch.Generator) -> Case:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(**SMALL, **FIVE, problem_type="multi_label_classification")
    labels = torch.randint(2, (ROWS, 5), generator=generator).float()
    return BertForSequenceClassification(config), {**tokens(generator), "labels": labels}


def number(generator: torch.Generator) -> Case:
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(BertConfig(**SMALL, **ONE))
    return model, {**tokens(generator), "labels": torch.randn(ROWS, generator=generator)}


def vision(generator: torch.Generator) -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {name: value for name, value in SMALL.items() if name != "vocab_size"}
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, **FIVE))
    images = torch.randn(ROWS, 3, 8, 8, generator=generator)
    return model, {"pixel_values": images, "labels": torch.randint(5, (ROWS,), generator=generator)}


CASES: list[Callable[[torch.Generator], Case]] = [
    causal,
    masked,
    to_sequence,
    tagging,
    answering,
    classes,
    several_classes,
    number,
    vision,
]


def made(case: Callable[[torch.Generator], Case]) -> Case:
    torch.manual_seed(0)
    return case(torch.Generator().manual_seed(2))


def rows_of(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{name: value[row] for name, value in batch.items()} for row in range(ROWS)]


def whole_batches(model: Any, batch: dict[str, Tensor], size: int) -> list[Callable[[], Tensor]]:
    def loss(start: int) -> Callable[[], Tensor]:
        return lambda: model(**{name: value[start : start + size] for name, value in batch.items()}).loss

    return [loss(start) for start in range(0, ROWS, size)]


def quiet(**options: Any) -> TrainingArguments:
    return TrainingArguments(use_cpu=True, progress_bar=False, per_device_train_batch_size=2, **options)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_accumulated_updates_are_those_of_whole_batches(case: Callable[[torch.Generator], Case]) -> None:
    model, batch = made(case)
    assert_updates(updates_of(copy.deepcopy(model), rows_of(batch)), model, whole_batches(model, batch, 4))


def test_updates_on_two_processes_are_those_of_whole_batches() -> None:
    cases = [causal, masked, to_sequence, answering]

    def body() -> list[Updates]:
        updates_of_rank: list[Updates] = []
        for case in cases:
            model, batch = made(case)
            updates_of_rank.append(updates_of(model, rows_of(batch), gradient_accumulation_steps=1))
        return updates_of_rank

    for everywhere in zip(*run_world(body, num_processes=2, timeout=60), strict=True):
        case = cases.pop(0)
        for updates in everywhere:
            model, batch = made(case)
            assert_updates(updates, model, whole_batches(model, batch, 4))


def test_a_second_loss_keeps_its_share() -> None:
    model, batch = made(mixture)
    actual = updates_of(copy.deepcopy(model), rows_of(batch), gradient_accumulation_steps=1)
    assert_updates(actual, model, whole_batches(model, batch, 2))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_evaluations_are_those_of_the_whole_set(case: Callable[[torch.Generator], Case]) -> None:
    model, batch = made(case)
    metrics = Trainer(model, quiet(), eval_dataset=rows_of(batch)).evaluate()
    with torch.no_grad():
        assert metrics["eval_loss"] == pytest.approx(model(**batch).loss.item(), rel=1e-6)


def test_predictions_of_answers_are_starts_and_ends() -> None:
    model, batch = made(answering)
    predictions, labels, _ = Trainer(model, quiet()).predict(rows_of(batch))
    assert set(predictions) == {"start_logits", "end_logits"}
    assert labels["end_positions"].tolist() == batch["end_positions"].tolist()


class Backbone(nn.Module):
    """A network with a pretrained part, as `from_pretrained` returns one: in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.pretrained = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.BatchNorm1d(8)).eval()
        self.teacher = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5)).eval().requires_grad_(False)
        self.norm = nn.BatchNorm1d(8).eval()
        self.head = nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.norm(self.pretrained(inputs) + self.teacher(inputs)))


def evaluating(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_modules() if not part.training]


@pytest.mark.parametrize("processes", [1, 2])
def test_what_is_trained_is_in_training_mode(processes: int) -> None:
    data = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2

    def modes(rank: int = 0) -> list[list[str]]:
        del rank
        seen = []
        for model in (Backbone(), Backbone().eval(), nn.Linear(6, 2).eval()):
            args = TrainingArguments(
                num_train_epochs=1, use_cpu=True, progress_bar=False, per_device_train_batch_size=4
            )
            trainer = Trainer(model, args, train_dataset=data, eval_dataset=data, loss_fn=cross_entropy)
            before = evaluating(model)
            trainer.evaluate()
            assert evaluating(model) == before
            trainer.fit()
            seen.append(evaluating(model))
        return seen

    kept = ["teacher", "teacher.0", "teacher.1", "norm"]  # the user froze them in a model that trains
    found = [modes()] if processes == 1 else run_world(modes, num_processes=processes)
    assert found == [[kept, [], []]] * processes


def test_a_model_of_which_nothing_is_trained_stays_in_evaluation_mode() -> None:
    class Distilled(Trainer):
        def compute_loss(self, model: Any, batch: Any) -> Any:
            return mse_loss(model["student"](batch), model["teacher"](batch))

        def configure_optimizer(self) -> Any:
            return {"student": torch.optim.SGD(models["student"].parameters(), lr=0.1)}

    models = {"student": nn.Linear(6, 2), "teacher": nn.Sequential(nn.Linear(6, 2), nn.Dropout())}
    models["teacher"].eval().requires_grad_(False)
    args = TrainingArguments(max_steps=1, use_cpu=True, progress_bar=False)
    Distilled(models, args, train_dataset=torch.randn(8, 6)).fit()
    assert evaluating(models["student"]) == []
    assert evaluating(models["teacher"]) == ["", "0", "1"]


def test_a_model_that_overrides_train_is_asked() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(self.norm(inputs))

        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self.norm.eval()
            return self

    model = Frozen()
    args = TrainingArguments(max_steps=2, use_cpu=True, progress_bar=False)
    Trainer(model, args, train_dataset=(torch.randn(16, 6) + 3, torch.arange(16) % 2), loss_fn=cross_entropy).fit()
    assert model.norm.running_mean is not None
    assert not model.norm.running_mean.any()


def test_dropout_of_a_model_from_a_folder_is_that_of_a_new_one(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    new = transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=20, hidden_dropout_prob=0.5, **sizes)
    )
    new.save_pretrained(tmp_path)
    loaded = transformers.BertForSequenceClassification.from_pretrained(tmp_path)
    rows = {"input_ids": torch.arange(32).reshape(8, 4) % 20, "labels": torch.arange(8) % 2}
    losses = []
    for model in (new, loaded):
        args = TrainingArguments(max_steps=2, log_every=1, use_cpu=True, progress_bar=False)
        history = Trainer(model, args, train_dataset=rows).fit().history
        losses.append([entry["loss"] for entry in history if "loss" in entry])
    assert losses[0] == losses[1]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks by the old name
def test_dropout_of_a_base_that_peft_freezes_is_that_of_a_new_one(tmp_path: Any) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 20, "n_positions": 8}
    new = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))
    new.save_pretrained(tmp_path)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    rows = {name: torch.arange(32).reshape(8, 4) % 20 for name in ("input_ids", "labels")}
    losses = []
    for base in (new, loaded):
        torch.manual_seed(0)
        model = peft.get_peft_model(base, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
        args = TrainingArguments(max_steps=2, log_every=1, use_cpu=True, progress_bar=False)
        history = Trainer(model, args, train_dataset=rows).fit().history
        losses.append([entry["loss"] for entry in history if "loss" in entry])
        assert evaluating(model) == []
    assert losses[0] == losses[1]
