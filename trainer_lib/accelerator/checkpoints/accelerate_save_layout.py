"""The layout of Accelerate's `save_state`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer_lib.accelerator.checkpoints.checkpoints import Checkpoints
from trainer_lib.accelerator.engine import Engine
from trainer_lib.checkpointing.format.layout import OPTIMIZER_NAME
from trainer_lib.checkpointing.format.manifest import Manifest
from trainer_lib.checkpointing.format.state_parts import Part, StateOptions
from trainer_lib.checkpointing.third_party.accelerate_layout import (
    NOT_SAVED,
    AccelerateLayout,
    fsdp_folder,
)
from trainer_lib.checkpointing.third_party.torch_shards import write_shards
from trainer_lib.logging import get_logger
from trainer_lib.tensor_files.file_contents import Content
from trainer_lib.tensor_files.weight_names import SAFE_MODEL_NAME

_logger = get_logger(__name__)


class AccelerateSaveLayout:
    """Writes the files that Accelerate reads.

    Args:
        engine: What is saved.
        options: The options of the save.
    """

    def __init__(self, engine: Engine, options: StateOptions) -> None:
        self._engine = engine
        self._in_shards = engine.strategy.writes_shards
        self._layout = AccelerateLayout(
            whole_of_fsdp=engine.strategy.gathers_to_rank_zero,
            safe=options.safe_serialization,
            allow_pickle=options.allow_pickle,
            step=engine.window.backwards,
        )

    def files(self, part: Part, state: Any, options: StateOptions) -> dict[str, Content]:
        """Return the files of a part; shards are written by `write_shards`."""
        del options
        if not part.writes or (self._in_shards and part.kind in (SAFE_MODEL_NAME, OPTIMIZER_NAME)):
            return {}
        return self._layout.files(
            part.kind, part.index, state, self._engine.rank, self._engine.state.local_process_index
        )

    def write_shards(self, folder: Path, states: Sequence[tuple[Part, Any]]) -> None:
        """Write the shards of models and optimizers."""
        for part, state in states if self._in_shards else ():
            if part.kind in (SAFE_MODEL_NAME, OPTIMIZER_NAME):
                name, key = fsdp_folder(part.kind, part.index)
                write_shards(folder / name, {key: state})

    def manifest(
        self, checkpoints: Checkpoints, parts: list[Part], is_automatic: bool, world_size: int
    ) -> Manifest | None:
        """Log what is not saved."""
        del checkpoints, is_automatic, world_size
        kinds = {part.kind for part in parts}
        written = ", ".join(part.name for part in parts if part.kind not in NOT_SAVED)
        left_out = "; ".join(f"{kind} ({reason})" for kind, reason in NOT_SAVED.items() if kind in kinds)
        _logger.warning_once("Saved for Accelerate: %s. Not saved: %s.", written, left_out)
