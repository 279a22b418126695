"""Converting a checkpoint of this library into one of Accelerate or of Hugging Face's Trainer."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer_lib.checkpointing.format.layout import (
    CUSTOM_STATE_NAME,
    MANIFEST_NAME,
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    numbered,
    state_folder,
)
from trainer_lib.checkpointing.format.manifest import Manifest
from trainer_lib.checkpointing.format.state_parts import StateOptions, read_model, read_state
from trainer_lib.checkpointing.load.find import verify_state
from trainer_lib.checkpointing.save.writer import CheckpointWriter
from trainer_lib.checkpointing.third_party import accelerate_layout, transformers_layout
from trainer_lib.checkpointing.third_party.accelerate_layout import AccelerateLayout, fsdp_folder
from trainer_lib.checkpointing.third_party.conversion import copy_beside
from trainer_lib.checkpointing.third_party.torch_shards import write_shards
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError, unknown
from trainer_lib.process_group import LoneProcess
from trainer_lib.tensor_files.file_contents import Content
from trainer_lib.tensor_files.rank_shards import SHARDS_ENDING
from trainer_lib.tensor_files.weight_names import SAFE_MODEL_NAME

# The JSON files of a Trainer's checkpoint that only this library reads.
_OWN = re.compile(
    r"(optimizer|scheduler|sampler|scaler|custom_checkpoint|random_states|engine|run_identity|training_arguments)\b.*|"
    r"(model|optimizer|scheduler|sampler|custom_checkpoint|random_states)(_\d+)?\..*"
)

LAYOUTS = ("accelerate", "transformers")


@dataclass
class Export:
    """What was converted.

    Attributes:
        step: The optimizer steps of the checkpoint.
        written: The names of the files and folders.
        left_out: What has no counterpart there, with the reason.
    """

    step: int
    written: list[str] = field(default_factory=list[str])
    left_out: dict[str, str] = field(default_factory=dict[str, str])


def export(
    source: Path, target: str | Path, layout: str, overwrite: bool = False, allow_pickle: bool = False
) -> Export:
    """Convert a checkpoint of this library for another one, and return what was written.

    Args:
        source: The folder of the checkpoint, which is not changed.
        target: The folder to create.
        layout: The library to write for: "accelerate" or "transformers".
        overwrite: Whether to replace an existing folder, once the new one is complete.
        allow_pickle: Whether to read what the checkpoint holds as pickles.

    Raises:
        CheckpointError: If there is no checkpoint, or it is unfinished or damaged.
        ConfigurationError: If there is no such layout, or the target exists.
        UnsupportedError: If the other library has no place for what the checkpoint holds.
    """
    if layout not in LAYOUTS:
        raise ConfigurationError(unknown("layout", layout, LAYOUTS))
    folder = state_folder(target)
    if not isinstance(folder, Path):
        raise ConfigurationError(f"{folder} is a URL. Convert to a folder on this machine, and copy that to the URL.")
    if folder.exists() and not overwrite:
        raise ConfigurationError(f"{folder} exists already. Give --overwrite to replace it, or another folder.")
    manifest = verify_state(source)
    saved = _Saved(source, manifest, StateOptions(allow_pickle=allow_pickle, safe_serialization=not allow_pickle))
    result = Export(manifest.step)
    write = _for_accelerate if layout == "accelerate" else _for_transformers
    with CheckpointWriter(folder, LoneProcess(), keeps_added_files=False) as saving:
        files = write(saved, saving.folder, result)
        saving.write(files)
        if layout == "transformers":
            copy_beside(source, saving.folder, {*files, *filter(_OWN.fullmatch, manifest.files), MANIFEST_NAME})
        result.written = sorted(path.name for path in saving.folder.iterdir())
        saving.commit(None)
    return result


class _Saved:
    """The states in a checkpoint of this library, by the kinds of parts.

    Args:
        folder: The folder of the checkpoint.
        manifest: Its manifest.
        options: How it is read.
    """

    def __init__(self, folder: Path, manifest: Manifest, options: StateOptions) -> None:
        self.folder, self.manifest, self.options = folder, manifest, options
        self.custom = [self._read(f"{CUSTOM_STATE_NAME}_{index}") for index in range(self.count(CUSTOM_STATE_NAME))]
        states = enumerate(self.custom)
        # A Trainer's checkpoint has the counts of its run as one of the registered objects.
        self.run_index = next(
            (index for index, state in states if manifest.run_id is not None and "run" in state), None
        )

    def count(self, kind: str) -> int:
        """Return the number of parts of a kind."""
        return sum(numbered(kind, index) in self.manifest.parts for index in range(len(self.manifest.parts)))

    def states(self, kind: str) -> list[Any]:
        """Return the states of a kind, in their order."""
        read = self._model if kind == SAFE_MODEL_NAME else lambda index: self._read(numbered(kind, index))
        return [read(index) for index in range(self.count(kind))]

    def generators(self) -> list[Any]:
        """Return the generators of each rank."""
        has_any = RNG_STATE_NAME in self.manifest.parts
        return [self._read(f"{RNG_STATE_NAME}_{rank}") for rank in range(self.manifest.world_size if has_any else 0)]

    def is_sharded(self) -> bool:
        """Whether a sharded model wrote its shards."""
        return (self.folder / f"{SAFE_MODEL_NAME}{SHARDS_ENDING}").is_dir()

    def missing(self, reasons: Mapping[str, str]) -> dict[str, str]:
        """Return the reasons of the parts that the checkpoint has and the other library does not."""
        return {kind: reason for kind, reason in reasons.items() if kind in self.manifest.parts or "." in kind}

    def _model(self, index: int) -> dict[str, Any]:
        return read_model(self.folder, index, self.options)

    def _read(self, name: str) -> Any:
        return read_state(self.folder, name, self.options)


def _for_accelerate(saved: _Saved, folder: Path, result: Export) -> dict[str, Content]:
    manifest = saved.manifest
    layout = AccelerateLayout(allow_pickle=saved.options.allow_pickle, step=manifest.backwards)
    files: dict[str, Content] = {}
    for kind in (SAFE_MODEL_NAME, OPTIMIZER_NAME, SCHEDULER_NAME, SCALER_NAME):
        for index, state in enumerate(saved.states(kind)):
            if saved.is_sharded() and kind in (SAFE_MODEL_NAME, OPTIMIZER_NAME):
                name, key = fsdp_folder(kind, index)
                write_shards(folder / name, {key: state}, alone=True)
            if kind != OPTIMIZER_NAME or not saved.is_sharded():
                files |= layout.files(kind, index, state)  # of a sharded model, its whole weights too
    custom = [state for index, state in enumerate(saved.custom) if index != saved.run_index]
    for index, state in enumerate(custom):
        files |= layout.files(CUSTOM_STATE_NAME, index, state)
    for rank, state in enumerate(saved.generators()):
        files |= layout.files(RNG_STATE_NAME, 0, state, rank, rank)
    result.left_out = saved.missing(accelerate_layout.NOT_SAVED)
    if saved.run_index is not None:
        result.left_out["the run"] = "Accelerate has no counts, history and callbacks of a Trainer's run"
    if manifest.world_size > 1 and saved.count(SCHEDULER_NAME):
        result.left_out["the unit of schedules"] = (
            f"Accelerate steps a schedule {manifest.world_size} times per update, unless it is prepared in an "
            "Accelerator(step_scheduler_with_optimizer=False) and stepped once"
        )
    return files


def _for_transformers(saved: _Saved, folder: Path, result: Export) -> dict[str, Content]:
    del folder
    if saved.run_index is None:
        raise UnsupportedError(
            f"{saved.folder} was saved by a loop of yours, without the counts of a run that transformers' Trainer "
            "needs. Convert with --to accelerate."
        )
    for kind in (SAFE_MODEL_NAME, OPTIMIZER_NAME, SCHEDULER_NAME):
        if saved.count(kind) != 1:
            raise UnsupportedError(
                f"{saved.folder} has {saved.count(kind)} parts of the kind {kind}, and transformers' Trainer has one. "
                "Convert with --to accelerate."
            )
    state, manifest = saved.custom[saved.run_index], saved.manifest
    files = transformers_layout.transformers_files(
        saved.states(SAFE_MODEL_NAME)[0],
        saved.states(OPTIMIZER_NAME)[0],
        saved.states(SCHEDULER_NAME)[0],
        next(iter(saved.states(SCALER_NAME)), None),
        saved.generators(),
        state["run"],
        manifest.arguments or {},
    )
    result.left_out = saved.missing(transformers_layout.NOT_SAVED)
    _name_callbacks(result, state["callbacks"])
    others = [f"{CUSTOM_STATE_NAME}_{index}" for index in range(len(saved.custom)) if index != saved.run_index]
    if others:
        result.left_out[", ".join(others)] = "transformers' Trainer has no registered objects"
    kinds = {SCHEDULER_NAME: "LambdaLR", OPTIMIZER_NAME: "AdamW"}
    for name, usual in kinds.items():
        if manifest.kinds.get(name, usual) != usual:
            result.left_out[f"the class of the {name}"] = (
                f"it is {manifest.kinds[name]}: give the same to transformers.Trainer (optim, lr_scheduler_type or "
                "optimizers)"
            )
    return files


def _name_callbacks(result: Export, callbacks: Mapping[str, Any]) -> None:
    names = [name for name, state in callbacks.items() if state]
    if names:
        result.left_out["the states of callbacks"] = (
            f"transformers has other callbacks than {', '.join(names)} (such as averaged weights)"
        )
