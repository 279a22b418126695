"""This file is which states lie in a folder, and what can be told of them without reading their tensors."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer_lib.checkpointing.codec import Encoded, decode
from trainer_lib.checkpointing.layout import AUTOMATIC_FOLDER, CUSTOM_STATE_NAME, MANIFEST_NAME, committed, is_committed
from trainer_lib.checkpointing.manifest import Manifest
from trainer_lib.checkpointing.reader import open_state, verify_state
from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.tensor_files.contents import Json

# What a save writes, or an error has renamed; `.partial` and `.deleted` are on their way in or out.
_NAME = re.compile(r"checkpoint[-_](\d+)(\.replaced)?")
_ASIDE = re.compile(r".*\.damaged(-\d+)?")
_ON_THE_WAY = (".partial", ".deleted")


@dataclass(frozen=True, kw_only=True)
class Listed:
    """What is told of a state.

    Attributes:
        path: Its folder.
        manifest: What it says of itself; `None` if it cannot be read.
        problem: What is wrong with it, as far as names and sizes of files tell.
        is_aside: Whether it was put aside because it is damaged.
        size: The bytes of its files.
        saved: When, in seconds since 1970.
        step: The updates, or for a loop of one's own the backward passes, that were made.
        run: For a checkpoint of a Trainer the counts of its run.
        kept: Why retention would keep it, as far as that is known.
    """

    path: Path
    manifest: Manifest | None
    problem: str | None
    is_aside: bool
    size: int
    saved: float
    step: int | None
    run: dict[str, Any] = field(default_factory=dict[str, Any])
    kept: tuple[str, ...] = ()

    @property
    def status(self) -> str:
        """How it is, in a word."""
        if self.is_aside:
            return "put aside"
        return "complete" if self.problem is None else "damaged"

    @property
    def metrics(self) -> dict[str, float]:
        """The evaluation at its step, if there was one."""
        here = [one for one in self.run.get("checkpoints", []) if one["step"] == self.step]
        return here[0]["metrics"] if here else {}


def groups_of_states(folder: Path) -> list[list[Listed]]:
    """Return the states that a folder is or holds, each run's together, the oldest first.

    Args:
        folder: A state, a folder of states, a run, a project, or a folder of runs.

    Raises:
        CheckpointError: If there is none.
    """
    if is_committed(folder):
        return [[_listed(folder)]]
    places = [folder, folder / AUTOMATIC_FOLDER, *sorted(folder.glob(f"*/{AUTOMATIC_FOLDER}"))]
    groups = [states for place in places if (states := _states_in(place))]
    if not groups:
        raise CheckpointError(f"There is no state in {folder}. Give the folder of a state, of a run, or of runs.")
    return groups


def superfluous(states: Sequence[Listed], keep_last: int) -> list[Listed]:
    """Return which states of a run can go: not the newest, not the best, and not the last one that is whole.

    Args:
        states: The states of one run, the oldest first.
        keep_last: How many of the newest stay.
    """
    present = [one for one in states if not one.is_aside]
    kept, older = present[-keep_last:], present[:-keep_last]
    for one in [*reversed(kept), *reversed(older)]:
        if _is_whole(one):
            older = [other for other in older if other is not one]
            break
    return [one for one in older if "best" not in one.kept]


def _states_in(place: Path) -> list[Listed]:
    if not place.is_dir():
        return []
    found = [_listed(path) for path in sorted(_folders(place), key=_order)]
    present = [one for one in found if not one.is_aside]
    newest = next((one for one in reversed(present) if one.problem is None), None)
    best = ((newest.run if newest else {}).get("best") or {}).get("step")
    return [_with_reasons(one, one is newest, best is not None and one.step == best) for one in found]


def _folders(place: Path) -> Iterator[Path]:
    for path in place.iterdir():
        if not path.is_dir() or path.name.endswith(_ON_THE_WAY):
            continue
        if path.name.endswith(".replaced"):  # which counts where a rename was cut short
            if committed(path.with_name(path.name.removesuffix(".replaced"))) == path:
                yield path
        elif is_committed(path) or _NAME.fullmatch(path.name) or _ASIDE.fullmatch(path.name):
            yield path


def _order(path: Path) -> tuple[int, str]:
    found = _NAME.match(path.name)
    return (int(found[1]) if found else -1, path.name)


def _with_reasons(one: Listed, is_newest: bool, is_best: bool) -> Listed:
    reasons = (("newest", is_newest), ("best", is_best and not one.is_aside))
    return replace(one, kept=tuple(name for name, holds in reasons if holds))


def _listed(folder: Path) -> Listed:
    manifest, problem = None, None
    try:
        manifest = open_state(folder)
    except CheckpointError as error:
        problem = str(error)
    run = {} if manifest is None else _run_of(folder, manifest)
    files = [path for path in folder.rglob("*") if path.is_file()]
    written = folder / MANIFEST_NAME
    step = None if manifest is None else run.get("step", manifest.step)
    return Listed(
        path=folder,
        manifest=manifest,
        problem=problem,
        is_aside=_ASIDE.fullmatch(folder.name) is not None,
        size=sum(path.stat().st_size for path in files),
        saved=(written if written.is_file() else folder).stat().st_mtime,
        step=step,
        run=run,
    )


def _run_of(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Return the counts of the Trainer's run that a state is of, if it is of one."""
    for name in manifest.files:
        if name.startswith(CUSTOM_STATE_NAME) and name.endswith(".json"):
            tree = Json.read(folder / name)
            if isinstance(tree, dict) and {"run", "callbacks"} <= tree.keys():
                return decode(Encoded(tree["run"]))
    return {}


def _is_whole(one: Listed) -> bool:
    try:
        verify_state(one.path)
    except CheckpointError:
        return False
    return True
