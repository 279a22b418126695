"""The weights in the files of a checkpoint: their shapes at once, their values when they are asked for."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer_lib.modules.quantized_layers import is_quantized, weight_of
from trainer_lib.modules.weights.names import names_in_model
from trainer_lib.tensor_files.load_tensors import load_tensor, load_tensors
from trainer_lib.tensor_files.map_tensor import map_or_read_all
from trainer_lib.tensor_files.safetensors import locate_tensors
from trainer_lib.tensor_files.weights_index import files_of_weights, load_state_dict, read_file_shapes


class WeightFiles:
    """The weights in a file, in the files of an index, or in a folder that has either.

    Their names are those of the model, without what DDP's or torch.compile's wrapper added when they were saved.

    Args:
        checkpoint: The local path.
        known: The names of the model's tensors.

    Raises:
        CheckpointError: If there are no weights, or a file is missing or cut.
    """

    def __init__(self, checkpoint: Path, known: Collection[str] = ()) -> None:
        self.paths: list[Path] = files_of_weights(checkpoint)
        self._locations = {path: locate_tensors(path) for path in self.paths if path.suffix == ".safetensors"}
        in_files = {path: self._read_shapes(path) for path in self.paths}
        names = names_in_model([name for shapes in in_files.values() for name in shapes], known)
        self._of_path = {
            path: {names[name]: kind for name, kind in shapes.items()} for path, shapes in in_files.items()
        }
        self._name_in_file = {name: in_file for in_file, name in names.items()}
        self.path_of: dict[str, Path] = {name: path for path, shapes in self._of_path.items() for name in shapes}

    @cached_property
    def kinds(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """The dtype and the shape of each weight."""
        return {name: kind for shapes in self._of_path.values() for name, kind in shapes.items()}

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """The shape of each weight."""
        return {name: shape for name, (_, shape) in self.kinds.items()}

    def by_file(self) -> Iterator[tuple[Path, list[str]]]:
        """Yield each file with the names of its weights."""
        for path, shapes in self._of_path.items():
            yield path, list(shapes)

    def read(self, path: Path, names: Iterable[str]) -> dict[str, Tensor]:
        """Return weights of one file, in new memory; all of a file are read in parallel."""
        wanted = list(names)
        if path.suffix != ".safetensors":
            values = load_state_dict(path) if wanted else {}
        elif len(wanted) == len(self._of_path[path]):
            values = load_tensors(path)
        else:
            return {name: load_tensor(path, self.name_in_file(name)) for name in wanted}
        return {name: values[self.name_in_file(name)] for name in wanted}

    def map(self, path: Path, names: Iterable[str]) -> dict[str, Tensor]:
        """Return weights of one file that are read when they are used, as far as its format allows it."""
        if path not in self._locations:
            return self.read(path, names)
        return map_or_read_all(path, {name: self._locations[path][self.name_in_file(name)] for name in names})

    def name_in_file(self, name: str) -> str:
        """Return the name that a weight has in its file."""
        return self._name_in_file[name]

    def _read_shapes(self, path: Path) -> dict[str, tuple[torch.dtype, torch.Size]]:
        if path not in self._locations:
            return read_file_shapes(path)
        return {name: (location.dtype, location.shape) for name, location in self._locations[path].items()}

    def statistics(self, name: str) -> dict[str, Tensor]:
        """Return the statistics of a quantized weight, which may be in another file; none of a whole one."""
        names = self._statistics.get(name, [])
        return {other: self.read(self.path_of[other], [other])[other] for other in names}

    def shapes_for(self, state: Mapping[str, Any]) -> dict[str, torch.Size]:
        """Return the shapes of the weights as a state dict has them: quantized ones are packed in files."""
        return {
            name: state[name].shape if name in state and self._is_packed(name, state[name]) else shape
            for name, shape in self.shapes.items()
            if name in state or not self.is_statistics(name)
        }

    def _is_packed(self, name: str, current: Any) -> bool:
        # The options of a quantized weight are a text, which differs in length.
        return self.is_statistics(name) or (is_quantized(current) and self.has_statistics(name))

    def has_statistics(self, name: str) -> bool:
        """Whether a weight is quantized."""
        return name in self._statistics

    def is_statistics(self, name: str) -> bool:
        """Whether a name is that of statistics of a quantized weight."""
        return name in self._all_statistics

    @cached_property
    def _statistics(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in self.kinds:
            weight = weight_of(name)
            # A quantized weight lies in a file as whole numbers.
            if weight in self.kinds and self.kinds[weight][0] in (torch.int8, torch.uint8):
                found.setdefault(weight, []).append(name)
        return found

    @cached_property
    def _all_statistics(self) -> set[str]:
        return {name for names in self._statistics.values() for name in names}
