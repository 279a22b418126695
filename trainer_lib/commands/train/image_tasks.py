"""The classification of images, from files or a dataset."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from trainer_lib.commands.train import task_models
from trainer_lib.commands.train.data_table import Table
from trainer_lib.commands.train.labels import Classes, check_several, labels_in
from trainer_lib.commands.train.prepared_task import PreparedTask
from trainer_lib.commands.train.train_arguments import TrainArguments
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.imports import require

_FILE = "preprocessor_config.json"
_SIZE = 224
_HALF = (0.5, 0.5, 0.5)


class ImagePreparation:
    """Resizes an image and scales its pixels, as a configuration of transformers says.

    Args:
        config: The values of a preprocessor_config.json: size, image_mean, image_std.
        size: The height and width in pixels.
    """

    size: tuple[int, int]

    def __init__(self, config: dict[str, Any], size: tuple[int, int]) -> None:
        self._config, self.size = config, size
        self._mean = torch.tensor(config.get("image_mean") or _HALF)
        self._std = torch.tensor(config.get("image_std") or _HALF)

    def __call__(self, image: Any) -> Tensor:
        """Return the pixels, channels first."""
        height, width = self.size
        resized = image.convert("RGB").resize((width, height), self._config.get("resample", 2))
        pixels = torch.from_numpy(np.array(resized)).float() / 255
        return ((pixels - self._mean) / self._std).permute(2, 0, 1).contiguous()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the configuration that transformers reads."""
        height, width = self.size
        values: dict[str, Any] = {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "resample": 2,
            **self._config,
            "size": {"height": height, "width": width},
            "image_mean": [round(value, 6) for value in self._mean.tolist()],
            "image_std": [round(value, 6) for value in self._std.tolist()],
        }
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, _FILE).write_text(json.dumps(values, indent=2))


class _Images(Dataset[Any]):
    """Images that are read when they are asked for."""

    def __init__(
        self, table: Table, column: str, numbers: Sequence[int], prepare: ImagePreparation, named: bool
    ) -> None:
        self._table, self._images, self._numbers = table, table.columns[column], numbers
        self._prepare, self._named = prepare, named

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Any:
        pixels, number = self._prepare(_opened(self._table, self._images[index], index)), self._numbers[index]
        return {"pixel_values": pixels, "labels": number} if self._named else (pixels, number)


def image_classification(arguments: TrainArguments, data: Table, evaluation: Table | None) -> PreparedTask:
    """Prepare the classification of images."""
    assert arguments.model is not None
    if task_models.is_table_network(arguments.model):
        raise ConfigurationError(
            f"--task {arguments.task} does not fit --model {arguments.model}, which takes numbers."
        )
    is_factory = task_models.is_factory(arguments.model)
    config = None if is_factory else task_models.read_config(arguments)
    column = data.find("image", "image_column", arguments.image_column)
    label = data.find("label", "label_column", arguments.label_column)
    known: dict[int, str] = getattr(config, "id2label", None) or {}
    classes = Classes(labels_in(data, label), [known[number] for number in sorted(known)])
    check_several(classes, data, label)
    prepare = ImagePreparation(_saved_config(arguments), _size(arguments, config))

    def images(table: Table | None) -> Any:
        if table is None:
            return None
        table.values(column, object, "an image", "image_column")
        numbers = [classes.number(value, table, row) for row, value in enumerate(labels_in(table, label))]
        _opened(table, table.columns[column][0], 0)  # a column without images is an error now
        return _Images(table, column, numbers, prepare, named=not is_factory)

    offered = {"num_labels": len(classes), "num_classes": len(classes), "image_size": prepare.size[0]}
    kind = task_models.TASK_CLASSES["image-classification"]
    return PreparedTask(
        train=images(data),
        evaluation=images(evaluation),
        model=task_models.from_factory(arguments, offered)
        if is_factory
        else task_models.from_transformers(arguments, kind, config, classes.config()),
        processor=prepare,
        loss_fn=cross_entropy if is_factory else None,
        metrics=["accuracy", "f1_macro"],
        columns=f"images from {column!r}, labels from {label!r} ({classes})",
        facts={"classes": classes.names, "image_column": column, "label_column": label},
    )


def _opened(table: Table, image: Any, row: int) -> Any:
    """Return an image from its file or its bytes; of a dataset of Hugging Face it is one already."""
    library: Any = require("PIL.Image", "images", "pillow")
    if hasattr(image, "convert"):
        return image
    path = Path(table.folder, image) if isinstance(image, str) else None
    try:
        if path is None:
            raise TypeError(f"it is a {type(image).__name__}")
        with library.open(path) as file:
            return file.convert("RGB")
    except (OSError, TypeError) as error:
        raise ConfigurationError(
            f"{table.where(row)}: the image {str(path or image)!r} cannot be read: {error}. Correct it, or name "
            "another column with --image_column."
        ) from error


def _saved_config(arguments: TrainArguments) -> dict[str, Any]:
    file = Path(str(arguments.model), _FILE)
    if file.is_file():
        return json.loads(file.read_text())
    if task_models.is_factory(str(arguments.model)) or arguments.from_config or Path(str(arguments.model)).is_dir():
        return {}
    transformers: Any = require("transformers.utils", "transformers")
    found = transformers.cached_file(arguments.model, _FILE, _raise_exceptions_for_missing_entries=False)
    return json.loads(Path(found).read_text()) if found else {}


def _size(arguments: TrainArguments, config: Any) -> tuple[int, int]:
    saved = _saved_config(arguments).get("size", {}) if arguments.image_size is None else {}
    size = saved if isinstance(saved, int) else saved.get("height") or saved.get("shortest_edge")
    size = arguments.image_size or size or getattr(config, "image_size", None) or _SIZE
    height, width = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
    return height, width
