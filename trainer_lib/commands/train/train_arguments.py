"""The arguments of `trainer-lib train`: those of the task, its model and data, beside all training arguments."""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.trainer.arguments import value_checks as checks
from trainer_lib.trainer.arguments.declaration import OnResume, documented, setting
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments

# The sections of the arguments; `--help` shows them first.
TASK = "task and model"
FILES = "data files and columns"

TaskName = Literal[
    "text-classification",
    "token-classification",
    "causal-lm",
    "seq2seq",
    "image-classification",
    "regression",
    "tabular",
]


@documented
@dataclass(kw_only=True)
class TrainArguments(TrainingArguments):
    """What `trainer-lib train` trains, and all training arguments.

    Example:
        >>> arguments = TrainArguments(task="tabular", model="mlp", data="iris.csv", max_steps=100)
        >>> arguments.training_arguments().max_steps
        100
    """

    task: TaskName | None = setting(
        TASK,
        None,
        "What to learn: text-classification, token-classification, causal-lm, seq2seq, image-classification, "
        "regression (a number, from a text or from columns), tabular (a class, from columns).",
    )
    model: str | None = setting(
        TASK,
        None,
        "The model: a folder or a name of transformers, package:factory (a function or class that makes a module), "
        "or mlp, mlp:64,64 for tables.",
        on_resume=OnResume.SILENT,
    )
    model_options: dict[str, Any] = setting(
        TASK, {}, "Arguments of the factory, or values of the configuration: {hidden_size: 64}."
    )
    from_config: bool = setting(
        TASK,
        False,
        "Train from scratch: make the model from its configuration (a folder, or a type such as bert), with new "
        "weights.",
    )
    tokenizer: str | None = setting(TASK, None, "The folder or name of the tokenizer (default: that of the model).")

    data: str | None = setting(
        FILES,
        None,
        "The training data: a file (.jsonl, .json, .csv, .tsv, .parquet, .txt), a folder of such files, a folder with "
        "a folder of images for each class, or a dataset of Hugging Face, by its folder or name.",
        on_resume=OnResume.SILENT,
    )
    eval_data: str | None = setting(FILES, None, "The evaluation data, in a form of data.", on_resume=OnResume.SILENT)
    eval_fraction: float | None = setting(
        FILES,
        None,
        "The fraction of the training data to evaluate on instead; the same as validation_split.",
        check=checks.share,
    )
    data_split: str = setting(FILES, "train", "The split to train on, of a dataset of Hugging Face that has several.")
    text_column: str | None = setting(FILES, None, "The column of texts, tokens (token-classification) or sources.")
    label_column: str | None = setting(FILES, None, "The column of labels, of tags or of the number to predict.")
    target_column: str | None = setting(FILES, None, "The column of targets of seq2seq.")
    image_column: str | None = setting(FILES, None, "The column of image files, relative to the data file.")
    feature_columns: Sequence[str] | None = setting(
        FILES, None, "The columns to predict from, for tables (default: all but the label)."
    )
    max_length: int | None = setting(
        FILES,
        None,
        "Tokens at which texts are cut, or of a row of causal-lm (default: what the model takes, up to 512).",
        check=checks.whole(at_least=2),
    )
    image_size: int | None = setting(
        FILES, None, "Pixels of the sides of an image (default: what the model takes, else 224).", check=checks.whole()
    )

    output_dir: str | os.PathLike[str] | None = "runs"

    def __post_init__(self) -> None:
        """Check each value, and that what is needed is there."""
        super().__post_init__()
        for name in ("task", "model", "data"):
            if getattr(self, name) is None:
                raise ConfigurationError(f"--{name} is missing. `trainer-lib train --help` says what it may be.")
        if self.eval_fraction is not None and self.validation_split is not None:
            raise ConfigurationError("eval_fraction and validation_split are the same. Give one of them.")
        self.validation_split: float | None = self.eval_fraction or self.validation_split
        self.eval_fraction = None
        if self.validation_split is not None and self.eval_data is not None:
            raise ConfigurationError(
                f"eval_data={self.eval_data!r} and eval_fraction={self.validation_split:g} both set the evaluation "
                "data. Give one of them."
            )

    def training_arguments(self, **changes: Any) -> TrainingArguments:
        """Return the training arguments alone.

        Args:
            **changes: Values that replace those of this object.
        """
        names = [field.name for field in dataclasses.fields(TrainingArguments)]
        return TrainingArguments(**{**{name: getattr(self, name) for name in names}, **changes})

    def own_arguments(self) -> dict[str, Any]:
        """Return the arguments of the task, its model and data."""
        of_trainer = {field.name for field in dataclasses.fields(TrainingArguments)}
        fields = [field.name for field in dataclasses.fields(self) if field.name not in of_trainer]
        return {name: getattr(self, name) for name in fields}
