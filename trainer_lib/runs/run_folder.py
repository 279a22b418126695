"""The folder of a run: its identity, run file, history and checkpoints.

output_dir/RUN_ID/run.json
output_dir/RUN_ID/history.jsonl
output_dir/RUN_ID/evaluations.jsonl
output_dir/RUN_ID/checkpoints/checkpoint-00000500/
"""

import re
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer_lib.checkpointing.format.layout import committed
from trainer_lib.checkpointing.format.manifest import Manifest, read_manifest
from trainer_lib.checkpointing.storage.storage import storage_of
from trainer_lib.filesystem.remote_paths import AnyPath, path_at
from trainer_lib.foundation.errors import CheckpointError, UnreachableError
from trainer_lib.logging import get_logger
from trainer_lib.runs.run_file import facts_as_bytes

_logger = get_logger(__name__)

_NAME = r"checkpoint-\d+(\.replaced)?"
RUN_FILE, HISTORY_FILE, CHECKPOINTS = "run.json", "history.jsonl", "checkpoints"
EVALUATIONS_FILE = "evaluations.jsonl"  # by `trainer-lib evaluate`, in lines as those of the history
IDENTITY_FILE = "run_identity.json"  # in a checkpoint


@dataclass(eq=False)
class RunFolder:
    """The folder of one run.

    Args:
        path: The path of the folder.
        facts: The contents of the run file: the run's id, model, data and status.
    """

    path: AnyPath
    facts: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def run_id(self) -> str:
        """The run's id, which stays the same if the folder is renamed."""
        return str(self.facts.get("run_id", self.path.name))

    @property
    def is_finished(self) -> bool:
        """Whether the run is finished or was stopped."""
        return self.facts.get("status") in ("finished", "stopped")

    @property
    def history_file(self) -> Path:
        """The history file."""
        return self.here / HISTORY_FILE

    @property
    def here(self) -> Path:
        """The local folder for growing files: the run's folder, or for a URL a folder whose files `upload` sends."""
        return storage_of(self.path).local_folder()

    def download(self, name: str) -> None:
        """Download an uploaded file of the run into `here`; call on one rank."""
        storage_of(self.path).download(name)

    def upload(self) -> None:
        """Upload the files in `here` to the run's folder; a failure is logged, and the next upload retries."""
        try:
            storage_of(self.path).upload()
        except (OSError, UnreachableError) as error:
            _logger.warning("The history could not be uploaded to %s: %s", self.path, error)

    def checkpoint(self, step: int) -> AnyPath:
        """Return the folder of the checkpoint after `step` updates."""
        return self.path / CHECKPOINTS / f"checkpoint-{step:08d}"

    def newest_checkpoint(self) -> AnyPath | None:
        """Return the newest checkpoint with finite weights.

        On a disk this may be a damaged checkpoint, without a manifest.
        """
        return next((path for path in reversed(self.checkpoints()) if not _has_nonfinite(path)), None)

    def checkpoints(self) -> list[AnyPath]:
        """Return the checkpoints of this run by the steps in their manifests, without those of other runs."""
        states = [path for path in storage_of(self.path / CHECKPOINTS).states() if re.fullmatch(_NAME, path.name)]
        names = {path.name.removesuffix(".replaced") for path in states}
        folders = [self.path / CHECKPOINTS / name for name in sorted(names, key=lambda name: (len(name), name))]
        present = [committed(folder) or folder for folder in folders]
        manifests = {folder: _manifest_or_none(folder) for folder in present}
        own = [folder for folder in present if not self._is_of_another(manifests[folder])]
        return sorted(own, key=lambda folder: _step(folder, manifests[folder]))

    def _is_of_another(self, manifest: Manifest | None) -> bool:
        run_id = None if manifest is None else manifest.run_id
        return None not in (run_id, self.facts.get("run_id")) and run_id != self.run_id

    def write(self, **facts: Any) -> None:
        """Write the run file; call on one rank."""
        self.facts.update({"run_id": self.run_id, **facts})
        storage_of(self.path).write(RUN_FILE, facts_as_bytes(self.facts))

    def identity(self) -> bytes:
        """Return the run's identity; each checkpoint holds a copy, in case the run file is lost."""
        known = {name: self.facts[name] for name in ("created", "number", "what") if name in self.facts}
        return facts_as_bytes({"run_id": self.run_id, **known})


def recorded_checkpoint(folder: AnyPath, recorded: str) -> AnyPath:
    """Return where a checkpoint is: in the run's folder, which may have been moved, or as recorded."""
    path = path_at(recorded)
    moved = folder / CHECKPOINTS / path.name
    return moved if moved.is_dir() else path


def _manifest_or_none(folder: AnyPath) -> Manifest | None:
    try:
        return read_manifest(folder)
    except CheckpointError:
        return None


def _step(folder: AnyPath, manifest: Manifest | None) -> int:
    """Return the step of a checkpoint, whose folder may have been renamed; that of its name if it is damaged."""
    if manifest is not None and manifest.schema >= 3:  # before, manifests counted backward passes
        return manifest.step
    return int(folder.name.removesuffix(".replaced").rpartition("-")[2])


def _has_nonfinite(folder: AnyPath) -> bool:
    try:
        return bool(read_manifest(folder).nonfinite)
    except UnreachableError:
        raise
    except CheckpointError:  # damaged: loading it reports the damage
        return False


def new_run(root: AnyPath, name: str | None, what: dict[str, Any], number: int = 1) -> RunFolder:
    """Return the folder of a new run, without creating it.

    Args:
        root: The folder of all runs.
        name: The user's name for the run.
        what: The model and data, by which `resume="auto"` identifies the run.
        number: The run's number in the folder, which orders runs independently of clocks.
    """
    run_id = f"{name or time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    facts = {"run_id": run_id, "created": time.time(), "number": number, "what": what}
    return RunFolder(root.resolve() / run_id, facts)
