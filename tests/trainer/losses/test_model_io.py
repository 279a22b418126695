"""Batches of any form reach the model complete, by name or by position; extra columns are an error."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence
from torch.utils.data import Dataset
from transformers import DynamicCache

from tests.trainer.exact import Updates, assert_updates, updates_of
from tests.worlds import run_world
from trainer_lib import Trainer, TrainingArguments
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.trainer.data.batch_rows import count_rows, take_rows
from trainer_lib.trainer.losses.model_io import check_names, count_items, loss_of, predictions_of, split, targets_of

ROWS = 7
GENERATOR = torch.Generator().manual_seed(1)
INPUTS, TARGETS = torch.randn(ROWS, 6, generator=GENERATOR), torch.randint(5, (ROWS,), generator=GENERATOR)
NAMES = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu"]


@dataclass
class Sample:
    inputs: Any
    targets: Any
    name: Any


class Named(NamedTuple):
    inputs: Any
    targets: Any
    name: Any


class Returning(nn.Module):
    """A classifier that returns its loss and records the names of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
        self.seen: list[str] = []

    def forward(self, inputs: Tensor, targets: Tensor, name: list[str] | None = None) -> Tensor:
        self.seen += name or []
        return cross_entropy(self.layers(inputs), targets)


class Rows(Dataset[Any]):
    """Samples from a function."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        return self.make(row)


def encoding(row: int) -> Any:
    from transformers import BatchEncoding

    return BatchEncoding({"inputs": INPUTS[row], "targets": TARGETS[row], "name": NAMES[row]})


FORMS: dict[str, Callable[[int], Any]] = {
    "tuple": lambda row: (INPUTS[row], TARGETS[row], NAMES[row]),
    "list": lambda row: [INPUTS[row], TARGETS[row], NAMES[row]],
    "dict": lambda row: {"name": NAMES[row], "inputs": INPUTS[row], "targets": TARGETS[row]},
    "dataclass": lambda row: Sample(INPUTS[row], TARGETS[row], NAMES[row]),
    "named tuple": lambda row: Named(INPUTS[row], TARGETS[row], NAMES[row]),
    "BatchEncoding": encoding,
    "numpy": lambda row: {"inputs": INPUTS[row].numpy(), "targets": TARGETS[row].item(), "name": NAMES[row]},
}


@pytest.mark.parametrize("form", FORMS)
def test_samples_of_any_form_reach_the_model_complete(form: str) -> None:
    model = Returning()
    actual = updates_of(model, Rows(FORMS[form]))
    assert model.seen == NAMES
    model.seen.clear()
    assert_whole(actual, model)


def test_texts_and_short_batches_reach_their_rank() -> None:
    def body() -> tuple[list[str], Updates]:
        model = Returning()
        return model.seen, updates_of(model, Rows(FORMS["dict"]), gradient_accumulation_steps=1)

    (first, first_text), (second, other) = run_world(body, num_processes=2, timeout=60)
    assert first[:2] + second[:2] + first[2:] == ["ant", "bee", "cat", "dog", "eel", "fox", *first[4:]]
    for updates in (first_text, other):
        assert_whole(updates, Returning())


def assert_whole(actual: Updates, model: Returning) -> None:
    assert_updates(actual, model, [lambda: model(INPUTS[:4], TARGETS[:4]), lambda: model(INPUTS[4:], TARGETS[4:])])


@dataclass
class Pair:
    input: Any
    targets: Any


class NamedPair(NamedTuple):
    input: Any
    targets: Any


PAIRS: dict[str, Callable[[int], Any]] = {
    "tuple": lambda row: (INPUTS[row], TARGETS[row]),
    "list": lambda row: [INPUTS[row], TARGETS[row]],
    "dict": lambda row: {"targets": TARGETS[row], "input": INPUTS[row]},
    "dataclass": lambda row: Pair(INPUTS[row], TARGETS[row]),
    "named tuple": lambda row: NamedPair(INPUTS[row], TARGETS[row]),
}


@pytest.mark.parametrize("form", PAIRS)
def test_with_a_loss_function_the_model_gets_no_targets(form: str) -> None:
    layers = Returning().layers
    actual = updates_of(layers, Rows(PAIRS[form]), loss_fn=cross_entropy)
    assert_updates(
        actual,
        layers,
        [
            lambda: cross_entropy(layers(INPUTS[:4]), TARGETS[:4]),
            lambda: cross_entropy(layers(INPUTS[4:]), TARGETS[4:]),
        ],
    )


def test_several_targets_come_by_name() -> None:
    layers = Returning().layers

    def loss_fn(outputs: Tensor, targets: dict[str, Tensor]) -> Tensor:
        return cross_entropy(outputs, targets["first"]) + cross_entropy(outputs, targets["second"])

    def sample(row: int) -> dict[str, Tensor]:
        return {"input": INPUTS[row], "first": TARGETS[row], "second": 4 - TARGETS[row]}

    actual = updates_of(layers, Rows(sample), loss_fn=loss_fn, label_names=["first", "second"])

    def whole(start: int) -> Callable[[], Tensor]:
        targets = TARGETS[start : start + 4]
        return lambda: loss_fn(layers(INPUTS[start : start + 4]), {"first": targets, "second": 4 - targets})

    assert_updates(actual, layers, [whole(0), whole(4)])


def test_several_inputs_are_passed_by_position() -> None:
    layer = nn.Bilinear(6, 6, 5)
    data = Rows(lambda row: (INPUTS[row], -INPUTS[row], TARGETS[row]))

    def whole(start: int) -> Callable[[], Tensor]:
        part = INPUTS[start : start + 4]
        return lambda: cross_entropy(layer(part, -part), TARGETS[start : start + 4])

    assert_updates(updates_of(layer, data, loss_fn=cross_entropy), layer, [whole(0), whole(4)])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cells, self.head = nn.LSTM(6, 4), nn.Linear(4, 1)

    def forward(self, sequences: PackedSequence) -> Tensor:
        _, (hidden, _) = self.cells(sequences)
        return self.head(hidden[-1])


LENGTHS = [3, 1, 4, 1, 5, 9, 2]
SEQUENCES = [INPUTS[row].repeat(LENGTHS[row], 1) for row in range(ROWS)]


def packed(rows: Any) -> PackedSequence:
    return pack_sequence([SEQUENCES[row] for row in rows], enforce_sorted=False)


def test_a_packed_sequence_is_one_value_of_as_many_rows_as_sequences() -> None:
    model, wanted = Recurrent(), INPUTS[:, :1]  # not labels: a mean counts samples, not the steps of their sequences

    def collate(rows: list[int]) -> tuple[PackedSequence, Tensor]:
        return packed(rows), wanted[rows]

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean()

    actual = updates_of(model, Rows(lambda row: row), collate_fn=collate, loss_fn=loss_fn)
    windows = [range(4), range(4, ROWS)]
    assert_updates(
        actual, model, [lambda rows=rows: loss_fn(model(packed(rows)), wanted[list(rows)]) for rows in windows]
    )


class Squared(Recurrent):
    def forward(self, sequences: PackedSequence) -> Tensor:
        return super().forward(sequences).square().mean()


def test_a_packed_sequence_can_be_the_whole_batch() -> None:
    model = Squared()
    actual = updates_of(model, Rows(lambda row: row), collate_fn=packed)
    assert_updates(actual, model, [lambda: model(packed(range(4))), lambda: model(packed(range(4, ROWS)))])


def test_rows_of_a_packed_sequence_are_taken_out() -> None:
    sequences, labels = take_rows((packed(range(4)), TARGETS[:4]), 1, 3)
    assert count_rows(sequences) == len(labels) == 2
    for sequence, row in zip(unpack_sequence(sequences), (1, 2), strict=True):
        assert torch.equal(sequence, SEQUENCES[row])


# -- what does not fit ---------------------------------------------------------------------------------------------


def test_a_column_that_forward_does_not_take_is_an_error() -> None:
    data = Rows(lambda row: {"inputs": INPUTS[row], "targets": TARGETS[row], "nane": NAMES[row]})
    with pytest.raises(ConfigurationError, match=r"has 'nane', which Returning.forward does not take.*mean 'name'"):
        updates_of(Returning(), data)


def tiny_bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    sizes |= {"vocab_size": 13, "num_labels": 5}
    return BertForSequenceClassification(BertConfig(**sizes))


def tiny_gpt() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=13, n_positions=8))


def tiny_adapter() -> Any:
    from peft import LoraConfig, TaskType, get_peft_model

    return get_peft_model(tiny_bert(), LoraConfig(task_type=TaskType.SEQ_CLS, r=2, target_modules=["query"]))


IDS = torch.randint(13, (ROWS, 4), generator=GENERATOR)


# PEFT asks transformers for a name that is on its way out.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("model", [tiny_bert, tiny_gpt, tiny_adapter])
@pytest.mark.parametrize("column", ["text", "idx"])
def test_columns_that_models_of_transformers_would_ignore_are_an_error(model: Callable[[], Any], column: str) -> None:
    """Models of transformers take **kwargs and ignore unknown keywords."""

    def sample(row: int) -> dict[str, Any]:
        labels = IDS[row] if model is tiny_gpt else TARGETS[row]
        return {"input_ids": IDS[row], "labels": labels, column: NAMES[row] if column == "text" else row}

    with pytest.raises(ConfigurationError, match=f"has '{column}', which .* does not take.*remove_columns"):
        updates_of(model(), Rows(sample))
    if column == "idx":  # in predictions too, without labels
        rows = [{"input_ids": IDS[row], "idx": row} for row in range(3)]
        with pytest.raises(ConfigurationError, match="has 'idx', which"):
            Trainer(model(), TrainingArguments(use_cpu=True, progress_bar=False)).predict(rows)


def test_a_model_may_take_any_name() -> None:
    class Open(Returning):
        def forward(self, inputs: Tensor, targets: Tensor, **rest: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(inputs, targets) + rest["more"].mean()

    rows = [{"inputs": INPUTS[row], "targets": TARGETS[row], "more": INPUTS[row]} for row in range(ROWS)]
    assert len(updates_of(Open(), rows).losses) == 2


def test_names_that_a_base_class_takes_are_accepted() -> None:
    """As of sequence classifiers of transformers that add fields to the forward of their base class."""
    from transformers import BertForSequenceClassification

    class Further(BertForSequenceClassification):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().forward(input_ids=input_ids, **kwargs)

    torch.manual_seed(0)
    model = Further(tiny_bert().config)
    rows = [{"input_ids": IDS[row], "labels": TARGETS[row]} for row in range(ROWS)]
    with pytest.raises(ConfigurationError, match=r"has 'idx', which .* does not take"):
        updates_of(model, [{**row, "idx": 0} for row in rows])
    assert len(updates_of(model, rows).losses) == 2


def test_keywords_of_transformers_models_are_accepted() -> None:
    rows = [{"input_ids": IDS[row], "labels": TARGETS[row]} for row in range(ROWS)]

    def with_hidden_states(samples: list[dict[str, Tensor]]) -> dict[str, Any]:
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        return {**batch, "output_hidden_states": True}

    updates = updates_of(tiny_bert(), rows, collate_fn=with_hidden_states)
    assert len(updates.losses) == 2


# -- the parts of batches and outputs --------------------------------------------------------------------------------


def test_valid_labels_are_the_items() -> None:
    labels = torch.tensor([[1, 2, -100], [-100, -100, 3]])
    assert count_items({"x": torch.zeros(2, 3), "labels": labels}) == 3
    assert count_items({"x": torch.zeros(2, 3), "labels": labels}, shifted=True) == 2
    assert count_items((torch.zeros(2, 3), labels.float())) == 2  # values: samples
    assert count_items((torch.zeros(2, 3), labels > 0)) == 6
    assert count_items(torch.zeros(4, 3)) == 4
    assert count_items({"pixels": torch.zeros(5, 3), "start_positions": labels, "end_positions": labels}) == 5


@pytest.mark.parametrize("name", ["labels", "label", "targets", "target", "y"])
def test_targets_are_found_by_name(name: str) -> None:
    inputs, targets = split({"x": INPUTS, name: TARGETS})
    assert list(inputs) == ["x"]
    assert targets is TARGETS


def test_targets_of_question_answering_are_positions() -> None:
    batch = {"input_ids": IDS, "start_positions": TARGETS, "end_positions": TARGETS}
    assert list(targets_of(batch)) == ["start_positions", "end_positions"]
    assert targets_of({"input_ids": IDS, "start_positions": TARGETS}) is None
    assert targets_of({"input_ids": IDS}) is None
    assert targets_of(INPUTS) is targets_of((INPUTS,)) is None


LOSS = torch.tensor(2.0)


@pytest.mark.parametrize(
    ("outputs", "loss", "predictions"),
    [
        (INPUTS, None, INPUTS),
        (LOSS, LOSS, None),
        ((INPUTS, LOSS), LOSS, INPUTS),
        ((LOSS, INPUTS, None), LOSS, INPUTS),
        ((INPUTS, None), None, INPUTS),
        ((LOSS, LOSS, INPUTS), None, INPUTS),
        ({"loss": LOSS, "logits": INPUTS, "hidden_states": IDS}, LOSS, INPUTS),
        ({"loss": None, "logits": INPUTS}, None, INPUTS),
        ({"loss": LOSS, "scores": INPUTS, "past_key_values": object()}, LOSS, INPUTS),
        ({"last_hidden_state": INPUTS, "cache": DynamicCache()}, None, INPUTS),  # as of transformers 5.24
        ({"last_hidden_state": INPUTS, "cache": None}, None, INPUTS),
        (Sample(INPUTS, None, None), None, INPUTS),
    ],
)
def test_loss_and_predictions_are_found_in_outputs(outputs: Any, loss: Any, predictions: Any) -> None:
    assert loss_of(outputs) is loss
    assert predictions_of(outputs) is predictions


def test_predictions_of_several_values_keep_their_names() -> None:
    outputs = {"loss": LOSS, "start_logits": INPUTS, "end_logits": IDS}
    assert list(predictions_of(outputs)) == ["start_logits", "end_logits"]
    assert predictions_of((LOSS, INPUTS, IDS)) == (INPUTS, IDS)


def test_a_field_with_a_name_like_one_that_the_model_takes_is_to_be_renamed() -> None:
    class Labeled(nn.Module):
        def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
            return inputs, labels

    with pytest.raises(
        ConfigurationError, match=r"Did you mean 'labels'\? Rename the column \(rename_column\)\. If not"
    ):
        check_names(Labeled(), {"inputs": INPUTS, "label": TARGETS})
    with pytest.raises(ConfigurationError, match=r"It takes: inputs, labels\. Remove these columns"):
        check_names(Labeled(), {"inputs": INPUTS, "speaker": TARGETS})
