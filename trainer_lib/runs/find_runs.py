"""Find the runs in a folder, rebuild a damaged run.json from a checkpoint, and say why a run does not match."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import CheckpointError, UnreachableError
from trainer_lib.logging import get_logger
from trainer_lib.runs.run_file import read_facts
from trainer_lib.runs.run_folder import CHECKPOINTS, IDENTITY_FILE, RUN_FILE, RunFolder

_logger = get_logger(__name__)


@dataclass(frozen=True)
class FoundRun:
    """A run in a folder of runs.

    Attributes:
        run: The run; without facts where neither its file nor a checkpoint tells them.
        problem: Why its file could not be used; `None` if it could.
    """

    run: RunFolder
    problem: str | None = None

    def mismatch(self, what: Mapping[str, Any]) -> str | None:
        """Return why a training is not this run's, in words; `None` if it is."""
        saved = self.run.facts.get("what")
        if saved == what:
            return None
        if not isinstance(saved, Mapping):
            return f"its {RUN_FILE} is of no use ({self.problem or 'it does not say what the run trains'})"
        return " and ".join(_differences(saved, what)) or "it trains something else"


def find_runs(output_dir: AnyPath) -> list[FoundRun]:
    """Return the runs in a folder, the oldest first: by the number each got when it began, not by clocks.

    A run whose file is missing, damaged or unreadable is described by its newest checkpoint that says whose it is. None
    of them is an error.
    """
    files, checkpoints = output_dir.glob(f"*/{RUN_FILE}"), output_dir.glob(f"*/{CHECKPOINTS}")
    folders = dict.fromkeys(path.parent for path in (*files, *checkpoints))
    return sorted((_found(folder) for folder in folders), key=lambda one: _order(one.run))


def read_run(folder: AnyPath, what: Any) -> RunFolder:
    """Return the run of a folder, which may have lost the file that describes it, or have a damaged one."""
    found = _found(folder)
    if found.problem is not None and (folder / RUN_FILE).exists():
        _logger.warning("%s is not used: %s. It is written again.", folder / RUN_FILE, found.problem)
    return RunFolder(folder, found.run.facts or {"what": what})


def _found(folder: AnyPath) -> FoundRun:
    try:
        return FoundRun(RunFolder(folder, read_facts(folder / RUN_FILE)))
    except UnreachableError:
        raise
    except CheckpointError as error:
        return FoundRun(RunFolder(folder, _rebuilt_facts(folder)), str(error))


def _rebuilt_facts(folder: AnyPath) -> dict[str, Any]:
    """Return the facts that the newest checkpoint has a copy of. How the run ended is not among them."""
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
    """Return what differs, each in a few words."""
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
