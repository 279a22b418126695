"""This file is the state folders of a project under automatic naming: which there are, and which are to go."""

from trainer_lib.checkpointing.format.layout import automatic_name, automatic_number, committed, replaced_beside
from trainer_lib.checkpointing.storage.storage import storage_of
from trainer_lib.filesystem.remote_paths import AnyPath


def automatic_states(folder: AnyPath) -> dict[int, AnyPath]:
    """Return the states that were written to the end, by number, the oldest first."""
    numbers = {automatic_number(path.name) for path in storage_of(folder).states()} - {None}
    states = {number: folder / automatic_name(number) for number in sorted(n for n in numbers if n is not None)}
    return {number: path for number, path in states.items() if committed(path) is not None}


def delete_oldest(folder: AnyPath, keep: int) -> None:
    """Delete all but the `keep` newest states, by number."""
    for path in list(automatic_states(folder).values())[:-keep]:
        delete_state(path)


def delete_state(path: AnyPath) -> None:
    """Delete a state, where it is there, and what a deletion of it that was cut short left."""
    for state in (path, replaced_beside(path)):
        storage_of(state).delete()


def delete_debris(folder: AnyPath) -> None:
    """Delete what saves and deletions that were cut short left in a folder."""
    storage_of(folder).delete_debris()
