"""This file is a run's folder: who it is, its checkpoints, and the other runs beside it.

output_dir/RUN_ID/run.json
output_dir/RUN_ID/history.jsonl
output_dir/RUN_ID/checkpoints/checkpoint-00000500/
"""

import re
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer_lib.checkpointing.format.layout import committed
from trainer_lib.checkpointing.format.manifest import read_manifest
from trainer_lib.checkpointing.storage.storage import storage_of
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import CheckpointError, UnreachableError
from trainer_lib.logging import get_logger
from trainer_lib.runs.run_file import facts_as_bytes

_logger = get_logger(__name__)

_NAME = re.compile(r"checkpoint-\d+(\.replaced)?")
RUN_FILE, HISTORY_FILE, CHECKPOINTS = "run.json", "history.jsonl", "checkpoints"
IDENTITY_FILE = "run_identity.json"  # in a checkpoint


@dataclass
class RunFolder:
    """The folder of one run.

    Args:
        path: Where it is.
        facts: What its file says: its id, what it trains, how it ended.
    """

    path: AnyPath
    facts: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def run_id(self) -> str:
        """The run's name, which it keeps if its folder is called otherwise."""
        return str(self.facts.get("run_id", self.path.name))

    @property
    def is_finished(self) -> bool:
        """Whether the run came to its end."""
        return self.facts.get("status") in ("finished", "stopped")

    @property
    def history_file(self) -> Path:
        """Where what is logged goes."""
        return self.here / HISTORY_FILE

    @property
    def here(self) -> Path:
        """Where files of the run grow: its folder, or if that is behind a URL one on this machine, to `upload`."""
        return storage_of(self.path).local_folder()

    def download(self, name: str) -> None:
        """Have a file of the run in `here`, as far as it was put up; one process does."""
        storage_of(self.path).download(name)

    def upload(self) -> None:
        """Bring the files in `here` to where the run is; if that fails, the next time may work."""
        try:
            storage_of(self.path).upload()
        except (OSError, UnreachableError) as error:
            _logger.warning("What was logged could not be written to %s: %s", self.path, error)

    def checkpoint(self, step: int) -> AnyPath:
        """Return the folder of the checkpoint after `step` updates."""
        return self.path / CHECKPOINTS / f"checkpoint-{step:08d}"

    def newest_checkpoint(self) -> AnyPath | None:
        """Return the checkpoint of the most updates whose weights are finite.

        On a disk one without a manifest is one too, and damaged.
        """
        return next((path for path in reversed(self.checkpoints()) if not _has_nonfinite(path)), None)

    def checkpoints(self) -> list[AnyPath]:
        """Return the checkpoints of this run, the oldest first; those that another run left here are none."""
        found = [path for path in storage_of(self.path / CHECKPOINTS).states() if _NAME.fullmatch(path.name)]
        names = {path.name.removesuffix(".replaced") for path in found}
        folders = [self.path / CHECKPOINTS / name for name in sorted(names, key=lambda name: (len(name), name))]
        present = [committed(folder) or folder for folder in folders]
        return [folder for folder in present if not self._is_of_another(folder)]

    def _is_of_another(self, folder: AnyPath) -> bool:
        try:
            run_id = read_manifest(folder).run_id
        except CheckpointError:  # whose it is cannot be told
            return False
        return None not in (run_id, self.facts.get("run_id")) and run_id != self.run_id

    def write(self, **facts: Any) -> None:
        """Write down what is known of the run; one process does."""
        self.facts.update({"run_id": self.run_id, **facts})
        storage_of(self.path).write(RUN_FILE, facts_as_bytes(self.facts))

    def identity(self) -> bytes:
        """Return what each checkpoint has a copy of, so that a run that lost its file is known all the same."""
        known = {name: self.facts[name] for name in ("created", "number", "what") if name in self.facts}
        return facts_as_bytes({"run_id": self.run_id, **known})


def _has_nonfinite(folder: AnyPath) -> bool:
    try:
        return bool(read_manifest(folder).nonfinite)
    except UnreachableError:
        raise
    except CheckpointError:  # damaged, and set aside when it is opened
        return False


def new_run(root: AnyPath, name: str | None, what: dict[str, Any], number: int = 1) -> RunFolder:
    """Return the folder of a new run; nothing is made yet.

    Args:
        root: Where runs are kept.
        name: What the user calls it.
        what: What it trains, by which `resume="auto"` knows it.
        number: Its place among the runs there, which orders them where clocks differ.
    """
    run_id = f"{name or time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    facts = {"run_id": run_id, "created": time.time(), "number": number, "what": what}
    return RunFolder(root.resolve() / run_id, facts)
