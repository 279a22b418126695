"""A Trainer of Hugging Face that is taken over trains and evaluates as it would there."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import EarlyStoppingCallback

from tests.trainer.hugging_face import SIZES, model, rows, run_snippet_of_page, their_arguments
from tests.trainer.tasks import network, points
from tests.worlds import run_world
from trainer_lib import Trainer, TrainingArguments
from trainer_lib.callbacks import LabelSmoothing, NEFTune, Printer
from trainer_lib.callbacks.trackers import TrackerCallback
from trainer_lib.foundation.errors import ConfigurationError, PreparationError
from trainer_lib.trainer.huggingface.callback_adapter import AdaptedCallback

NOTES = "trainer_lib.trainer.arguments.training_arguments"


BERT: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 8,
}


def next_tokens(prediction: Any) -> dict[str, float]:
    """Return how many next tokens are right, and what was given."""
    logits, labels = prediction.predictions, prediction.label_ids
    counts = labels[:, 1:] != -100
    right = (logits[:, :-1].argmax(-1) == labels[:, 1:]) & counts
    return {"accuracy": right.sum() / counts.sum(), "rows": len(logits)}


def theirs(folder: Path, **options: Any) -> Any:
    """Return a Trainer of Hugging Face, with a column that the model does not take."""
    data = rows(ragged=True).add_column("comment", ["text"] * 18)
    arguments = options.pop("args", None) or their_arguments(folder, eval_strategy="epoch", weight_decay=0.1)
    defaults: dict[str, Any] = {"train_dataset": data, "eval_dataset": rows(7)}
    return transformers.Trainer(options.pop("model", None) or model(), arguments, **{**defaults, **options})


def steps(history: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(entry["step"], entry[name]) for entry in history if name in entry]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Return the history and the weights of a run by Hugging Face's own Trainer."""
    run = theirs(tmp_path_factory.mktemp("theirs"), compute_metrics=next_tokens)
    run.train()
    return run.state.log_history, run.model.state_dict()


@pytest.mark.parametrize("processes", [1, 2])
def test_it_trains_and_evaluates_as_there(tmp_path: Path, processes: int, wanted: Any) -> None:
    def body() -> tuple[Any, Any]:
        their_trainer = theirs(tmp_path, compute_metrics=next_tokens)
        ours = TrainingArguments.from_transformers(their_trainer.args)
        taken = Trainer.from_transformers(
            their_trainer,
            args=dataclasses.replace(ours, per_device_train_batch_size=4 // processes),
        )
        result = taken.fit()
        return result.history, taken.unwrapped_model.state_dict()

    their_steps, weights = wanted
    fit_result = run_world(body, num_processes=processes, timeout=90) if processes > 1 else [body()]
    for history, trained in fit_result:
        for name in ("loss", "grad_norm", "eval_loss", "eval_accuracy", "eval_rows"):
            expected_losses = steps(their_steps, name)
            assert len(expected_losses) == (2 if name.startswith("eval") else 6)
            assert steps(history, name) == [
                (step, pytest.approx(value, rel=2e-5)) for step, value in expected_losses
            ], name
        for name, value in trained.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("length", [{"max_steps": 7}, {"num_train_epochs": 4}])
def test_a_fraction_of_all_steps_is_an_interval(tmp_path: Path, length: Any) -> None:
    def trainer() -> Any:
        options = {**length, "eval_strategy": "steps", "eval_steps": 0.25, "logging_steps": 0.25}
        return theirs(tmp_path, args=their_arguments(tmp_path, **options))

    wanted = trainer()
    wanted.train()
    history = Trainer.from_transformers(trainer()).fit().history
    for name in ("loss", "eval_loss"):
        taken = [step for step, _ in steps(history, name)]
        there = {step for step, _ in steps(wanted.state.log_history, name)}
        assert taken == sorted(there | {wanted.state.max_steps})  # and at the end, here
        assert len(taken) == 4


@pytest.mark.parametrize(
    ("optimizer", "package", "more"),
    [
        ("adafactor", "torch", {}),
        ("lion_32bit", "bitsandbytes", {}),
        ("ademamix", "bitsandbytes", {}),
        ("sgd", "torch", {"optim_args": "momentum=0.9, nesterov=true"}),
        ("rmsprop", "torch", {"optim_args": "alpha=0.9, momentum=0.5"}),
        ("schedule_free_adamw", "schedulefree", {"lr_scheduler_type": "constant"}),
        ("lomo", "lomo_optim", {"weight_decay": 0.0, "gradient_accumulation_steps": 1}),
    ],
)
def test_an_optimizer_by_name_makes_the_updates_that_it_makes_there(
    tmp_path: Path, optimizer: str, package: str, more: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip(package)

    def trainer() -> Any:
        # A rate at which the order of summation does not change the sign that Lion goes by.
        options = {"optim": optimizer, "adam_beta1": 0.8, "weight_decay": 0.1, "learning_rate": 1e-3, **more}
        return theirs(tmp_path, args=their_arguments(tmp_path, **options))

    wanted = trainer()
    wanted.train()
    wanted.optimizer.eval()  # the averages of schedule-free ones, which a fit ends with here
    taken = Trainer.from_transformers(trainer())
    assert "no equivalent" not in caplog.text
    history = taken.fit().history
    assert steps(history, "loss") == [
        (step, pytest.approx(value, rel=2e-5)) for step, value in steps(wanted.state.log_history, "loss")
    ]
    for name, value in taken.unwrapped_model.state_dict().items():
        torch.testing.assert_close(value, wanted.model.state_dict()[name], rtol=1e-3, atol=1e-5)


def test_what_is_a_callback_here_is_made_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def smoothed() -> Any:
        return theirs(tmp_path, args=their_arguments(tmp_path, label_smoothing_factor=0.2, max_steps=3))

    wanted = smoothed()
    wanted.train()
    with caplog.at_level(logging.WARNING, NOTES):
        history = Trainer.from_transformers(smoothed()).fit().history
    their_losses = steps(wanted.state.log_history, "loss")
    assert len(their_losses) == 3
    assert steps(history, "loss") == [(step, pytest.approx(value, rel=2e-5)) for step, value in their_losses]
    their_trainer = theirs(tmp_path, args=their_arguments(tmp_path, neftune_noise_alpha=3.0))
    (noise,) = [
        callback for callback in Trainer.from_transformers(their_trainer).events if isinstance(callback, NEFTune)
    ]
    assert noise.alpha == 3.0
    assert caplog.text == ""


def test_what_it_has_is_taken_over(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    collator = transformers.DefaultDataCollator()
    stopping = EarlyStoppingCallback()
    their_trainer = theirs(
        tmp_path,
        args=their_arguments(tmp_path, eval_strategy="epoch", report_to=["tensorboard"], enable_jit_checkpoint=True),
        optimizers=(optimizer, schedule),
        callbacks=[stopping],
        data_collator=collator,
    )
    taken = Trainer.from_transformers(their_trainer, train_dataset=points(), callbacks=None)
    assert taken.train_dataset[0].shape == (40, 6)
    assert not any(isinstance(callback, AdaptedCallback) for callback in taken.events)
    taken = Trainer.from_transformers(their_trainer)
    adapted = [callback.callback for callback in taken.events if isinstance(callback, AdaptedCallback)]
    assert adapted == [stopping]  # trackers and bars are this library's own
    trackers = [callback.tracker_name for callback in taken.events if isinstance(callback, TrackerCallback)]
    assert trackers == ["tensorboard"]
    assert any(isinstance(callback, Printer) for callback in taken.events)
    assert (taken.model, taken.optimizer, taken.scheduler) == (their_trainer.model, optimizer, schedule)
    assert taken.train_dataset is their_trainer.train_dataset
    assert taken.collate_fn is collator
    assert taken.args.remove_unused_columns
    assert type(taken).__name__ == "Trainer"
    their_trainer.callback_handler.callbacks.append(TensorBoardCallback())
    their_trainer.args.report_to = []
    taken = Trainer.from_transformers(their_trainer)
    assert TensorBoardCallback in [
        type(callback.callback) for callback in taken.events if isinstance(callback, AdaptedCallback)
    ]


def next_token_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """Return the sum of the losses, divided by the number that Hugging Face's Trainer counts."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return cross_entropy(logits, targets, reduction="sum") / (1 if num_items_in_batch is None else num_items_in_batch)


def by_keywords(outputs: Any, labels: Any, **options: Any) -> torch.Tensor:
    return next_token_loss(outputs, labels, **options)


def loss_of_tags(outputs: Any, labels: Any, *, num_items_in_batch: Any) -> torch.Tensor:
    return binary_cross_entropy_with_logits(outputs.logits, labels, reduction="sum") / num_items_in_batch


def tagging() -> dict[str, Any]:
    """Return a model of sequences with three targets each, which are numbers, and its data."""
    torch.manual_seed(0)
    tags = [[float(row % 2), float(row % 3 == 0), 1.0] for row in range(18)]
    data = rows().remove_columns("labels").add_column("labels", tags)
    options: dict[str, Any] = {**SIZES, "num_labels": 3, "pad_token_id": 0}
    config = transformers.LlamaConfig(**options)
    tagger = transformers.LlamaForSequenceClassification(config)
    return {"model": tagger, "train_dataset": data, "eval_dataset": data}


@pytest.mark.parametrize(
    ("compute_loss_func", "processes"),
    [(next_token_loss, 1), (next_token_loss, 2), (by_keywords, 1), (loss_of_tags, 1)],
)
def test_a_compute_loss_func_trains_as_there(tmp_path: Path, compute_loss_func: Any, processes: int) -> None:
    def made() -> Any:
        arguments = their_arguments(tmp_path, weight_decay=0.1, label_smoothing_factor=0.2)  # smoothing has no effect
        options = tagging() if compute_loss_func is loss_of_tags else {}
        return theirs(tmp_path, args=arguments, compute_loss_func=compute_loss_func, **options)

    def body() -> Any:
        their_trainer = made()
        ours = TrainingArguments.from_transformers(their_trainer.args)
        args = dataclasses.replace(ours, per_device_train_batch_size=4 // processes)
        return Trainer.from_transformers(their_trainer, args=args, callbacks=[]).fit().history

    wanted = made()
    wanted.train()
    histories = run_world(body, num_processes=processes, timeout=90) if processes > 1 else [body()]
    for history in histories:
        for name in ("loss", "grad_norm"):
            expected = steps(wanted.state.log_history, name)
            assert len(expected) == 6
            assert steps(history, name) == [(step, pytest.approx(value, rel=2e-5)) for step, value in expected], name
        first = steps(wanted.state.log_history, "loss")[0][1]
        assert steps(history, "loss")[0][1] == pytest.approx(first, rel=1e-6)


def test_label_smoothing_does_not_change_a_compute_loss_func(tmp_path: Path) -> None:
    arguments = their_arguments(tmp_path, label_smoothing_factor=0.2)
    taken = Trainer.from_transformers(theirs(tmp_path, args=arguments, compute_loss_func=next_token_loss))
    assert not any(isinstance(callback, LabelSmoothing) for callback in taken.events)


def tagger(problem: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(**BERT, problem_type=problem, **options)
    return transformers.BertForSequenceClassification(config)


def test_what_is_not_smoothed_there_is_not_smoothed(tmp_path: Path) -> None:
    arguments = their_arguments(tmp_path, label_smoothing_factor=0.2)
    with pytest.warns(UserWarning, match="multi-label"):
        their_trainer = theirs(tmp_path, args=arguments, model=tagger("multi_label_classification", num_labels=3))
    taken = Trainer.from_transformers(their_trainer)
    assert not any(isinstance(callback, LabelSmoothing) for callback in taken.events)


@pytest.mark.parametrize(("classes", "problem"), [(3, "multi_label_classification"), (1, "regression")])
def test_other_losses_of_models_are_not_smoothed(classes: int, problem: str) -> None:
    labels = torch.rand(4, classes)
    data = [{"input_ids": torch.arange(5), "labels": row if classes > 1 else row[0]} for row in labels]
    trainer = Trainer(
        tagger(None, num_labels=classes),
        TrainingArguments(max_steps=1, use_cpu=True, progress_bar=False),
        train_dataset=data,
        callbacks=[LabelSmoothing(0.1)],
    )
    with pytest.raises(ConfigurationError, match=f"problem_type='{problem}'. Remove LabelSmoothing"):
        trainer.fit()


class Smoothed(transformers.Trainer):
    def compute_loss(self, model: Any, inputs: Any, *others: Any, **more: Any) -> Any:
        raise AssertionError

    def log(self, logs: Any, start_time: Any = None) -> None:
        raise AssertionError


class Ordered(transformers.Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        raise AssertionError


class Halved(Trainer):
    def compute_loss(self, model: Any, batch: Any) -> Any:
        return model(**batch).loss / 2


def test_what_a_class_of_its_own_does_has_to_be_said_here(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    their_trainer = Smoothed(model(), their_arguments(tmp_path, max_steps=1), train_dataset=rows())
    with pytest.raises(ConfigurationError, match=r"Smoothed overrides compute_loss, .* overrides compute_loss, and"):
        Trainer.from_transformers(their_trainer)
    with caplog.at_level(logging.WARNING):
        halved = Halved.from_transformers(their_trainer)
    assert "Smoothed overrides log, which nothing calls here" in caplog.text
    ordered = Ordered(model(), their_arguments(tmp_path, max_steps=1), train_dataset=rows())
    with pytest.raises(ConfigurationError, match=r"overrides _get_train_sampler, .* overrides train_dataloader,"):
        Trainer.from_transformers(ordered)
    whole = Trainer.from_transformers(
        theirs(tmp_path, args=their_arguments(tmp_path, max_steps=1), train_dataset=rows())
    )
    assert 2 * halved.fit().history[0]["loss"] == pytest.approx(whole.fit().history[0]["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"preprocess_logits_for_metrics": lambda *given: None},
            "has preprocess_logits_for_metrics, .* an evaluation_step",
        ),
        ({"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 1})}, "has optimizer_cls_and_kwargs, .* optimizer=…"),
    ],
)
def test_what_is_called_in_another_way_is_told(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Trainer.from_transformers(theirs(tmp_path, **options))


def test_what_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"takes a transformers\.Trainer, got a Sequential"):
        Trainer.from_transformers(network())


def test_one_that_has_trained_hands_on_its_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    their_trainer = theirs(tmp_path, args=their_arguments(tmp_path, max_steps=2))
    their_trainer.train()
    with caplog.at_level(logging.WARNING):
        taken = Trainer.from_transformers(their_trainer)
    assert "has trained already" in caplog.text
    assert taken.optimizer is None
    assert taken.scheduler is None
    assert taken.model is their_trainer.model
    assert taken.fit().state.step == 2


def test_a_model_that_it_has_trained_can_be_trained_further(tmp_path: Path) -> None:
    their_trainer = theirs(tmp_path, args=their_arguments(tmp_path, max_steps=2))
    their_trainer.train()
    args = TrainingArguments(max_steps=2, use_cpu=True, progress_bar=False)
    assert Trainer(their_trainer.model, args, train_dataset=rows()).fit().state.step == 2


def test_a_model_whose_forward_it_has_wrapped_is_refused(tmp_path: Path) -> None:
    their_trainer = theirs(tmp_path, args=their_arguments(tmp_path, max_steps=1, bf16=True))
    their_trainer.train()
    args = TrainingArguments(max_steps=2, use_cpu=True, progress_bar=False)
    with pytest.raises(PreparationError, match="prepared already"):
        Trainer(their_trainer.model, args, train_dataset=rows()).fit()


def test_arguments_are_converted_where_they_are_given(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, NOTES):
        model_trainer = Trainer(
            model(), their_arguments(tmp_path, push_to_hub=False, torch_empty_cache_steps=2), train_dataset=rows()
        )
    assert [line.split(":")[0].strip() for line in caplog.text.splitlines()[1:]] == ["torch_empty_cache_steps"]
    assert (model_trainer.args.learning_rate, model_trainer.args.log_every, model_trainer.args.shuffle) == (
        0.01,
        "1 step",
        False,
    )


class Picked(Trainer):
    """Keeps the most probable tokens, as `preprocess_logits_for_metrics` does there."""

    def evaluation_step(self, model: Any, batch: Any) -> Any:
        output = super().evaluation_step(model, batch)
        return dataclasses.replace(output, predictions=output.predictions.argmax(-1))


def test_logits_are_picked_by_an_evaluation_step(tmp_path: Path) -> None:
    def counted(prediction: Any) -> dict[str, float]:
        tokens, labels = prediction
        right = tokens[:, :-1] == labels[:, 1:]
        return {"accuracy": right[labels[:, 1:] != -100].mean(), "tokens": tokens.size}

    their_trainer = theirs(
        tmp_path, compute_metrics=counted, preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1)
    )
    wanted = their_trainer.evaluate()
    taken = Picked.from_transformers(their_trainer).evaluate()
    assert wanted["eval_tokens"] == 7 * 8
    assert taken == {name: pytest.approx(wanted[name]) for name in ("eval_loss", "eval_accuracy", "eval_tokens")}


class Spans(nn.Module):
    """Finds two ends of a span, as models that answer questions do."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = nn.Linear(4, 6)

    def forward(self, values: Any, start_positions: Any = None, end_positions: Any = None) -> dict[str, Any]:
        first, last = self.ends(values).split(3, dim=1)
        loss = nn.functional.cross_entropy(first, start_positions) + nn.functional.cross_entropy(last, end_positions)
        return {"loss": loss, "start_logits": first, "end_logits": last}


def test_outputs_and_labels_of_several_names_are_tuples_in_compute_metrics_as_there(tmp_path: Path) -> None:
    from datasets import Dataset

    def exact(prediction: Any) -> dict[str, float]:
        (first, last), (first_label, last_label) = prediction.predictions, prediction.label_ids
        return {"first": (first.argmax(1) == first_label).mean(), "last": (last.argmax(1) == last_label).mean()}

    labels = ["start_positions", "end_positions"]
    data = Dataset.from_dict(
        {"values": torch.randn(11, 4).tolist(), **{name: [row % 3 for row in range(11)] for name in labels}}
    )
    their_trainer = theirs(
        tmp_path,
        model=Spans(),
        args=their_arguments(tmp_path, label_names=labels),
        train_dataset=data,
        eval_dataset=data,
        compute_metrics=exact,
    )
    wanted = their_trainer.evaluate()
    taken = Trainer.from_transformers(their_trainer).evaluate()
    assert taken == {name: pytest.approx(wanted[name]) for name in ("eval_loss", "eval_first", "eval_last")}


def two_tasks() -> tuple[Any, list[dict[str, Any]]]:
    """A model that is pretrained on masked tokens and on pairs of sentences, with the labels of both."""
    torch.manual_seed(0)
    data = [
        {**sample, "next_sentence_label": index % 2, "labels": [-100] * (index % 3) + sample["labels"][index % 3 :]}
        for index, sample in enumerate(rows(11))
    ]
    return transformers.BertForPreTraining(transformers.BertConfig(**BERT)), data


@pytest.mark.parametrize("names", [None, ["labels", "next_sentence_label"], ["next_sentence_label", "labels"]])
def test_all_labels_that_a_model_takes_reach_compute_metrics_as_there(tmp_path: Path, names: Any) -> None:
    seen = list[Any]()

    def keep(prediction: Any) -> dict[str, float]:
        seen.append((prediction.predictions, prediction.label_ids))
        return {}

    pretraining, data = two_tasks()
    options: dict[str, Any] = {"eval_dataset": data, "compute_metrics": keep}
    their_trainer = theirs(tmp_path, model=pretraining, args=their_arguments(tmp_path, label_names=names), **options)
    their_trainer.evaluate()
    trainer = Trainer.from_transformers(their_trainer)
    trainer.evaluate()
    wanted, taken = seen
    for ours, their_own in zip((*taken[0], *taken[1]), (*wanted[0], *wanted[1]), strict=True):
        np.testing.assert_allclose(ours, their_own, rtol=1e-5, atol=1e-6)
    assert set(trainer.predict(data).labels) == {"labels", "next_sentence_label"}
    batch = transformers.default_data_collator(data[:4])
    assert trainer.num_items(batch) == (batch["labels"] != -100).sum()  # as they count items


def test_metrics_of_batches_are_those_there(tmp_path: Path) -> None:
    class Exact:
        """Adds up batches, as `batch_eval_metrics` has it."""

        def __init__(self) -> None:
            self.hits: list[Any] = []

        def __call__(self, prediction: Any, compute_result: bool) -> dict[str, float]:
            (first, _), (first_label, _) = prediction.predictions, prediction.label_ids
            self.hits.append((first.argmax(dim=1) == first_label).float())
            if not compute_result:
                return {}
            exact = torch.cat(self.hits).mean().item()
            self.hits.clear()
            return {"exact": exact}

    names = ["start_positions", "end_positions"]
    data = [
        {"values": values, **dict.fromkeys(names, row % 3)} for row, values in enumerate(torch.randn(11, 4).tolist())
    ]
    args = their_arguments(tmp_path, label_names=names, batch_eval_metrics=True)
    options: dict[str, Any] = {"train_dataset": data, "eval_dataset": data, "compute_metrics": Exact()}
    their_trainer = theirs(tmp_path, model=Spans(), args=args, **options)
    wanted = their_trainer.evaluate()
    taken = Trainer.from_transformers(their_trainer).evaluate()
    assert taken["eval_exact"] == pytest.approx(wanted["eval_exact"])


def test_predictions_are_those_there(tmp_path: Path) -> None:
    their_trainer = theirs(tmp_path)
    wanted = their_trainer.predict(their_trainer.eval_dataset)
    predictions = Trainer.from_transformers(their_trainer).predict(their_trainer.eval_dataset)
    np.testing.assert_allclose(predictions.predictions, wanted.predictions, rtol=1e-6)
    np.testing.assert_array_equal(predictions.label_ids, wanted.label_ids)
    assert predictions.metrics["predict_loss"] == pytest.approx(wanted.metrics["test_loss"], rel=1e-6)


def test_the_example_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_snippet_of_page("hugging_face_trainer.md", tmp_path)["result"]
    assert result.status == "stopped"
    assert result.state.step < 100
