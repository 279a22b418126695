"""This file is which samples each update was made from, written down as training goes, and read again."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import default_collate

from trainer_lib.data_loader.order.data_rng import derived_seed
from trainer_lib.data_loader.order.sample_seeds import SeededSamples
from trainer_lib.events import Callback, Run
from trainer_lib.filesystem.atomic_files import replace_file
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError

_FOLDER = "provenance"
_AT_ONCE = 1000  # lines that are kept until they are written


class Provenance(Callback):
    """Writes down which samples each update was made from: a line for each, of each process, in the run's folder.

    The lines are those of `provenance/process-0.jsonl` and so on. Samples that follow one another are written as a
    range. `samples_of_step` reads them, and `replay_batch` fetches them. A resumed run takes out what came after the
    step that it goes on from. The order of a sampler of one's own is drawn anew in each step, up to where it is, which
    takes its time in a long pass.

    Args:
        folder: Where the folder is made; by default in the run's folder.

    Raises:
        ConfigurationError: When training begins, if there is no folder.
        UnsupportedError: In the first step, if the loader has an order that cannot be known; training goes on without.

    Example:
        >>> provenance = Provenance("runs/first")
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._given = None if folder is None else Path(folder).expanduser()
        self._file: Path | None = None
        self._batches: list[Any] = []
        self._lines: list[str] = []
        self._place: dict[str, int] = {}
        self._is_skipped = False

    def on_fit_begin(self, run: Run) -> None:
        folder = self._given or run.folder
        if folder is None:
            raise ConfigurationError("Provenance has no folder to write to. Give output_dir, or Provenance(folder=…).")
        processes, rank = 1, 0
        if run.accelerator is not None:
            processes, rank = run.accelerator.num_processes, run.accelerator.process_index
        (folder / _FOLDER).mkdir(parents=True, exist_ok=True)
        self._file = folder / _FOLDER / f"process-{rank}.jsonl"
        self._batches, self._lines = [], []
        self._cut(run.state.step)
        if run.is_main_process:  # of processes that are no more
            for file in _files(folder):
                if _rank(file) >= processes:
                    _keep(file, run.state.step)

    def on_load_end(self, run: Run, folder: Path) -> None:
        del folder
        if self._file is not None:  # it went back
            self._cut(run.state.step)

    def on_step_begin(self, run: Run) -> None:
        del run
        self._batches, self._is_skipped = [], False

    def on_micro_batch_begin(self, run: Run) -> None:
        loader: Any = run.accelerator.gradient_state.active_dataloader
        samples = loader.sample_ids()
        if samples is None:
            raise UnsupportedError(
                "Provenance: which samples a batch holds cannot be known here, since the loader's class, its workers "
                "or its sampler have an order of their own."
            )
        self._batches.append(_short(samples))
        self._place = {"pass": run.state.epoch}
        if loader.seeds_samples:
            self._place["seed"] = loader._seed

    def on_step_skipped(self, run: Run) -> None:
        del run
        self._is_skipped = True

    def on_step_end(self, run: Run) -> None:
        if not self._batches:  # its samples are left out
            return
        line = {"step": run.state.step, **self._place, "batches": self._batches}
        if self._is_skipped:
            line["skipped"] = True
        self._lines.append(json.dumps(line, separators=(",", ":")))
        self._batches = []
        if len(self._lines) >= _AT_ONCE:
            self._write()

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        del run, values
        self._write()

    def on_save_begin(self, run: Run, folder: Path) -> None:
        del run, folder
        self._write()  # what a checkpoint goes on from is written

    def on_fit_end(self, run: Run) -> None:
        del run
        self._write()
        self._file = None

    def _write(self) -> None:
        if self._lines and self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in self._lines))
            self._lines = []

    def _cut(self, step: int) -> None:
        self._lines = []
        if self._file is not None and self._file.exists():
            _keep(self._file, step)


def samples_of_step(run_folder: str | Path, step: int) -> list[list[list[Any]]]:
    """Return which samples an update was made from: of each process, of each of its batches.

    Args:
        run_folder: The run's folder.
        step: The update; the first one is 1.

    Raises:
        ConfigurationError: If it is not written down.

    Example:
        >>> folder = Path("runs/first/provenance")
        >>> folder.mkdir(parents=True)
        >>> _ = (folder / "process-0.jsonl").write_text('{"step":1,"pass":0,"batches":["3-5,9"]}')
        >>> samples_of_step("runs/first", 1)
        [[[3, 4, 5, 9]]]
    """
    return [[_long(batch) for batch in line["batches"]] for line in _lines_of(run_folder, step)]


def replay_batch(
    run_folder: str | Path, step: int, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None = None
) -> Any:
    """Return the samples that an update was made from as one batch: those of process 0 first, in their order.

    What a dataset draws at random is drawn a second time, exactly, where the run had `seed_each_sample=True`; elsewhere
    it draws other random numbers.

    Args:
        run_folder: The run's folder.
        step: The update; the first one is 1.
        dataset: The dataset of the run: one with an index, or arrays in a tuple or by name.
        collate_fn: Makes a batch of samples; by default as a `DataLoader` does.

    Raises:
        ConfigurationError: If the step is not written down, or the dataset is of another kind.
    """
    if isinstance(dataset, (tuple, Mapping)):
        dataset = _Rows(dataset)
    if not hasattr(dataset, "__getitem__"):
        raise ConfigurationError(f"replay_batch needs a dataset with an index, got a {type(dataset).__name__}.")
    samples = list[Any]()
    for line in _lines_of(run_folder, step):
        keys = [key for batch in line["batches"] for key in _long(batch)]
        if "seed" in line:
            seed = derived_seed(line["seed"], line["pass"], "samples")
            samples += SeededSamples(dataset).__getitems__([(seed, key) for key in keys])
        else:
            samples += [dataset[key] for key in keys]
    return (collate_fn or default_collate)(samples)


class _Rows:
    """The samples that arrays in a tuple or by name are: a row of each of them."""

    def __init__(self, columns: Any) -> None:
        self._columns = columns

    def __getitem__(self, index: int) -> Any:
        if isinstance(self._columns, Mapping):
            return {name: column[index] for name, column in self._columns.items()}
        return tuple(column[index] for column in self._columns)


def _lines_of(run_folder: str | Path, step: int) -> list[dict[str, Any]]:
    folder = Path(run_folder).expanduser()
    found = [line for file in _files(folder) for line in _read(file) if line["step"] == step]
    if not found:
        steps = sorted({line["step"] for file in _files(folder) for line in _read(file)})
        there = f"There are steps {steps[0]} to {steps[-1]}" if steps else "There are none"
        raise ConfigurationError(
            f"The samples of step {step!r} are not written down in {folder / _FOLDER}. {there}: they are written by "
            "Trainer(callbacks=[Provenance()])."
        )
    return found


def _files(folder: Path) -> list[Path]:
    return sorted((folder / _FOLDER).glob("process-*.jsonl"), key=_rank)


def _rank(file: Path) -> int:
    return int(file.stem.removeprefix("process-"))


def _read(file: Path) -> Iterable[dict[str, Any]]:
    for line in file.read_text("utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # cut short, when the process was killed
            continue


def _keep(file: Path, step: int) -> None:
    kept = [json.dumps(line, separators=(",", ":")) for line in _read(file) if line["step"] <= step]
    replace_file(file, lambda path: path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8"))


def _short(samples: Sequence[Any]) -> Any:
    """Return samples as they are written: numbers as text with ranges, such as "3-5,9"."""
    if samples and (set(map(type, samples)) != {int} or min(samples) < 0):
        return [one if isinstance(one, (int, str)) else str(one) for one in samples]
    parts = list[list[int]]()
    for one in samples:
        if parts and one == parts[-1][1] + 1:
            parts[-1][1] = one
        else:
            parts.append([one, one])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _long(written: Any) -> list[Any]:
    """Return what `_short` was given."""
    if not isinstance(written, str):
        return list(written)
    ends = [part.split("-") for part in written.split(",") if part]
    return [one for part in ends for one in range(int(part[0]), int(part[-1]) + 1)]
