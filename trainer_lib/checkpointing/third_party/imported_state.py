"""A checkpoint of another library as the states of this library's parts."""

import math
from pathlib import Path
from typing import Any

from trainer_lib.checkpointing.format.layout import (
    CUSTOM_STATE_NAME,
    ENGINE_NAME,
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAMPLER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    numbered,
)
from trainer_lib.checkpointing.format.manifest import Manifest
from trainer_lib.checkpointing.format.state_parts import Part, StateOptions
from trainer_lib.checkpointing.third_party.third_party import TRAINER, ThirdPartyCheckpoint, read_third_party
from trainer_lib.tensor_files.weight_names import SAFE_MODEL_NAME


class ImportedState:
    """A checkpoint of another library, in memory, for `load_state`.

    Args:
        folder: Its folder.
        with_run: Whether the counts of a Trainer's run are loaded too.

    Attributes:
        manifest: The manifest that a checkpoint of this library with this contents has.
    """

    def __init__(self, folder: Path, with_run: bool) -> None:
        self.folder = folder
        checkpoint = read_third_party(folder)
        name_left_out(checkpoint)
        self._weights, self._states = checkpoint.weights, imported_states(checkpoint, with_run)
        self.manifest: Manifest = imported_manifest(checkpoint, with_run)

    def read(self, part: Part, options: StateOptions) -> Any:
        """Return the state of a part."""
        del options  # all is read already, and no pickle that needs to be allowed
        if not part.reads:
            return {}
        return self._weights[part.index] if part.kind == SAFE_MODEL_NAME else self._states[part.stem]

    def release(self) -> None:
        """Do nothing: the files are the other library's."""


def name_left_out(checkpoint: ThirdPartyCheckpoint) -> None:
    """Note the parts that a checkpoint of that library does not have."""
    checkpoint.left_out[ENGINE_NAME] = "gradients of an unfinished accumulation window are not saved there"
    if not _positions(checkpoint):
        checkpoint.left_out[SAMPLER_NAME] = (
            "the position in the data is not recorded: skip batches yourself (skip_first_batches), or convert with "
            "--epochs"
        )


def imported_states(checkpoint: ThirdPartyCheckpoint, with_run: bool = True) -> dict[str, Any]:
    """Return the states of all parts but the models, by the stems of their files' names.

    Args:
        checkpoint: The checkpoint.
        with_run: Whether the counts of a Trainer's run are a part, as a registered object.
    """
    order = {"in_order_of": checkpoint.library}
    states: dict[str, Any] = {
        **{numbered(OPTIMIZER_NAME, index): {**state, **order} for index, state in enumerate(checkpoint.optimizers)},
        **{numbered(SCHEDULER_NAME, index): state for index, state in enumerate(checkpoint.schedulers)},
        **{f"{CUSTOM_STATE_NAME}_{index}": state for index, state in enumerate(checkpoint.custom)},
        **{f"{RNG_STATE_NAME}_{rank}": state for rank, state in enumerate(checkpoint.generators)},
    }
    if checkpoint.scaler:
        states[SCALER_NAME] = checkpoint.scaler
    for index, position in _positions(checkpoint).items():
        name = numbered(SAMPLER_NAME, index)
        states |= {f"{name}.process_{rank}": position for rank in range(checkpoint.world_size)}
    if _has_run(checkpoint, with_run):
        states[f"{CUSTOM_STATE_NAME}_0"] = {"run": _run(checkpoint), "callbacks": {}, "averages": {}}
    return states


def imported_manifest(checkpoint: ThirdPartyCheckpoint, with_run: bool = True) -> Manifest:
    """Return the manifest of the checkpoint, which names what was left out."""
    counts = {
        OPTIMIZER_NAME: len(checkpoint.optimizers),
        SCHEDULER_NAME: len(checkpoint.schedulers),
        SAFE_MODEL_NAME: len(checkpoint.weights),
        SCALER_NAME: int(bool(checkpoint.scaler)),
    }
    parts = [numbered(kind, index) for kind, count in counts.items() for index in range(count)]
    parts += [numbered(SAMPLER_NAME, index) for index in _positions(checkpoint)]
    # The first registered object has the number 0 in its file's name, but none in the part's name.
    custom = len(checkpoint.custom) + _has_run(checkpoint, with_run)
    parts += [numbered(CUSTOM_STATE_NAME, index) for index in range(custom)]
    parts += [RNG_STATE_NAME] * bool(checkpoint.generators)
    return Manifest(
        world_size=checkpoint.world_size,
        step=checkpoint.step,
        backwards=checkpoint.step,
        epoch=checkpoint.epochs,
        parts=parts,
        reasons=["imported"],
        origin={"library": checkpoint.library, "left_out": dict(checkpoint.left_out)},
    )


def _positions(checkpoint: ThirdPartyCheckpoint) -> dict[int, dict[str, Any]]:
    """Return the known positions of loaders, by their index."""
    positions: dict[int, dict[str, Any]] = {
        index: {"epoch": 0, "part_of_pass": 0.0, "batches": batches}
        for index, batches in enumerate(checkpoint.loaders)
        if batches is not None
    }
    if checkpoint.epochs is not None:
        epoch = _full_epochs(checkpoint.epochs)
        positions[0] = {"epoch": epoch, "part_of_pass": checkpoint.epochs - epoch, "batches": None}
    return positions


def _has_run(checkpoint: ThirdPartyCheckpoint, with_run: bool) -> bool:
    return with_run and checkpoint.library == TRAINER


def _run(checkpoint: ThirdPartyCheckpoint) -> dict[str, Any]:
    """Return the counts of the run as a Trainer saves them, without samples, which the checkpoint does not record."""
    epochs = checkpoint.epochs or 0.0
    steps_per_epoch = round(checkpoint.step / epochs) if epochs else None
    in_epoch = 0 if steps_per_epoch is None else checkpoint.step - _full_epochs(epochs) * steps_per_epoch
    return {
        "step": checkpoint.step,
        "epoch": _full_epochs(epochs),
        "steps_in_epoch": max(in_epoch, 0),
        "steps_per_epoch": steps_per_epoch,
        "best": None,
        "history": checkpoint.history,
        "checkpoints": [],
    }


def _full_epochs(epochs: float) -> int:
    return math.floor(epochs + 1e-6)
