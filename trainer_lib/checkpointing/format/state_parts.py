"""This file is the parts of a state: all that survives a restart has a name, and a state to take and to give back."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from trainer_lib.checkpointing.format.layout import numbered
from trainer_lib.checkpointing.format.state_codec import Encoded, decode, encode
from trainer_lib.foundation.byte_sizes import convert_file_size_to_int
from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.tensor_files.file_contents import Content, Json, Tensors
from trainer_lib.tensor_files.load_tensors import load_tensors
from trainer_lib.tensor_files.model_files import find_weights, read_weights, weight_files
from trainer_lib.tensor_files.shards import SHARDS_ENDING, read_whole
from trainer_lib.tensor_files.weight_names import SAFE_MODEL_NAME

# What is called how in messages, and has to be as many when a state is loaded as when it was saved.
COUNTED = {
    "model": "models",
    "optimizer": "optimizers",
    "scheduler": "schedulers",
    "sampler": "data loaders",
    "custom_checkpoint": "registered objects",
}


class Stateful(Protocol):
    """What has a state."""

    def state_dict(self) -> Any:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take a state up."""
        ...


@dataclass(frozen=True, kw_only=True)
class StateOptions:
    """What the caller says to a save or a load.

    Args:
        allow_pickle: Pickles may be written, and read.
        safe_serialization: Weights are safetensors; else pickles of tensors.
        max_shard_size: The size of one file of weights.
        strict: The names of weights have to be those of the model.
        device: Where tensors are read to.
    """

    allow_pickle: bool = False
    safe_serialization: bool = True
    max_shard_size: int | str = "10GB"
    strict: bool = True
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Check the size now, not when a part of the state is written."""
        convert_file_size_to_int(self.max_shard_size)


@dataclass(frozen=True, kw_only=True)
class Part(ABC):
    """One of the things that survive a restart.

    Args:
        kind: What it is.
        stateful: Its state.
        index: Which of its kind.
        writes: Whether this process writes it down.
        class_name: Of what the state is, if no other class can take it up.
    """

    kind: str
    stateful: Stateful
    index: int = 0
    writes: bool = True
    class_name: str | None = None

    @property
    def name(self) -> str:
        """What its files are called by."""
        return numbered(self.kind, self.index)

    @abstractmethod
    def files(self, state: Any, options: StateOptions) -> dict[str, Content]:
        """Return what this process is to write of a state."""

    @abstractmethod
    def read(self, folder: Path, options: StateOptions) -> Any:
        """Return the state that this process is to take up.

        Raises:
            CheckpointError: If it cannot be read.
        """


@dataclass(frozen=True, kw_only=True)
class State(Part):
    """Any state, as JSON and tensors.

    Args:
        file_name: What its files are called, if not as the part.
        reads: Whether this process reads them; else another one hands it what it needs.
    """

    file_name: str | None = None
    reads: bool = True

    def files(self, state: Any, options: StateOptions) -> dict[str, Content]:
        """Return a file of JSON, and one of tensors if there are any."""
        return state_files(self.file_name or self.name, state, options) if self.writes else {}

    def read(self, folder: Path, options: StateOptions) -> Any:
        """Read both."""
        return read_state(folder, self.file_name or self.name, options) if self.reads else {}


@dataclass(frozen=True, kw_only=True)
class Weights(Part):
    """A model: its tensors in Hugging Face's layout; what else it keeps (extra state) beside them.

    Args:
        reads: Whether this process reads the files; else another one hands it what it needs.
    """

    kind: str = SAFE_MODEL_NAME
    reads: bool = True

    @property
    def extra_name(self) -> str:
        """The name of the files of what is no tensor."""
        return f"{self.name}.extra"

    def files(self, state: Mapping[str, Any], options: StateOptions) -> dict[str, Content]:
        """Return the files of weights, and of extra state if there is any."""
        if not self.writes:
            return {}
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        extra = {name: value for name, value in state.items() if name not in tensors}
        files = weight_files(tensors, options.max_shard_size, self.index, options.safe_serialization)
        return files | (state_files(self.extra_name, extra, options) if extra else {})

    def read(self, folder: Path, options: StateOptions) -> dict[str, Any]:
        """Read both."""
        if not self.reads:
            return {}
        shards = folder / f"{self.name}{SHARDS_ENDING}"
        # Shards that were written by many are read whole by who has none.
        tensors = read_whole(shards) if shards.is_dir() else read_weights(self._found(folder, options), options.device)
        return {**tensors, **self.read_extra(folder, options)}

    def read_extra(self, folder: Path, options: StateOptions) -> dict[str, Any]:
        """Return what was saved that is no tensor."""
        there = (folder / f"{self.extra_name}.json").is_file()
        return read_state(folder, self.extra_name, options) if there else {}

    def _found(self, folder: Path, options: StateOptions) -> Path:
        safe, pickled = (find_weights(folder, self.index, kind) for kind in (True, False))
        if safe is not None:
            return safe
        if pickled is None:
            raise CheckpointError(
                f"{folder} has no weights of {self.name}: a hook took them out of what was saved. Register a hook "
                "with register_load_state_pre_hook that loads the model, and takes it out of the list."
            )
        if options.safe_serialization:
            raise CheckpointError(
                f"The weights in {folder} were saved with safe_serialization=False, as a pickle. Say "
                "load_state(…, safe_serialization=False) if you trust where they come from; only tensors are read."
            )
        return pickled


def state_files(name: str, state: Any, options: StateOptions) -> dict[str, Content]:
    """Return the files of a state."""
    encoded = encode(state, options.allow_pickle, f"the state of {name}")
    files: dict[str, Content] = {f"{name}.json": Json(encoded.tree)}
    return files | ({f"{name}.safetensors": Tensors(encoded.tensors)} if encoded.tensors else {})


def read_state(folder: Path, name: str, options: StateOptions) -> Any:
    """Read a state from its files.

    Raises:
        CheckpointError: If they cannot be read.
    """
    tensors, shards = folder / f"{name}.safetensors", folder / f"{name}{SHARDS_ENDING}"
    read: dict[str, Tensor] = {}
    if tensors.is_file():
        # Not where they lie in the file: what is deleted while it is in use keeps its space on the disk taken.
        read = load_tensors(tensors, options.device)
    elif shards.is_dir():
        read = read_whole(shards)
    return decode(Encoded(Json.read(folder / f"{name}.json"), read), options.allow_pickle, f"the state of {name}")


def check_counts(saved: Sequence[str], present: Sequence[str], where: str) -> None:
    """Raise unless as many of each kind were saved as there are now.

    Args:
        saved: The names of parts that were saved.
        present: The names of parts there are.
        where: The folder.

    Raises:
        CheckpointError: With what differs, and what to do.
    """
    then, now = (Counter(_kind(name) for name in names) for names in (saved, present))
    for kind, text in COUNTED.items():
        if then[kind] != now[kind]:
            verb = "register_for_checkpointing" if kind == "custom_checkpoint" else "prepare"
            raise CheckpointError(
                f"The state in {where} has {then[kind]} {text}, and this Accelerator has {now[kind]}. Make and "
                f"{verb} the same ones before load_state; for a model's weights alone, use "
                "load_checkpoint_in_model(model, folder)."
            )


def kinds_of(parts: Sequence[Part]) -> dict[str, str]:
    """Return the classes of parts by name, where they matter."""
    return {part.name: part.class_name for part in parts if part.class_name is not None}


def check_kinds(saved: Mapping[str, str], present: Mapping[str, str], where: str) -> None:
    """Raise if what was saved is of another class than what is there now.

    Raises:
        CheckpointError: With both classes.
    """
    for name, then in saved.items():
        now = present.get(name, then)
        if now != then:
            raise CheckpointError(
                f"The state in {where} has as {name} the state of {then}, and here it is {now}, to which that means "
                f"nothing. Prepare {then} as before; for a model's weights alone, use "
                "load_checkpoint_in_model(model, folder)."
            )


def _kind(name: str) -> str:
    stem, _, number = name.rpartition("_")
    return stem if number.isdigit() else name
