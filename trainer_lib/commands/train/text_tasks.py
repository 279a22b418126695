"""Tasks on texts: classification of texts and tokens, language models, sequence to sequence, a number from a text."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch.nn.functional import cross_entropy

from trainer_lib.commands.train import task_models
from trainer_lib.commands.train.data_table import Table
from trainer_lib.commands.train.labels import Classes, check_several, labels_in
from trainer_lib.commands.train.prepared_task import PreparedTask
from trainer_lib.commands.train.train_arguments import TrainArguments
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.tensors.batch_fields import IGNORE_INDEX

Samples = list[dict[str, Any]]
LossFunction = Callable[[Any, Any], Any]

_LONGEST = 512
_BATCH = 1000  # texts that are tokenized in one call


class _Text:
    """A model of texts that is to be made, its tokenizer and lengths."""

    def __init__(self, arguments: TrainArguments) -> None:
        assert arguments.model is not None
        if task_models.is_table_network(arguments.model):
            raise ConfigurationError(
                f"--task {arguments.task} does not fit --model {arguments.model}, which takes numbers. Give a model of "
                "texts: a folder or a name of transformers, or package:factory."
            )
        self.arguments = arguments
        self.is_factory = task_models.is_factory(arguments.model)
        self.config = None if self.is_factory else task_models.read_config(arguments)
        self.tokenizer = task_models.read_tokenizer(arguments)
        known = [self.tokenizer.model_max_length, getattr(self.config, "max_position_embeddings", None), _LONGEST]
        self._computes_loss = True
        self.longest = arguments.max_length or min(length for length in known if length)

    def tokenize(self, texts: Sequence[Any], **options: Any) -> dict[str, list[Any]]:
        """Return the tokens of texts, by the names that the model takes."""
        encoded: dict[str, list[Any]] = {}
        for start in range(0, len(texts), _BATCH):
            part = self.tokenizer(list(texts[start : start + _BATCH]), max_length=self.longest, **options)
            for name, rows in part.items():
                encoded.setdefault(name, []).extend(rows)
        return encoded

    def ended(self, tokens: list[int]) -> list[int]:
        """Return tokens with the token that ends a text, if the tokenizer has one and did not add it."""
        end = self.tokenizer.eos_token_id
        return tokens if end is None or tokens[-1:] == [end] else [*tokens, end]

    def make(self, kind: str, **changes: Any) -> Any:
        """Return the model.

        Args:
            kind: The class of transformers that makes it.
            **changes: Values of its configuration, which a factory gets as arguments.
        """
        if self.is_factory:
            names = {"num_labels": len(changes["id2label"])} if "id2label" in changes else {}
            offered = {
                **changes,
                **names,
                "vocab_size": len(self.tokenizer),
                "pad_token_id": self.tokenizer.pad_token_id,
            }
            made = task_models.from_factory(self.arguments, offered)
            self._computes_loss = "labels" in inspect.signature(made.forward).parameters
            return made
        if self.arguments.from_config and "vocab_size" not in self.arguments.model_options:
            changes = {**changes, "vocab_size": len(self.tokenizer), **_special_tokens(self.tokenizer, self.config)}
        if getattr(self.config, "pad_token_id", None) is None:
            changes = {**changes, "pad_token_id": self.tokenizer.pad_token_id}
        return task_models.from_transformers(self.arguments, kind, self.config, changes)

    def loss_of_factory(self, loss_fn: LossFunction | None = None) -> LossFunction | None:
        """Return the loss for a model of a factory that does not compute it from labels; `None` for other models.

        Args:
            loss_fn: The loss of the task; `None`: the model has to compute it.
        """
        if self._computes_loss:
            return None
        if loss_fn is None:
            raise ConfigurationError(
                f"--model {self.arguments.model}: for {self.arguments.task} the model computes its loss, and its "
                "forward() has no parameter `labels`. Add it, and return the loss, as models of transformers do."
            )
        return loss_fn

    def known_classes(self) -> list[str]:
        """Return the classes of a model that was trained before, by number."""
        names: dict[int, str] = getattr(self.config, "id2label", None) or {}
        return [names[number] for number in sorted(names)]


def text_classification(arguments: TrainArguments, data: Table, evaluation: Table | None) -> PreparedTask:
    """Prepare the classification of texts."""
    text = _Text(arguments)
    column = data.find("text", "text_column", arguments.text_column)
    label = data.find("label", "label_column", arguments.label_column)
    classes = Classes(labels_in(data, label), text.known_classes())
    check_several(classes, data, label)

    def samples(table: Table | None) -> Samples | None:
        if table is None:
            return None
        labels = [classes.number(value, table, row) for row, value in enumerate(labels_in(table, label))]
        return _rows({**_texts(text, table, column, "text_column"), "labels": labels})

    return PreparedTask(
        train=samples(data),
        evaluation=samples(evaluation),
        model=text.make(task_models.TASK_CLASSES["text-classification"], **classes.config()),
        processor=text.tokenizer,
        loss_fn=text.loss_of_factory(cross_entropy),
        metrics=["accuracy", "f1_macro"],
        columns=f"text from {column!r}, labels from {label!r} ({classes})",
        facts={"classes": classes.names, "text_column": column, "label_column": label},
    )


def text_regression(arguments: TrainArguments, data: Table, evaluation: Table | None) -> PreparedTask:
    """Prepare the prediction of a number from a text."""
    text = _Text(arguments)
    column = data.find("text", "text_column", arguments.text_column)
    label = data.find("number", "label_column", arguments.label_column)

    def samples(table: Table | None) -> Samples | None:
        if table is None:
            return None
        return _rows({**_texts(text, table, column, "text_column"), "labels": numbers_in(table, label)})

    return PreparedTask(
        train=samples(data),
        evaluation=samples(evaluation),
        model=text.make(task_models.TASK_CLASSES["text-classification"], num_labels=1, problem_type="regression"),
        processor=text.tokenizer,
        loss_fn=text.loss_of_factory(squared_error),
        metrics=["mse", "mae"],
        columns=f"text from {column!r}, numbers from {label!r}",
        facts={"text_column": column, "label_column": label},
    )


def token_classification(arguments: TrainArguments, data: Table, evaluation: Table | None) -> PreparedTask:
    """Prepare the classification of each word; a word that is split has its label at its first token."""
    text = _Text(arguments)
    if not text.tokenizer.is_fast:
        raise ConfigurationError(f"--task token-classification needs a fast tokenizer, and {arguments.model} has none.")
    column = data.find("tokens", "text_column", arguments.text_column)
    tags = data.find("tags", "label_column", arguments.label_column)
    classes = Classes((tag for row in _lists(data, tags, "label_column") for tag in row), text.known_classes())

    def samples(table: Table | None) -> Samples | None:
        if table is None:
            return None
        words, labels = _lists(table, column, "text_column"), _lists(table, tags, "label_column")
        rows: Samples = []
        for row, (of_words, of_tags) in enumerate(zip(words, labels, strict=True)):
            if len(of_words) != len(of_tags):
                raise ConfigurationError(
                    f"{table.where(row)}: {len(of_words)} values in {column!r} and {len(of_tags)} in {tags!r}; each "
                    "word needs one tag."
                )
            numbers = [classes.number(tag, table, row) for tag in of_tags]
            encoded = text.tokenizer(of_words, is_split_into_words=True, truncation=True, max_length=text.longest)
            ids = encoded.word_ids()
            is_first = [word is not None and word not in ids[:place] for place, word in enumerate(ids)]
            aligned = [numbers[word] if first else IGNORE_INDEX for word, first in zip(ids, is_first, strict=True)]
            rows.append({**encoded, "labels": aligned})
        return rows

    return PreparedTask(
        train=samples(data),
        evaluation=samples(evaluation),
        model=text.make(task_models.TASK_CLASSES["token-classification"], **classes.config()),
        processor=text.tokenizer,
        loss_fn=text.loss_of_factory(),
        metrics=["accuracy", "f1_macro"],
        columns=f"words from {column!r}, tags from {tags!r} ({classes})",
        facts={"classes": classes.names, "text_column": column, "label_column": tags},
    )


def causal_lm(arguments: TrainArguments, data: Table, evaluation: Table | None) -> PreparedTask:
    """Prepare a language model: the texts one after the other, in rows of `max_length` tokens."""
    text = _Text(arguments)
    column = data.find("text", "text_column", arguments.text_column)

    def samples(table: Table | None) -> Samples | None:
        if table is None:
            return None
        texts = table.values(column, str, "a text", "text_column")
        tokens = [token for row in text.tokenizer(texts)["input_ids"] for token in text.ended(row)]
        parts = [tokens[start : start + text.longest] for start in range(0, len(tokens), text.longest)]
        parts = [part for part in parts if len(part) > 1]  # a single token predicts nothing
        if not parts:
            raise ConfigurationError(f"{table.source}: the column {column!r} has no tokens to learn from.")
        return [{"input_ids": part, "attention_mask": [1] * len(part), "labels": part} for part in parts]

    return PreparedTask(
        train=samples(data),
        evaluation=samples(evaluation),
        model=text.make(task_models.TASK_CLASSES["causal-lm"]),
        processor=text.tokenizer,
        loss_fn=text.loss_of_factory(),
        metrics=["perplexity"],
        columns=f"text from {column!r}, in rows of {text.longest} tokens",
        facts={"text_column": column},
    )


def seq2seq(arguments: TrainArguments, data: Table, evaluation: Table | None) -> PreparedTask:
    """Prepare sequence to sequence: a text from a text."""
    text = _Text(arguments)
    source = data.find("source", "text_column", arguments.text_column)
    target = data.find("target", "target_column", arguments.target_column)
    if source == target:
        raise ConfigurationError(
            f"The column {source!r} is both source and target. Name them with --text_column and --target_column."
        )

    def samples(table: Table | None) -> Samples | None:
        if table is None:
            return None
        targets = table.values(target, str, "a text", "target_column")
        labels: list[Any] = []
        for start in range(0, len(targets), _BATCH):
            part = targets[start : start + _BATCH]
            encoded = text.tokenizer(text_target=part, truncation=True, max_length=text.longest - 1)
            labels += [text.ended(row) for row in encoded["input_ids"]]
        return _rows({**_texts(text, table, source, "text_column"), "labels": labels})

    generates = arguments.predict_with_generate

    def exact_match(result: Any) -> dict[str, float]:
        texts = [_decoded(text.tokenizer, part) for part in (result.predictions, result.label_ids)]
        return {
            "exact_match": float(np.mean([predicted == expected for predicted, expected in zip(*texts, strict=True)]))
        }

    return PreparedTask(
        train=samples(data),
        evaluation=samples(evaluation),
        model=text.make(task_models.TASK_CLASSES["seq2seq"]),
        processor=text.tokenizer,
        loss_fn=text.loss_of_factory(),
        metrics=None if generates else ["perplexity"],
        compute_metrics=exact_match if generates else None,
        columns=f"sources from {source!r}, targets from {target!r}",
        facts={"text_column": source, "target_column": target},
    )


def squared_error(predictions: Any, numbers: Any) -> Any:
    """Return the mean squared error of predictions with or without a dimension of one."""
    return (predictions.reshape(numbers.shape) - numbers).square().mean()


def numbers_in(table: Table, column: str) -> list[float]:
    """Return the numbers of a column; texts that are numbers count, since CSV has no others.

    Raises:
        ConfigurationError: With the line of a value that is no number.
    """
    numbers: list[float] = []
    for row, value in enumerate(table.values(column, (int, float, str), "a number", "label_column")):
        try:
            numbers.append(float(value))
        except ValueError as error:
            raise ConfigurationError(
                f"{table.where(row)}: {column!r} is {value!r}, and must be a number. Correct it, or name another "
                "column."
            ) from error
        if not np.isfinite(numbers[-1]):
            raise ConfigurationError(f"{table.where(row)}: {column!r} is {value!r}, and must be finite.")
    return numbers


def _texts(text: _Text, table: Table, column: str, option: str) -> dict[str, list[Any]]:
    return text.tokenize(table.values(column, str, "a text", option), truncation=True)


def _rows(columns: dict[str, list[Any]]) -> Samples:
    names = list(columns)
    return [dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _lists(table: Table, column: str, option: str) -> list[list[Any]]:
    """Return the lists of a column; a text is split at its spaces."""
    values = table.values(column, (list, str), "a list, or a text of words with spaces between them", option)
    return [value.split() if isinstance(value, str) else list(value) for value in values]


def _decoded(tokenizer: Any, tokens: Any) -> list[str]:
    kept = np.where(np.asarray(tokens) < 0, tokenizer.pad_token_id, tokens)
    return [text.strip() for text in tokenizer.batch_decode(kept, skip_special_tokens=True)]


def _special_tokens(tokenizer: Any, config: Any) -> dict[str, Any]:
    """Return the numbers of special tokens, which a configuration of another tokenizer has wrong."""
    names = [name for name in ("pad_token_id", "bos_token_id", "eos_token_id") if hasattr(config, name)]
    tokens: dict[str, Any] = {name: getattr(tokenizer, name, None) for name in names}
    if getattr(config, "is_encoder_decoder", False):
        tokens["decoder_start_token_id"] = tokenizer.pad_token_id
    return tokens
