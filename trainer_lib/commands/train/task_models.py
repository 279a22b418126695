"""The model of a task: from transformers, from a factory in a package, or a small network for tables."""

import importlib
import inspect
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.commands.train.train_arguments import TrainArguments
from trainer_lib.foundation.errors import ConfigurationError, did_you_mean
from trainer_lib.foundation.imports import require

_TABLE_NETWORK = "mlp"
_HIDDEN = (64, 64)


def is_factory(model: str) -> bool:
    """Whether a model is given as package:factory."""
    module, colon, name = model.partition(":")
    return bool(colon) and module != _TABLE_NETWORK and all(part.isidentifier() for part in [*module.split("."), name])


def is_table_network(model: str) -> bool:
    """Whether a model is the small network for tables."""
    return model.partition(":")[0] == _TABLE_NETWORK


def from_factory(arguments: TrainArguments, offered: Mapping[str, Any]) -> nn.Module:
    """Return what a factory makes.

    Args:
        arguments: The arguments; `model_options` go to the factory.
        offered: Further arguments, for a factory that has parameters of these names.
    """
    assert arguments.model is not None
    factory = _factory(arguments.model)
    taken = {name: value for name, value in offered.items() if _takes(factory, name)}
    try:
        model = factory(**{**taken, **arguments.model_options})
    except TypeError as error:
        raise ConfigurationError(
            f"--model {arguments.model} cannot be called with --model_options: {error}."
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"--model {arguments.model} returned a {type(model).__name__}, and not a module.")
    return model


def _factory(path: str) -> Any:
    module_name, _, name = path.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigurationError(f"--model {path}: the module {module_name!r} cannot be imported: {error}.") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        names = [each for each in dir(module) if callable(getattr(module, each))]
        raise ConfigurationError(f"--model {path}: {module_name} has no {name!r} to call.{did_you_mean(name, names)}")
    return factory


def _takes(factory: Any, name: str) -> bool:
    return name in inspect.signature(factory).parameters


# -- transformers ----------------------------------------------------------------------------------------------------


def read_config(arguments: TrainArguments) -> Any:
    """Return the configuration of a model of transformers.

    Raises:
        ConfigurationError: If it cannot be read.
    """
    transformers: Any = require("transformers", "transformers")
    name, options = arguments.model, arguments.model_options if arguments.from_config else {}
    types: Any = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if arguments.from_config and name in types and not Path(str(name)).exists():
        return transformers.AutoConfig.for_model(name, **options)
    try:
        return transformers.AutoConfig.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        raise _unreadable(arguments, "model", str(name), error) from error


def read_tokenizer(arguments: TrainArguments) -> Any:
    """Return the tokenizer, with a padding token.

    Raises:
        ConfigurationError: If it cannot be read.
    """
    transformers: Any = require("transformers", "transformers")
    name = str(arguments.tokenizer or arguments.model)
    if arguments.tokenizer is None and is_factory(name):
        raise ConfigurationError(f"--model {name} needs --tokenizer, a folder or a name of transformers, for texts.")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(arguments, "tokenizer", name, error) from error
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ConfigurationError(f"The tokenizer of {name} has neither a padding nor an end token. Give it one.")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def from_transformers(arguments: TrainArguments, kind: str, config: Any, changes: Mapping[str, Any]) -> Any:
    """Return a model of transformers.

    Args:
        arguments: The arguments.
        kind: The class that makes it, such as "AutoModelForCausalLM".
        config: Its configuration.
        changes: Values of the configuration that the task sets.

    Raises:
        ConfigurationError: If the task does not fit the model.
    """
    transformers: Any = require("transformers", "transformers")
    for name, value in changes.items():
        setattr(config, name, value)
    auto = getattr(transformers, kind)
    if type(config) not in auto._model_mapping:  # pyright: ignore[reportPrivateUsage]  # its only table of models
        raise ConfigurationError(
            f"--task {arguments.task} does not fit --model {arguments.model}: transformers has no {kind} of a "
            f"{config.model_type}. {_fitting(transformers, type(config))}"
        )
    if arguments.from_config:
        return auto.from_config(config)
    try:
        return auto.from_pretrained(arguments.model, config=config, ignore_mismatched_sizes=True)
    except (OSError, ValueError) as error:
        raise _unreadable(arguments, "model", str(arguments.model), error) from error


TASK_CLASSES = {
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "causal-lm": "AutoModelForCausalLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
}


def _fitting(transformers: Any, config: type) -> str:
    tasks = [task for task, kind in TASK_CLASSES.items() if config in getattr(transformers, kind)._model_mapping]
    return f"It fits --task {', '.join(tasks)}." if tasks else "It fits none of the tasks."


def _unreadable(arguments: TrainArguments, what: str, name: str, error: Exception) -> ConfigurationError:
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    hint = "Give a folder that save_pretrained wrote, or a name that this machine can load."
    if what == "model" and not arguments.from_config:
        hint += " A folder with a config.json alone trains from scratch with --from_config."
    return ConfigurationError(f"The {what} {name!r} cannot be read: {reason.rstrip('.')}. {hint}")


# -- tables ----------------------------------------------------------------------------------------------------------


class TableNetwork(nn.Module):
    """A network for numbers, which standardizes its inputs, and scales its output for a regression.

    Args:
        num_features: The numbers of a row.
        num_outputs: The classes, or 1 for a regression.
        hidden: The widths of its layers.
        feature_mean: The mean of each number in the training data.
        feature_std: The standard deviation of each.
        target_mean: The mean of what a regression predicts.
        target_std: Its standard deviation.

    Example:
        >>> network = TableNetwork(3, 2, (8,), feature_mean=torch.zeros(3), feature_std=torch.ones(3))
        >>> network(torch.ones(5, 3)).shape
        torch.Size([5, 2])
    """

    feature_mean: Tensor
    feature_std: Tensor
    target_mean: Tensor
    target_std: Tensor

    def __init__(
        self,
        num_features: int,
        num_outputs: int,
        hidden: Sequence[int] = _HIDDEN,
        *,
        feature_mean: Tensor,
        feature_std: Tensor,
        target_mean: float = 0.0,
        target_std: float = 1.0,
    ) -> None:
        super().__init__()
        self.register_buffer("feature_mean", feature_mean)
        self.register_buffer("feature_std", feature_std)
        self.register_buffer("target_mean", torch.tensor(target_mean))
        self.register_buffer("target_std", torch.tensor(target_std))
        widths = [num_features, *hidden]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.layers: nn.Sequential = nn.Sequential(*layers, nn.Linear(widths[-1], num_outputs))

    def forward(self, features: Tensor) -> Tensor:
        """Return scores of classes, or the predicted numbers."""
        scores = self.layers((features - self.feature_mean) / self.feature_std)
        return scores * self.target_std + self.target_mean


def table_network(arguments: TrainArguments, num_outputs: int, offered: Mapping[str, Any]) -> TableNetwork:
    """Return the small network for tables, with the widths that `mlp:64,64` names."""
    assert arguments.model is not None
    _, colon, widths = arguments.model.partition(":")
    parts = widths.split(",") if colon else []
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigurationError(
            f"--model {arguments.model}: the widths of layers must be whole numbers, as in mlp:64,64."
        )
    names = ("feature_mean", "feature_std", "target_mean", "target_std")
    statistics = {name: offered[name] for name in names if name in offered}
    return TableNetwork(offered["num_features"], num_outputs, [int(part) for part in parts] or _HIDDEN, **statistics)
