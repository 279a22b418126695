"""This file is the state folders of a project under automatic naming: which there are, and which are to go."""

from pathlib import Path

from trainer_lib.checkpointing.layout import (
    automatic_name,
    automatic_number,
    committed,
    deleted_beside,
    replaced_beside,
)
from trainer_lib.checkpointing.writer import remove


def automatic_states(folder: Path) -> dict[int, Path]:
    """Return the states that were written to the end, by number, the oldest first."""
    if not folder.is_dir():
        return {}
    numbers = {automatic_number(path.name) for path in folder.iterdir()} - {None}
    states = {number: folder / automatic_name(number) for number in sorted(n for n in numbers if n is not None)}
    return {number: path for number, path in states.items() if committed(path) is not None}


def delete_oldest(folder: Path, keep: int) -> None:
    """Delete all but the `keep` newest states, by number."""
    for path in list(automatic_states(folder).values())[:-keep]:
        delete_state(path)


def delete_state(path: Path) -> None:
    """Delete a state, where it is there, and what a deletion of it that was cut short left."""
    for state in (path, replaced_beside(path)):
        remove(deleted_beside(path))
        if state.is_dir():
            # First out of the way, so that a half-deleted state is never taken for a whole one.
            state.rename(deleted_beside(path))
            remove(deleted_beside(path))


def delete_debris(folder: Path) -> None:
    """Delete what saves and deletions that were cut short left in a folder."""
    for path in folder.iterdir():
        name, _, ending = path.name.rpartition(".")
        if ending in ("partial", "deleted") and automatic_number(name) is not None:
            remove(path)
