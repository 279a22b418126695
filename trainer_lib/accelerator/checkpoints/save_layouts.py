"""The layouts in which `save_state` writes: that of this library, and that of Accelerate."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trainer_lib.accelerator.checkpoints.checkpoint_facts import make_manifest
from trainer_lib.accelerator.checkpoints.checkpoints import Checkpoints
from trainer_lib.checkpointing.format.manifest import Manifest
from trainer_lib.checkpointing.format.state_parts import Part, StateOptions
from trainer_lib.filesystem.remote_paths import AnyPath, is_url
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError, unknown
from trainer_lib.logging import get_logger
from trainer_lib.tensor_files.file_contents import Content

_logger = get_logger(__name__)

OWN, OF_ACCELERATE = "trainer_lib", "accelerate"


class SaveLayout(Protocol):
    """How the parts of a checkpoint are written."""

    def files(self, part: Part, state: Any, options: StateOptions) -> dict[str, Content]:
        """Return the files that this rank writes for a part."""
        ...

    def write_shards(self, folder: Path, states: Sequence[tuple[Part, Any]]) -> None:
        """Write what all ranks write together; all of them call it."""
        ...

    def manifest(
        self, checkpoints: Checkpoints, parts: list[Part], is_automatic: bool, world_size: int
    ) -> Manifest | None:
        """Return the manifest of the checkpoint; `None` if the layout has none."""
        ...


class OwnLayout:
    """The layout of this library."""

    def files(self, part: Part, state: Any, options: StateOptions) -> dict[str, Content]:
        """Return the files of a part."""
        return part.files(state, options)

    def write_shards(self, folder: Path, states: Sequence[tuple[Part, Any]]) -> None:
        """Do nothing: each rank's shards are a file of its own."""

    def manifest(
        self, checkpoints: Checkpoints, parts: list[Part], is_automatic: bool, world_size: int
    ) -> Manifest | None:
        """Return the manifest."""
        return make_manifest(checkpoints, parts, is_automatic, world_size)


def layout_of(
    name: str,
    checkpoints: Checkpoints,
    target: AnyPath,
    options: StateOptions,
    background: bool,
    limits: Mapping[str, Any],
) -> SaveLayout:
    """Return the layout of a name.

    Args:
        name: "trainer_lib" or "accelerate".
        checkpoints: The checkpoints that the new one joins.
        target: The folder to write.
        options: The options of the save.
        background: Whether a thread writes.
        limits: The options that bound the size of files.

    Raises:
        ConfigurationError: If there is no such layout.
        UnsupportedError: If it cannot be written with these options.
    """
    if name not in (OWN, OF_ACCELERATE):
        raise ConfigurationError(unknown("layout of save_state", name, (OWN, OF_ACCELERATE)))
    if name == OWN:
        return OwnLayout()
    engine = checkpoints.engine
    is_sharded = engine.strategy.gathers_to_rank_zero
    for condition, problem in (
        (background, "background=True: a thread cannot write pickles of what training changes. Leave it out"),
        (bool(limits), "max_shard_size: Accelerate reads each model from one file. Leave it out"),
        (is_url(target), f"{target}: only a disk is written in one step. Give a folder, and copy that to the URL"),
        (
            is_sharded and len(engine.prepared.models) > 1,
            f"{len(engine.prepared.models)} sharded models: Accelerate's FSDP2 has one. Save each with save_model",
        ),
    ):
        if condition:
            raise UnsupportedError(f'layout="{OF_ACCELERATE}" does not work with {problem}.')
    from trainer_lib.accelerator.checkpoints.accelerate_save_layout import AccelerateSaveLayout

    return AccelerateSaveLayout(engine, options)
