"""Find the runs in a folder, rebuild a damaged run.json from a checkpoint, and say why a run does not match."""

from collections.abc import Mapping
from typing import Any

from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import CheckpointError, UnreachableError
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.logging import get_logger
from trainer_lib.runs.run_file import read_facts
from trainer_lib.runs.run_folder import CHECKPOINTS, IDENTITY_FILE, RUN_FILE, RunFolder

_logger = get_logger(__name__)


@frozen_dataclass
class FoundRun:
    """A run in a folder of runs.

    Attributes:
        run: The run; without facts if neither its file nor a checkpoint has them.
        problem: Why its file cannot be used; `None` if it can.
    """

    run: RunFolder
    problem: str | None = None

    def mismatch(self, what: Mapping[str, Any]) -> str | None:
        """Return why a training does not match this run; `None` if it matches."""
        saved = self.run.facts.get("what")
        if saved == what:
            return None
        if not isinstance(saved, Mapping):
            return f"its {RUN_FILE} cannot be used ({self.problem or 'it does not name the model and the data'})"
        return " and ".join(_differences(saved, what)) or "its model or data differ"


def find_runs(output_dir: AnyPath) -> list[FoundRun]:
    """Return the runs in a folder, oldest first: by the number each got when it started, not by clocks.

    A run whose file is missing, damaged or unreadable is described by its newest checkpoint with an identity file. Such
    a run does not raise an error.
    """
    files, checkpoints = output_dir.glob(f"*/{RUN_FILE}"), output_dir.glob(f"*/{CHECKPOINTS}")
    folders = dict.fromkeys(path.parent for path in (*files, *checkpoints))
    links_first = sorted(folders, key=lambda folder: folder.name == folder.resolve().name)
    runs = {folder.resolve(): folder for folder in links_first}  # a link such as "latest" is no second run
    return sorted((_load(folder) for folder in runs.values()), key=lambda found: _order(found.run))


def read_run(folder: AnyPath, what: Any) -> RunFolder:
    """Return the run of a folder, also if its run file is missing or damaged."""
    found = _load(folder)
    if found.problem is not None and (folder / RUN_FILE).exists():
        _logger.warning("%s cannot be used: %s. The run writes it again.", folder / RUN_FILE, found.problem)
    return RunFolder(folder, found.run.facts or {"what": what})


def _load(folder: AnyPath) -> FoundRun:
    try:
        run = RunFolder(folder, read_facts(folder / RUN_FILE))
        _check_owner(run)
    except UnreachableError:
        raise
    except CheckpointError as error:
        return FoundRun(RunFolder(folder, _rebuilt_facts(folder)), str(error))
    return FoundRun(run)


def _check_owner(run: RunFolder) -> None:
    """Raise if a run file is that of another run: neither the folder nor any checkpoint in it has its id."""
    if run.run_id == run.path.name or run.checkpoints():
        return
    others = RunFolder(run.path).checkpoints()
    if others:
        raise CheckpointError(f"it is the file of the run {run.run_id}, and {others[-1].name} belongs to another run")


def _rebuilt_facts(folder: AnyPath) -> dict[str, Any]:
    """Return the facts from the newest checkpoint's copy, which does not hold how the run ended."""
    try:
        for checkpoint in reversed(RunFolder(folder).checkpoints()):
            if (checkpoint / IDENTITY_FILE).is_file():
                return {**read_facts(checkpoint / IDENTITY_FILE), "status": "interrupted"}
    except UnreachableError:
        raise
    except (OSError, CheckpointError):
        return {}
    return {}


def _order(run: RunFolder) -> tuple[int, float, str]:
    number, created = run.facts.get("number", 0), run.facts.get("created", 0.0)
    is_known = isinstance(number, int) and isinstance(created, (int, float))
    return (number, float(created), run.path.name) if is_known else (0, 0.0, run.path.name)


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences, one phrase each."""
    differences: list[str] = []
    if saved.get("models") != now["models"]:
        differences.append(f"its model is {_models(saved.get('models'))}, and this is {_models(now['models'])}")
    if saved.get("data") != now["data"]:
        differences.append(f"its training data is {_data(saved.get('data'))}, and this is {_data(now['data'])}")
    return differences


def _models(models: Any) -> str:
    try:
        return ", ".join(f"{kind} of {count:,} parameters" for kind, count in models.values())
    except (AttributeError, TypeError, ValueError):
        return repr(models)


def _data(data: Any) -> str:
    try:
        kind, samples = data
    except (TypeError, ValueError):
        return repr(data)
    return f"{kind} of {'an unknown number of' if samples is None else samples} samples"
