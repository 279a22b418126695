"""Which samples each update used: recorded during training, readable and replayable afterwards."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import default_collate

from trainer_lib.data_loader.order.data_rng import derived_seed
from trainer_lib.data_loader.order.sample_seeds import SeededSamples
from trainer_lib.events import Callback, Run
from trainer_lib.filesystem.atomic_files import LogWrites, append_text, replace_file
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError

_FOLDER = "provenance"
_AT_ONCE = 1000  # lines buffered before a write


class Provenance(Callback):
    """Records which samples each update used: one line per update and rank, in the run's folder.

    Each rank writes `provenance/process-<rank>.jsonl`. Consecutive samples are written as a range. `samples_of_step`
    reads the samples of an update, and `replay_batch` fetches them. A resumed run removes the lines after the step it
    resumes from. With a custom sampler, each step replays the sampler's order from the start of the epoch, which is
    slow in long epochs.

    Args:
        folder: Where to create the `provenance` folder; by default in the run's folder.

    Raises:
        ConfigurationError: When training begins, if there is no folder.
        UnsupportedError: In the first step, if the loader's order is unknown; training continues without the callback.

    Example:
        >>> provenance = Provenance("runs/first")
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._parent = None if folder is None else Path(folder).expanduser()
        self._file: Path | None = None
        self._batches: list[Any] = []
        self._lines: list[str] = []
        self._position: dict[str, int] = {}
        self._is_skipped = False
        self._kept_up_to: int | None = None  # the step after which lines are to be removed from the files
        self._beyond: list[Path] = []  # the files of ranks that this run does not have
        self._writes = LogWrites("lines")

    def on_fit_begin(self, run: Run) -> None:
        folder = self._parent or run.folder
        if folder is None:
            raise ConfigurationError("Provenance has no folder to write to. Give output_dir, or Provenance(folder=…).")
        world_size, rank = 1, 0
        if run.accelerator is not None:
            world_size, rank = run.accelerator.data_group.size, run.accelerator.data_group.rank
            if not run.accelerator.reads_first:
                return  # another rank reads the same samples, and writes them
        self._file = folder / _FOLDER / f"process-{rank}.jsonl"
        self._batches, self._lines = [], []
        self._beyond = [file for file in _files(folder) if _rank(file) >= world_size] if run.is_main_process else []
        self._cut(run.state.step)

    def on_load_end(self, run: Run, folder: Path) -> None:
        del folder
        if self._file is not None:  # after a rewind
            self._cut(run.state.step)

    def on_step_begin(self, run: Run) -> None:
        del run
        self._batches, self._is_skipped = [], False

    def on_micro_batch_begin(self, run: Run) -> None:
        loader: Any = run.accelerator.gradient_state.active_dataloader
        samples = loader.sample_ids()
        if samples is None:
            raise UnsupportedError(
                "Provenance cannot tell which samples a batch contains: the DataLoader's class, its workers or its "
                "sampler determine the order themselves."
            )
        self._batches.append(_encode(samples))
        self._position = {"pass": run.state.epoch}
        if loader.seeds_samples:
            self._position["seed"] = loader.data_seed

    def on_step_skipped(self, run: Run) -> None:
        del run
        self._is_skipped = True

    def on_step_end(self, run: Run) -> None:
        if not self._batches:  # the update was left out
            return
        line = {"step": run.state.step, **self._position, "batches": self._batches}
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
        self._write()  # a resumed run needs these lines

    def on_fit_end(self, run: Run) -> None:
        del run
        self._write()
        self._file = None

    def _write(self) -> None:
        """Write the lines that wait; those that the disk does not take wait for the next call."""
        if self._file is None or not (self._lines or self._kept_up_to is not None):
            return
        if self._writes.attempt(self._file, partial(self._write_to, self._file)):
            self._lines = []

    def _write_to(self, file: Path) -> None:
        if self._kept_up_to is not None:
            for path in (file, *self._beyond):
                if path.exists():
                    _keep(path, self._kept_up_to)
        self._kept_up_to = None
        append_text(file, "".join(f"{line}\n" for line in self._lines))

    def _cut(self, step: int) -> None:
        self._lines: list[str] = []
        self._kept_up_to: int | None = step
        self._write()


def samples_of_step(run_folder: str | Path, step: int) -> list[list[list[Any]]]:
    """Return the samples that an update used, by rank and batch.

    Args:
        run_folder: The run's folder.
        step: The update; the first one is 1.

    Raises:
        ConfigurationError: If the step was not recorded.

    Example:
        >>> folder = Path("runs/first/provenance")
        >>> folder.mkdir(parents=True)
        >>> _ = (folder / "process-0.jsonl").write_text('{"step":1,"pass":0,"batches":["3-5,9"]}')
        >>> samples_of_step("runs/first", 1)
        [[[3, 4, 5, 9]]]
    """
    return [[_decode(batch) for batch in line["batches"]] for line in _lines_of(run_folder, step)]


def replay_batch(
    run_folder: str | Path, step: int, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None = None
) -> Any:
    """Return the samples that an update used as one batch, in rank order.

    If the run had `seed_each_sample=True`, random numbers drawn by the dataset are the same as in training; otherwise
    they differ.

    Args:
        run_folder: The run's folder.
        step: The update; the first one is 1.
        dataset: The dataset of the run: a map-style dataset, or a tuple or dict of arrays.
        collate_fn: The collate function; by default torch's.

    Raises:
        ConfigurationError: If the step was not recorded, or the dataset has no index.
    """
    if isinstance(dataset, (tuple, Mapping)):
        dataset = _Rows(dataset)
    if not hasattr(dataset, "__getitem__"):
        raise ConfigurationError(f"replay_batch needs a dataset with an index (got a {type(dataset).__name__}).")
    samples = list[Any]()
    for line in _lines_of(run_folder, step):
        keys = [key for batch in line["batches"] for key in _decode(batch)]
        if "seed" in line:
            seed = derived_seed(line["seed"], line["pass"], "samples")
            samples += SeededSamples(dataset).__getitems__([(seed, key) for key in keys])
        else:
            samples += [dataset[key] for key in keys]
    return (collate_fn or default_collate)(samples)


class _Rows:
    """A tuple or dict of arrays as a dataset of rows."""

    def __init__(self, columns: Any) -> None:
        self._columns = columns

    def __getitem__(self, index: int) -> Any:
        if isinstance(self._columns, Mapping):
            return {name: column[index] for name, column in self._columns.items()}
        return tuple(column[index] for column in self._columns)


def _lines_of(run_folder: str | Path, step: int) -> list[dict[str, Any]]:
    folder = Path(run_folder).expanduser()
    lines = [line for file in _files(folder) for line in _read(file) if line["step"] == step]
    if not lines:
        steps = sorted({line["step"] for file in _files(folder) for line in _read(file)})
        recorded = f"The recorded steps are {steps[0]} to {steps[-1]}" if steps else "No steps are recorded"
        raise ConfigurationError(
            f"The samples of step {step!r} are not recorded in {folder / _FOLDER}. {recorded}. To record them, train "
            "with Trainer(callbacks=[Provenance()])."
        )
    return lines


def _files(folder: Path) -> list[Path]:
    return sorted((folder / _FOLDER).glob("process-*.jsonl"), key=_rank)


def _rank(file: Path) -> int:
    return int(file.stem.removeprefix("process-"))


def _read(file: Path) -> Iterable[dict[str, Any]]:
    for line in file.read_text("utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # an incomplete line of a killed process
            continue


def _keep(file: Path, step: int) -> None:
    kept = [json.dumps(line, separators=(",", ":")) for line in _read(file) if line["step"] <= step]
    replace_file(file, lambda path: path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8"))


def _encode(samples: Sequence[Any]) -> Any:
    """Return sample ids in their file format: integers as text with ranges, such as "3-5,9"."""
    if samples and (set(map(type, samples)) != {int} or min(samples) < 0):
        return [sample if isinstance(sample, (int, str)) else str(sample) for sample in samples]
    parts = list[list[int]]()
    for sample in samples:
        if parts and sample == parts[-1][1] + 1:
            parts[-1][1] = sample
        else:
            parts.append([sample, sample])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _decode(written: Any) -> list[Any]:
    """Return the sample ids that `_encode` wrote."""
    if not isinstance(written, str):
        return list(written)
    ends = [part.split("-") for part in written.split(",") if part]
    return [sample for part in ends for sample in range(int(part[0]), int(part[-1]) + 1)]
