"""The checkpoints in a folder: what `trainer-lib checkpoint list` shows, without reading tensors."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from trainer_lib.checkpointing.format.layout import (
    AUTOMATIC_FOLDER,
    CUSTOM_STATE_NAME,
    MANIFEST_NAME,
    committed,
    is_committed,
)
from trainer_lib.checkpointing.format.manifest import Manifest
from trainer_lib.checkpointing.format.plain_json import decode_plain
from trainer_lib.checkpointing.load.find import open_state, verify_state
from trainer_lib.checkpointing.storage.storage import storage_of
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.foundation.light_dataclasses import frozen_dataclass

# The names of complete and of damaged checkpoints; those of running saves and deletions are left out.
_NAME = re.compile(r"checkpoint[-_](\d+)(\.replaced)?")
_ASIDE = re.compile(r".*\.damaged(-\d+)?")
_UNFINISHED = (".partial", ".deleted")


@frozen_dataclass(kw_only=True)
class CheckpointSummary:
    """The facts of a checkpoint.

    Attributes:
        path: Its folder.
        manifest: Its manifest; `None` if it cannot be read.
        problem: What is wrong with it, by the names and sizes of its files.
        is_aside: Whether it was set aside (renamed) because it is damaged.
        size: The bytes of its files.
        saved: When it was saved, in seconds since 1970.
        step: The optimizer steps that were made; backward passes, if your own loop does not report steps.
        run_id: The run it belongs to, if known.
        metrics: The evaluation at its step, if there was one.
        best_step: The step of the best evaluation so far, if there was one.
        kept: Why retention would keep it, if known.
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
        """Its condition: "complete", "not finite", "damaged" or "set aside"."""
        if self.is_aside:
            return "set aside"
        return "damaged" if self.problem is not None else "not finite" if self.nonfinite else "complete"

    @property
    def nonfinite(self) -> list[str]:
        """The weights, buffers and optimizer states with a NaN or an infinity."""
        return [] if self.manifest is None else self.manifest.nonfinite


def checkpoints_by_run(folder: AnyPath, may_be_empty: bool = False) -> list[list[CheckpointSummary]]:
    """Return the checkpoint or checkpoints in a folder, grouped by run, the oldest first.

    Args:
        folder: A checkpoint, a folder of checkpoints, a run, a project, or a folder of runs.
        may_be_empty: Whether to return an empty list, rather than raise, for a folder without checkpoints.

    Raises:
        CheckpointError: If there is no checkpoint.
    """
    if is_committed(folder):
        return [[_summary(folder)]]
    groups = [group for parent in _checkpoint_folders(folder) for group in _groups_in(parent)]
    if not groups and not may_be_empty:
        raise CheckpointError(
            f"There is no checkpoint in {folder}. Give the folder of a checkpoint, of a run, or of runs."
        )
    return groups


def newest_checkpoint(folder: AnyPath) -> CheckpointSummary:
    """Return the newest of the checkpoints that `checkpoints_by_run` finds.

    Raises:
        CheckpointError: If there is none, or all were set aside as damaged.
    """
    present = [entry for group in checkpoints_by_run(folder) for entry in group if not entry.is_aside]
    if not present:
        raise CheckpointError(f"All checkpoints in {folder} were set aside as damaged.")
    return max(reversed(present), key=lambda entry: entry.saved)  # of the same second, the later one


def debris_in(folder: AnyPath) -> list[AnyPath]:
    """Return what interrupted saves and deletions left in a folder of checkpoints, a run, a project, or of runs."""
    return [path for parent in _checkpoint_folders(folder) for path in storage_of(parent).debris()]


def prunable(checkpoints: Sequence[CheckpointSummary], keep_last: int) -> list[CheckpointSummary]:
    """Return the checkpoints of a run to delete: not the newest, not the best, and not the last intact one.

    Args:
        checkpoints: The checkpoints of one run, the oldest first.
        keep_last: How many of the newest to keep.
    """
    candidates = [checkpoint for checkpoint in checkpoints if not checkpoint.is_aside and not checkpoint.nonfinite]
    kept, older = candidates[-keep_last:], candidates[:-keep_last]
    intact = next((checkpoint for checkpoint in [*reversed(kept), *reversed(older)] if _is_intact(checkpoint)), None)
    older = [checkpoint for checkpoint in older if checkpoint is not intact and "best" not in checkpoint.kept]
    faulty = [checkpoint for checkpoint in checkpoints[:-1] if checkpoint.nonfinite and not checkpoint.is_aside]
    return older + faulty


def _checkpoint_folders(folder: AnyPath) -> list[AnyPath]:
    """Return the folders that may hold the checkpoints of a project, a run, or of runs."""
    return [folder, folder / AUTOMATIC_FOLDER, *sorted(folder.glob(f"*/{AUTOMATIC_FOLDER}"))]


def _groups_in(folder: AnyPath) -> list[list[CheckpointSummary]]:
    """Return the checkpoints in a folder by run; those of an unknown run go with the newest known run."""
    checkpoints = sorted(map(_summary, _candidates(folder)), key=_order)
    known = [checkpoint.run_id for checkpoint in checkpoints if checkpoint.run_id is not None]
    groups: dict[str | None, list[CheckpointSummary]] = {}
    for checkpoint in checkpoints:
        groups.setdefault(checkpoint.run_id or (known[-1] if known else None), []).append(checkpoint)
    return [_with_reasons(group) for group in groups.values()]


def _candidates(folder: AnyPath) -> Iterator[AnyPath]:
    for path in storage_of(folder).states():
        if path.name.endswith(_UNFINISHED):
            continue
        if path.name.endswith(".replaced"):  # it is the checkpoint if a rename was interrupted
            if committed(path.with_name(path.name.removesuffix(".replaced"))) == path:
                yield path
        elif is_committed(path) or _NAME.fullmatch(path.name) or _ASIDE.fullmatch(path.name):
            yield path


def _order(checkpoint: CheckpointSummary) -> tuple[int, str]:
    """Order the checkpoints of a run by their steps, since folders may have been renamed, and others by their names."""
    name = checkpoint.path.name
    match = _NAME.match(name)
    number = int(match[1]) if match else -1
    return (number if checkpoint.run_id is None or checkpoint.step is None else checkpoint.step, name)


def _with_reasons(checkpoints: list[CheckpointSummary]) -> list[CheckpointSummary]:
    good = [checkpoint for checkpoint in checkpoints if checkpoint.status == "complete"]
    newest = good[-1] if good else None
    best = None if newest is None else newest.best_step

    def reasons(checkpoint: CheckpointSummary) -> Iterator[str]:
        if checkpoint is newest:
            yield "newest"
        if best is not None and checkpoint.step == best and not checkpoint.is_aside:
            yield "best"

    return [replace(checkpoint, kept=tuple(reasons(checkpoint))) for checkpoint in checkpoints]


def _summary(folder: AnyPath) -> CheckpointSummary:
    manifest, problem = None, None
    try:
        manifest = open_state(folder)
    except CheckpointError as error:
        problem = str(error)
    facts = {} if manifest is None else _facts(folder, manifest)
    manifest_file = folder / MANIFEST_NAME
    return CheckpointSummary(
        path=folder,
        manifest=manifest,
        problem=problem,
        is_aside=_ASIDE.fullmatch(folder.name) is not None,
        size=sum(storage_of(folder).sizes().values()),
        saved=(manifest_file if manifest_file.is_file() else folder).stat().st_mtime,
        step=facts.get("step"),
        run_id=facts.get("run_id"),
        metrics=facts.get("metrics", {}),
        best_step=(facts.get("best") or {}).get("step"),
    )


def _facts(folder: AnyPath, manifest: Manifest) -> Mapping[str, Any]:
    """Return the facts of the run, from the manifest; before format 3, from the saved state of the run."""
    if manifest.schema >= 3:
        return {name: getattr(manifest, name) for name in ("step", "run_id", "metrics", "best")}
    from trainer_lib.tensor_files.file_contents import Json  # it needs torch

    for name in manifest.files:
        if name.startswith(CUSTOM_STATE_NAME) and name.endswith(".json"):
            tree = Json.read(folder / name)
            if isinstance(tree, dict) and {"run", "callbacks"} <= tree.keys():
                run = decode_plain(tree["run"])
                metrics = [entry["metrics"] for entry in run["checkpoints"] if entry["step"] == run["step"]]
                return {**run, "metrics": metrics[-1] if metrics else {}}
    return {"step": manifest.step}


def _is_intact(checkpoint: CheckpointSummary) -> bool:
    try:
        verify_state(checkpoint.path)
    except CheckpointError:
        return False
    return True
