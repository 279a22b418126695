"""Tasks on tables: a class or a number from the numbers and texts of a row."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from trainer_lib.commands.train import task_models
from trainer_lib.commands.train.data_table import Table
from trainer_lib.commands.train.labels import Classes, check_several, labels_in
from trainer_lib.commands.train.prepared_task import PreparedTask
from trainer_lib.commands.train.text_tasks import numbers_in, squared_error, text_regression
from trainer_lib.commands.train.train_arguments import TrainArguments
from trainer_lib.foundation.errors import ConfigurationError

_MOST_VALUES = 64  # different texts of a column


class Features:
    """The numbers that a row of a table becomes: its numbers, and a 0 or 1 for each value of its texts.

    Args:
        table: The training data.
        columns: The columns to predict from.
    """

    def __init__(self, table: Table, columns: Sequence[str]) -> None:
        self.columns: list[str] = list(columns)
        self.values: dict[str, list[str]] = {}  # of the columns of texts
        for column in columns:
            values = table.values(column, (int, float, str), "a number or a text", "feature_columns")
            if any(not _is_number(value) for value in values):
                self.values[column] = sorted({str(value) for value in values})
                if len(self.values[column]) > _MOST_VALUES:
                    raise ConfigurationError(
                        f"{table.source}: the column {column!r} has {len(self.values[column])} different texts, and at "
                        f"most {_MOST_VALUES} can be told apart. Leave it out: name the others with --feature_columns."
                    )

    @property
    def names(self) -> list[str]:
        """The names of the numbers."""
        return [
            f"{column}={value}" if value is not None else column
            for column in self.columns
            for value in self.values.get(column, [None])
        ]

    def encode(self, table: Table) -> Tensor:
        """Return the numbers of all rows.

        Raises:
            ConfigurationError: With the line of a text that the training data does not have.
        """
        parts: list[Tensor] = []
        for column in self.columns:
            if column not in self.values:
                parts.append(torch.tensor(numbers_in(table, column)).unsqueeze(1))
                continue
            known = {value: number for number, value in enumerate(self.values[column])}
            values = table.values(column, (int, float, str), "a number or a text", "feature_columns")
            for row, value in enumerate(values):
                if str(value) not in known:
                    raise ConfigurationError(
                        f"{table.where(row)}: {column!r} is {value!r}, which the training data has not."
                    )
            numbers = torch.tensor([known[str(value)] for value in values])
            parts.append(torch.nn.functional.one_hot(numbers, len(known)).float())
        return torch.cat(parts, dim=1)


def tabular(arguments: TrainArguments, data: Table, evaluation: Table | None) -> PreparedTask:
    """Prepare the prediction of a class from a row."""
    label = data.find("label", "label_column", arguments.label_column)
    classes = Classes(labels_in(data, label))
    check_several(classes, data, label)

    def labels(table: Table) -> Tensor:
        return torch.tensor([classes.number(value, table, row) for row, value in enumerate(labels_in(table, label))])

    features, train, offered = _features(arguments, data, label)
    return PreparedTask(
        train=(train, labels(data)),
        evaluation=None if evaluation is None else (features.encode(evaluation), labels(evaluation)),
        model=_model(arguments, len(classes), {**offered, "num_labels": len(classes)}),
        loss_fn=cross_entropy,
        metrics=["accuracy", "f1_macro"],
        columns=f"{len(features.columns)} columns, labels from {label!r} ({classes})",
        facts={"classes": classes.names, "label_column": label, **_facts(features, offered)},
    )


def regression(arguments: TrainArguments, data: Table, evaluation: Table | None) -> PreparedTask:
    """Prepare the prediction of a number, from a text for a model of texts, else from the columns of a row."""
    assert arguments.model is not None
    is_text = arguments.text_column is not None or arguments.tokenizer is not None
    if is_text or not (task_models.is_table_network(arguments.model) or task_models.is_factory(arguments.model)):
        return text_regression(arguments, data, evaluation)
    label = data.find("number", "label_column", arguments.label_column)
    targets = torch.tensor(numbers_in(data, label))
    features, train, offered = _features(arguments, data, label)
    offered |= {"target_mean": float(targets.mean()), "target_std": float(targets.std(correction=0)) or 1.0}
    held_out = None
    if evaluation is not None:
        held_out = (features.encode(evaluation), torch.tensor(numbers_in(evaluation, label)))
    return PreparedTask(
        train=(train, targets),
        evaluation=held_out,
        model=_model(arguments, 1, {**offered, "num_labels": 1}),
        loss_fn=squared_error,
        metrics=["mse", "mae"],
        columns=f"{len(features.columns)} columns, numbers from {label!r}",
        facts={"label_column": label, **_facts(features, offered)},
    )


def _features(arguments: TrainArguments, data: Table, label: str) -> tuple[Features, Tensor, dict[str, Any]]:
    """Return the features of a table, their numbers, and what a model may want to know of them."""
    columns = arguments.feature_columns or [name for name in data.columns if name != label]
    for column in columns:
        data.find("feature", "feature_columns", column)
    if not columns or label in columns:
        raise ConfigurationError(f"{data.source} needs columns to predict {label!r} from, other than {label!r} itself.")
    features = Features(data, columns)
    numbers = features.encode(data)
    std = numbers.std(dim=0, correction=0)
    statistics = {"feature_mean": numbers.mean(dim=0), "feature_std": torch.where(std > 0, std, 1.0)}
    return features, numbers, {"num_features": numbers.shape[1], **statistics}


def _model(arguments: TrainArguments, outputs: int, offered: Mapping[str, Any]) -> Any:
    assert arguments.model is not None
    if task_models.is_table_network(arguments.model):
        return task_models.table_network(arguments, outputs, offered)
    if task_models.is_factory(arguments.model):
        return task_models.from_factory(arguments, offered)
    raise ConfigurationError(
        f"--task {arguments.task} does not fit --model {arguments.model}. Give mlp, mlp:64,64 or package:factory."
    )


def _facts(features: Features, offered: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in offered.items()}
    return json.loads(json.dumps({"features": features.names, "values": features.values, **plain}))


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True
