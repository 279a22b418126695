"""This file is which states lie in a folder, and what can be told of them without reading their tensors."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainer_lib.checkpointing.format.layout import (
    AUTOMATIC_FOLDER,
    CUSTOM_STATE_NAME,
    MANIFEST_NAME,
    committed,
    is_committed,
)
from trainer_lib.checkpointing.format.manifest import Manifest
from trainer_lib.checkpointing.format.state_codec import Encoded, decode
from trainer_lib.checkpointing.load.find import open_state, verify_state
from trainer_lib.checkpointing.storage.storage import storage_of
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.tensor_files.file_contents import Json

# What a save writes, or an error has renamed; `.partial` and `.deleted` are on their way in or out.
_NAME = re.compile(r"checkpoint[-_](\d+)(\.replaced)?")
_ASIDE = re.compile(r".*\.damaged(-\d+)?")
_ON_THE_WAY = (".partial", ".deleted")


@dataclass(frozen=True, kw_only=True)
class CheckpointSummary:
    """What is told of a state.

    Attributes:
        path: Its folder.
        manifest: What it says of itself; `None` if it cannot be read.
        problem: What is wrong with it, as far as names and sizes of files tell.
        is_aside: Whether it was put aside because it is damaged.
        size: The bytes of its files.
        saved: When, in seconds since 1970.
        step: The updates, or for a loop of one's own the backward passes, that were made.
        run_id: The run it is of, if that is known.
        metrics: The evaluation at its step, if there was one.
        best_step: The step of the best evaluation so far, if there was one.
        kept: Why retention would keep it, as far as that is known.
    """

    path: AnyPath
    manifest: Manifest | None
    problem: str | None
    is_aside: bool
    size: int
    saved: float
    step: int | None
    run_id: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    best_step: int | None = None
    kept: tuple[str, ...] = ()

    @property
    def status(self) -> str:
        """How it is, in a word."""
        if self.is_aside:
            return "put aside"
        return "damaged" if self.problem is not None else "not finite" if self.nonfinite else "complete"

    @property
    def nonfinite(self) -> list[str]:
        """The weights, buffers and optimizer states that are not finite."""
        return [] if self.manifest is None else self.manifest.nonfinite


def checkpoints_by_run(folder: AnyPath, may_be_empty: bool = False) -> list[list[CheckpointSummary]]:
    """Return the states that a folder is or holds, each run's together, the oldest first.

    Args:
        folder: A state, a folder of states, a run, a project, or a folder of runs.
        may_be_empty: Whether a folder without a state is no error.

    Raises:
        CheckpointError: If there is none.
    """
    if is_committed(folder):
        return [[_listed(folder)]]
    groups = [states for place in _places(folder) for states in _states_in(place)]
    if not groups and not may_be_empty:
        raise CheckpointError(f"There is no state in {folder}. Give the folder of a state, of a run, or of runs.")
    return groups


def debris_in(folder: AnyPath) -> list[AnyPath]:
    """Return what saves and deletions that were cut short left in a folder of states, a run, a project, or of runs."""
    return [path for place in _places(folder) for path in storage_of(place).debris()]


def prunable(states: Sequence[CheckpointSummary], keep_last: int) -> list[CheckpointSummary]:
    """Return which states of a run can go: not the newest, not the best, and not the last one that is whole.

    Args:
        states: The states of one run, the oldest first.
        keep_last: How many of the newest stay.
    """
    present = [state for state in states if not state.is_aside and not state.nonfinite]
    kept, older = present[-keep_last:], present[:-keep_last]
    for one in [*reversed(kept), *reversed(older)]:
        if _is_whole(one):
            older = [other for other in older if other is not one]
            break
    faulty = [state for state in states if state.nonfinite and not state.is_aside and state is not states[-1]]
    return [state for state in older if "best" not in state.kept] + faulty


def _places(folder: AnyPath) -> list[AnyPath]:
    """Return the folders that may hold the states of a project, a run, or of runs."""
    return [folder, folder / AUTOMATIC_FOLDER, *sorted(folder.glob(f"*/{AUTOMATIC_FOLDER}"))]


def _states_in(place: AnyPath) -> list[list[CheckpointSummary]]:
    """Return the states in a folder, those of each run together: whose is not known are with the newest run's."""
    found = [_listed(path) for path in sorted(_folders(place), key=_order)]
    known = [one.run_id for one in found if one.run_id is not None]
    of_unknown = known[-1] if known else None
    runs = list(dict.fromkeys(one.run_id or of_unknown for one in found))
    return [_with_reasons([one for one in found if (one.run_id or of_unknown) == run]) for run in runs]


def _folders(place: AnyPath) -> Iterator[AnyPath]:
    for path in storage_of(place).states():
        if path.name.endswith(_ON_THE_WAY):
            continue
        if path.name.endswith(".replaced"):  # which counts where a rename was cut short
            if committed(path.with_name(path.name.removesuffix(".replaced"))) == path:
                yield path
        elif is_committed(path) or _NAME.fullmatch(path.name) or _ASIDE.fullmatch(path.name):
            yield path


def _order(path: AnyPath) -> tuple[int, str]:
    found = _NAME.match(path.name)
    return (int(found[1]) if found else -1, path.name)


def _with_reasons(states: list[CheckpointSummary]) -> list[CheckpointSummary]:
    newest = next((one for one in reversed(states) if not (one.is_aside or one.problem or one.nonfinite)), None)
    best = None if newest is None else newest.best_step

    def reasons(one: CheckpointSummary) -> Iterator[str]:
        if one is newest:
            yield "newest"
        if best is not None and one.step == best and not one.is_aside:
            yield "best"

    return [replace(one, kept=tuple(reasons(one))) for one in states]


def _listed(folder: AnyPath) -> CheckpointSummary:
    manifest, problem = None, None
    try:
        manifest = open_state(folder)
    except CheckpointError as error:
        problem = str(error)
    facts = {} if manifest is None else _facts(folder, manifest)
    written = folder / MANIFEST_NAME
    return CheckpointSummary(
        path=folder,
        manifest=manifest,
        problem=problem,
        is_aside=_ASIDE.fullmatch(folder.name) is not None,
        size=sum(storage_of(folder).sizes().values()),
        saved=(written if written.is_file() else folder).stat().st_mtime,
        step=facts.get("step"),
        run_id=facts.get("run_id"),
        metrics=facts.get("metrics", {}),
        best_step=(facts.get("best") or {}).get("step"),
    )


def _facts(folder: AnyPath, manifest: Manifest) -> Mapping[str, Any]:
    """Return what a manifest tells of the run; of one that tells nothing of it yet, what the run's state does."""
    if manifest.schema >= 3:
        return {name: getattr(manifest, name) for name in ("step", "run_id", "metrics", "best")}
    for name in manifest.files:
        if name.startswith(CUSTOM_STATE_NAME) and name.endswith(".json"):
            tree = Json.read(folder / name)
            if isinstance(tree, dict) and {"run", "callbacks"} <= tree.keys():
                run = decode(Encoded(tree["run"]))
                here = [one["metrics"] for one in run["checkpoints"] if one["step"] == run["step"]]
                return {**run, "metrics": here[-1] if here else {}}
    return {"step": manifest.step}


def _is_whole(one: CheckpointSummary) -> bool:
    try:
        verify_state(one.path)
    except CheckpointError:
        return False
    return True
