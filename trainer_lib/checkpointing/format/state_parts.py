"""The parts of a checkpoint: models, optimizers, schedules, loaders and registered objects, and the files of each."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from trainer_lib.checkpointing.format.layout import numbered
from trainer_lib.checkpointing.format.state_codec import Encoded, decode, encode
from trainer_lib.foundation.byte_sizes import convert_file_size_to_int
from trainer_lib.foundation.errors import CheckpointError, OtherClassError
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.tensor_files.file_contents import Content, Json, Tensors
from trainer_lib.tensor_files.load_tensors import load_tensors
from trainer_lib.tensor_files.rank_shards import SHARDS_ENDING, read_whole
from trainer_lib.tensor_files.weight_names import SAFE_MODEL_NAME
from trainer_lib.tensor_files.weights_index import find_weights, read_weights, weight_files

# The kinds of parts whose number must be the same when a checkpoint is loaded, and their names in messages.
COUNTED = {
    "model": "models",
    "optimizer": "optimizers",
    "scheduler": "schedulers",
    "sampler": "data loaders",
    "custom_checkpoint": "registered objects",
}


class Stateful(Protocol):
    """An object with a state."""

    def state_dict(self) -> Any:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state."""
        ...


@frozen_dataclass(kw_only=True)
class StateOptions:
    """The options of `save_state` and `load_state`.

    Args:
        allow_pickle: Whether pickles may be written and read.
        safe_serialization: Whether weights are safetensors; otherwise pickles of tensors.
        max_shard_size: The size of one file of weights.
        strict: Whether the names of weights must be those of the model.
        device: The device that tensors are read to.
        load: Reads a file of tensors.
    """

    allow_pickle: bool = False
    safe_serialization: bool = True
    max_shard_size: int | str = "10GB"
    strict: bool = True
    device: str = "cpu"
    load: Callable[[Path, str], dict[str, Tensor]] = load_tensors

    def __post_init__(self) -> None:
        """Check the size now, not when a part of the checkpoint is written."""
        convert_file_size_to_int(self.max_shard_size)


@frozen_dataclass(kw_only=True)
class Part(ABC):
    """An object that a checkpoint saves and restores.

    Args:
        kind: Its kind: "model", "optimizer", "scheduler", …
        stateful: The object.
        index: Its index among the objects of its kind.
        writes: Whether this rank writes its files.
        reads: Whether this rank reads the files; otherwise it gets the values from another rank.
        class_name: Its class, if only an object of the same class can load the state.
    """

    kind: str
    stateful: Stateful
    index: int = 0
    writes: bool = True
    reads: bool = True
    class_name: str | None = None

    @property
    def name(self) -> str:
        """Its name in the manifest."""
        return numbered(self.kind, self.index)

    @property
    def stem(self) -> str:
        """The stem of its files' names."""
        return self.name

    @abstractmethod
    def files(self, state: Any, options: StateOptions) -> dict[str, Content]:
        """Return the files that this rank writes for a state."""

    @abstractmethod
    def read(self, folder: Path, options: StateOptions) -> Any:
        """Return the state that this rank loads.

        Raises:
            CheckpointError: If it cannot be read.
        """


@frozen_dataclass(kw_only=True)
class State(Part):
    """Any state, as JSON and tensors.

    Args:
        file_name: The stem of its files' names, if it is not the name of the part.
    """

    file_name: str | None = None

    @property
    def stem(self) -> str:
        """The stem of its files' names."""
        return self.file_name or self.name

    def files(self, state: Any, options: StateOptions) -> dict[str, Content]:
        """Return a JSON file, and a file of tensors if there are any."""
        return state_files(self.stem, state, options) if self.writes else {}

    def read(self, folder: Path, options: StateOptions) -> Any:
        """Read the JSON file and the tensors."""
        return read_state(folder, self.stem, options) if self.reads else {}


@frozen_dataclass(kw_only=True)
class Weights(Part):
    """A model: its tensors in Hugging Face's layout, and its extra state beside them."""

    kind: str = SAFE_MODEL_NAME

    @property
    def extra_name(self) -> str:
        """The stem of the files of extra state, which holds values that are not tensors."""
        return _extra_name(self.index)

    def files(self, state: Mapping[str, Any], options: StateOptions) -> dict[str, Content]:
        """Return the files of weights, and those of extra state if there is any."""
        return model_files(self.index, state, options) if self.writes else {}

    def read(self, folder: Path, options: StateOptions) -> dict[str, Any]:
        """Read the weights and the extra state."""
        if not self.reads:
            return {}
        return read_model(folder, self.index, options)

    def read_extra(self, folder: Path, options: StateOptions) -> dict[str, Any]:
        """Return the extra state, if any was saved."""
        return _read_extra(folder, self.index, options)


def read_model(folder: Path, index: int, options: StateOptions) -> dict[str, Any]:
    """Read the weights and the extra state of a model; shards that the ranks of a sharded model wrote are assembled."""
    shards = folder / f"{numbered(SAFE_MODEL_NAME, index)}{SHARDS_ENDING}"
    if shards.is_dir():
        return {**read_whole(shards), **_read_extra(folder, index, options)}
    weights = read_weights(_weights_file(folder, index, options), options.device, options.load)
    return {**weights, **_read_extra(folder, index, options)}


def _read_extra(folder: Path, index: int, options: StateOptions) -> dict[str, Any]:
    has_extra = (folder / f"{_extra_name(index)}.json").is_file()
    return read_state(folder, _extra_name(index), options) if has_extra else {}


def _weights_file(folder: Path, index: int, options: StateOptions) -> Path:
    safe, pickled = (find_weights(folder, index, kind) for kind in (True, False))
    if safe is not None:
        return safe
    if pickled is None:
        raise missing_weights(folder, numbered(SAFE_MODEL_NAME, index))
    if options.safe_serialization:
        raise CheckpointError(
            f"The weights in {folder} were saved with safe_serialization=False, as a pickle. Call "
            "load_state(…, safe_serialization=False) if you trust where they come from; only tensors are read."
        )
    return pickled


def model_files(index: int, state: Mapping[str, Any], options: StateOptions) -> dict[str, Content]:
    """Return the files of a model's weights, and those of its extra state if there is any."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    extra = {name: value for name, value in state.items() if name not in tensors}
    files = weight_files(tensors, options.max_shard_size, index, options.safe_serialization)
    return files | (state_files(_extra_name(index), extra, options) if extra else {})


def _extra_name(index: int) -> str:
    return f"{numbered(SAFE_MODEL_NAME, index)}.extra"


def missing_weights(folder: Path, name: str) -> CheckpointError:
    """Return the error for a model whose weights a checkpoint does not have."""
    return CheckpointError(
        f"{folder} has no weights of {name}: a save hook removed them. Register a hook with "
        "register_load_state_pre_hook that loads the model and removes it from the list."
    )


def state_files(name: str, state: Any, options: StateOptions) -> dict[str, Content]:
    """Return the files of a state."""
    encoded = encode(state, options.allow_pickle, f"the state of {name}")
    files: dict[str, Content] = {f"{name}.json": Json(encoded.tree)}
    return files | ({f"{name}.safetensors": Tensors(encoded.tensors)} if encoded.tensors else {})


def read_state(folder: Path, name: str, options: StateOptions) -> Any:
    """Read the state that `state_files` wrote.

    Raises:
        CheckpointError: If the files cannot be read.
    """
    tensors, shards = folder / f"{name}.safetensors", folder / f"{name}{SHARDS_ENDING}"
    read: dict[str, Tensor] = {}
    if tensors.is_file():
        # Not memory-mapped: a deleted file that is mapped still takes its space on the disk.
        read = options.load(tensors, options.device)
    elif shards.is_dir():
        read = read_whole(shards)
    return decode(Encoded(Json.read(folder / f"{name}.json"), read), options.allow_pickle, f"the state of {name}")


def check_counts(saved: Sequence[str], present: Sequence[str], where: str) -> None:
    """Raise unless there are as many parts of each kind now as were saved.

    Args:
        saved: The names of the parts that were saved.
        present: The names of the parts that there are now.
        where: The folder of the checkpoint.

    Raises:
        CheckpointError: With the counts that differ, and how to fix it.
    """
    saved_counts, counts = (Counter(_kind(name) for name in names) for names in (saved, present))
    for kind, plural in COUNTED.items():
        if saved_counts[kind] != counts[kind]:
            verb = "register_for_checkpointing" if kind == "custom_checkpoint" else "prepare"
            raise CheckpointError(
                f"The checkpoint {where} has {saved_counts[kind]} {plural}, and this Accelerator has {counts[kind]}. "
                f"Make and {verb} the same ones before load_state; for a model's weights alone, use "
                "load_checkpoint_in_model(model, folder)."
            )


def kinds_of(parts: Sequence[Part]) -> dict[str, str]:
    """Return the class of each part, by its name, that only an object of the same class can load."""
    return {part.name: part.class_name for part in parts if part.class_name is not None}


def check_kinds(saved: Mapping[str, str], present: Mapping[str, str], where: str) -> None:
    """Raise if the class of a part differs from the class that was saved.

    Raises:
        OtherClassError: With both classes.
    """
    for name, saved_class in saved.items():
        class_name = present.get(name, saved_class)
        if class_name != saved_class:
            raise OtherClassError(
                f"The checkpoint {where} has the state of {saved_class} as {name}, and {name} is now {class_name}, "
                f"which cannot load it. Prepare {saved_class} as before; for a model's weights alone, use "
                "load_checkpoint_in_model(model, folder).",
                name,
                saved_class,
                class_name,
            )


def _kind(name: str) -> str:
    stem, _, number = name.rpartition("_")
    return stem if number.isdigit() else name
