"""Converting checkpoints of other libraries: weights, optimizer, schedule, position in the data and generators."""

import shutil
from collections.abc import Collection
from pathlib import Path

from trainer_lib.checkpointing.format.layout import state_folder
from trainer_lib.checkpointing.format.state_parts import StateOptions, model_files, state_files
from trainer_lib.checkpointing.save.writer import CheckpointWriter
from trainer_lib.checkpointing.third_party.imported_state import imported_manifest, imported_states, name_left_out
from trainer_lib.checkpointing.third_party.third_party import ThirdPartyCheckpoint, check_weights, read_third_party
from trainer_lib.foundation.errors import ConfigurationError, UnwritableError
from trainer_lib.process_group import LoneProcess
from trainer_lib.tensor_files.file_contents import Content

# Files beside the weights that `from_pretrained` reads: configurations and vocabularies.
_BESIDE = (".json", ".txt", ".model", ".jinja")
_NOT_BESIDE = ("trainer_state.json", ".index.json")


def convert(
    source: Path,
    target: str | Path,
    epochs: float | None = None,
    without: Collection[str] = (),
    max_shard_size: int | str = "10GB",
) -> ThirdPartyCheckpoint:
    """Convert a checkpoint of Hugging Face's Trainer or of Accelerate, and return what was read.

    Args:
        source: The folder of the checkpoint, which is not changed.
        target: The folder to create; it must not exist.
        epochs: The passes over the data that were made, such as 1.4, if the checkpoint does not record them.
        without: What to leave out: "optimizer", "scheduler", "scaler", "random_states".
        max_shard_size: The size of one file of weights.

    Raises:
        CheckpointError: If there is no checkpoint, it is damaged, or its pickles hold more than tensors and plain
            values.
        UnsupportedError: If it was saved in shards.
    """
    folder = state_folder(target)
    if not isinstance(folder, Path):
        raise ConfigurationError(f"{folder} is a URL. Convert to a folder on this machine, and copy that to the URL.")
    if folder.exists():
        raise ConfigurationError(f"{folder} exists already. Give a folder that does not exist.")
    checkpoint = read_third_party(source, without)
    check_weights(checkpoint, source)
    if epochs is not None:
        checkpoint.epochs = epochs
    name_left_out(checkpoint)
    files: dict[str, Content] = {}
    options = StateOptions(max_shard_size=max_shard_size)
    for index, state in enumerate(checkpoint.weights):
        files |= model_files(index, state, options)
    for name, state in imported_states(checkpoint).items():
        files |= state_files(name, state, options)
    with CheckpointWriter(folder, LoneProcess()) as saving:
        saving.write(files)
        copy_beside(source, saving.folder, files)
        saving.commit(imported_manifest(checkpoint))
    return checkpoint


def copy_beside(source: Path, folder: Path, files: Collection[str]) -> None:
    """Copy the configurations and vocabularies beside the weights, unless they are among `files`."""
    for path in sorted(source.iterdir()):
        is_wanted = path.suffix in _BESIDE and not path.name.endswith(_NOT_BESIDE) and path.name not in files
        if is_wanted and path.is_file() and not path.is_symlink():
            try:
                shutil.copyfile(path, folder / path.name)
            except OSError as error:
                raise UnwritableError(f"{folder / path.name} could not be written: {error.strerror}.") from error
