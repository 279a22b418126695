"""The cost of a Trainer's saves and of a resume, on one process and two: `python -m benchmarks.checkpoints_of_runs`.

The floors: a copy of the tensors that this rank saves into buffers that are there for the time that a save blocks the
loop, windows without a save for those beside which a checkpoint is written, and reading every byte for a resume. On a
GPU (`--device cuda`) windows are measured there, so that the processor runs ahead as it does without a measurement.
"""

import argparse
import itertools
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import machine
from benchmarks.checkpoints import WIDTH, copy, forget, new_copy, read, report, timed
from benchmarks.devices import add_device
from trainer_lib import FullyShardedDataParallelPlugin, Trainer, TrainingArguments
from trainer_lib.events import Callback, Run
from trainer_lib.launchers import run_forked

STRATEGIES = {
    "ddp": lambda: None,
    "fsdp": lambda: FullyShardedDataParallelPlugin(state_dict_type="SHARDED_STATE_DICT"),
}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoints_of_runs", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--parameters", type=float, default=100e6, help="of the model (default: 100 million)")
    parser.add_argument("--saves", type=int, default=4, help="how many checkpoints to save (default: 4)")
    parser.add_argument("--every", type=int, default=8, help="updates between two (default: 8)")
    parser.add_argument("--batch", type=int, default=128, help="rows of an update (default: 128)")
    parser.add_argument("--processes", type=int, default=1, help="(default: 1)")
    parser.add_argument("--strategy", choices=STRATEGIES, default="ddp", help="of several processes (default: ddp)")
    add_device(parser)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=arguments.folder))
    try:
        if arguments.processes > 1:
            run_forked(measure, (arguments, folder), num_processes=arguments.processes)
        else:
            measure(arguments, folder)
    finally:
        shutil.rmtree(folder)


def measure(arguments: argparse.Namespace, folder: Path) -> None:
    """Train with saves, resume, and print what they cost rank 0."""
    new_watch = SaveWatchOnCpu if arguments.device == "cpu" else SaveWatchOnGpu
    watch = new_watch()
    args = {"max_steps": arguments.saves * arguments.every + arguments.every // 2, "save_every": arguments.every}
    trainer = trainer_of(arguments, watch, output_dir=folder, keep_last=1, **args)
    trainer.fit()
    is_main = trainer.accelerator.is_main_process
    if is_main:
        watch.print(arguments)
    checkpoint = next(folder.glob("*/checkpoints/checkpoint-*"))
    del trainer
    for is_cold in (True, False):
        resumed, floors = [], []
        for _ in range(2):
            watch = new_watch()
            trainer = trainer_of(arguments, watch, max_steps=args["max_steps"])
            if is_cold:
                forget(checkpoint)
            began = time.perf_counter()
            trainer.fit(resume=str(checkpoint))
            resumed.append(watch.loaded_at - began)
            if is_cold:
                forget(checkpoint)
            floors.append(timed(lambda: read(checkpoint))[0])
        if is_main:
            where = "the disk" if is_cold else "the system's memory"
            report(f"resume from {where}", min(resumed), min(floors), "reading every byte", "at most 1.2")


def trainer_of(arguments: argparse.Namespace, watch: "SaveWatch", **options: Any) -> Trainer:
    """Return a Trainer of linear layers."""
    layers = max(1, round(arguments.parameters / WIDTH**2))
    rows = 16 * arguments.batch
    torch.manual_seed(0)  # all ranks have the same data
    plugin = STRATEGIES[arguments.strategy]() if arguments.processes > 1 else None
    return Trainer(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))),
        TrainingArguments(
            learning_rate=1e-6,
            per_device_train_batch_size=arguments.batch // arguments.processes,
            use_cpu=arguments.device == "cpu",
            progress_bar=False,
            fsdp=plugin,
            **options,
        ),
        train_dataset=(torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)),
        loss_fn=nn.functional.mse_loss,
        callbacks=[watch],
    )


class SaveWatch(Callback):
    """Measures how long saves block training, and windows beside which a checkpoint is written."""

    def __init__(self) -> None:
        self.copies: list[float] = []
        self.writes: list[float] = []
        self.loaded_at = 0.0
        self._buffers: dict[str, Tensor] = {}

    def on_load_end(self, run: Run, folder: Any) -> None:
        del run, folder
        self.loaded_at = time.perf_counter()

    def on_save_end(self, run: Run, folder: Any) -> None:
        del folder
        self.writes.append(run.state.save_seconds or 0)

    def print(self, arguments: argparse.Namespace) -> None:
        """Print what is measured, and where."""
        size = sum(value.nbytes for value in self._buffers.values())
        several = f"{arguments.processes} processes ({arguments.strategy})" if arguments.processes > 1 else "1 process"
        print(f"{machine.describe()}; {several}, {torch.get_num_threads()} threads; {size / 1e9:.2f} GB a rank")


class SaveWatchOnCpu(SaveWatch):
    """Measures on the host, each save after a copy of the same tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.blocked: list[float] = []  # in `save_state`, and before the next update
        self.free: list[float] = []  # windows without a save
        self.beside: list[float] = []  # windows beside which a checkpoint is copied and written
        self._began = self._step_began = 0.0
        self._is_saving = self._was_writing = False

    def on_save_begin(self, run: Run, folder: Any) -> None:
        del folder
        if run.state.step == run.state.max_steps:
            return
        tensors = _saved_tensors(run)
        if not self._buffers:
            self._buffers = new_copy(tensors)
        self.copies.append(timed(lambda: copy(self._buffers, tensors))[0])
        self._is_saving, self._began = True, time.perf_counter()

    def on_step_begin(self, run: Run) -> None:
        self._step_began = time.perf_counter()
        self._was_writing = run.accelerator.is_saving
        if self._is_saving:
            self._is_saving = False
            saves = run.accelerator.checkpoints.background
            self.blocked.append(self._step_began - self._began)
            finish = type(saves).finish_copies

            def timed_finish() -> None:
                del saves.finish_copies
                self.blocked[-1] += timed(lambda: finish(saves))[0]

            saves.finish_copies = timed_finish  # type: ignore[method-assign]

    def on_optimizer_step_end(self, run: Run) -> None:
        seconds = time.perf_counter() - self._step_began
        if run.state.step < 2:  # the memory of the first save is allocated beside them
            return
        if self._was_writing:
            self.beside.append(seconds)
        elif not run.accelerator.is_saving:
            self.free.append(seconds)

    def print(self, arguments: argparse.Namespace) -> None:
        """Print what was measured."""
        super().print(arguments)
        copied, free = min(self.copies), statistics.median(self.free)
        print(f"windows of {free:.3f} s, writes of {min(self.writes):.2f} to {max(self.writes):.2f} s")
        report("first save: blocked", self.blocked[0], copied, "copy into the same buffers", "at most 0.3")
        for blocked in self.blocked[1:]:
            report("next save: blocked", blocked, copied, "copy into the same buffers", "at most 0.3")
        beside = statistics.mean(self.beside)
        speed = statistics.mean(self.free) / beside
        print(f"{len(self.beside)} windows beside a write: {beside:.3f} s, {speed:.2f} of the speed (at least 0.97)")


class SaveWatchOnGpu(SaveWatch):
    """Measures windows from the end of an update to the end of the next one, as a GPU computes them."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[Any] = []  # events of the GPU
        self.saved: list[int] = []  # the windows that begin with a save
        self.beside: list[int] = []  # the windows beside which a checkpoint is written

    def on_save_begin(self, run: Run, folder: Any) -> None:
        del folder
        if run.state.step != run.state.max_steps:
            self.saved.append(len(self.ends) - 1)

    def on_step_begin(self, run: Run) -> None:
        if run.accelerator.is_saving:
            self.beside.append(len(self.ends) - 1)

    def on_optimizer_step_end(self, run: Run) -> None:
        if not self._buffers:
            tensors = _saved_tensors(run)
            self._buffers = new_copy(tensors)
            self.copies = [timed(lambda: copy(self._buffers, tensors))[0] for _ in range(3)]
        self.ends.append(torch.cuda.Event(enable_timing=True))
        self.ends[-1].record()

    def print(self, arguments: argparse.Namespace) -> None:
        """Print what was measured."""
        torch.cuda.synchronize()
        windows = [first.elapsed_time(then) / 1e3 for first, then in itertools.pairwise(self.ends)]
        beside = [number for number in self.beside if number not in self.saved and number < len(windows)]
        free = [value for number, value in enumerate(windows) if number not in (*self.saved, *self.beside)]
        usual, copied = statistics.median(free), min(self.copies)
        super().print(arguments)
        print(f"windows of {usual:.3f} s, writes of {min(self.writes):.2f} to {max(self.writes):.2f} s")
        print(f"the first windows: {', '.join(f'{value:.3f}' for value in windows[:8])} s")
        for number in self.saved:
            kind = "first" if number == self.saved[0] else "next"
            blocked = windows[number] - usual
            report(f"{kind} save: blocked", blocked, copied, "copy into the same buffers", "at most 0.05")
        if beside:
            mean = statistics.mean(windows[number] for number in beside)
            print(
                f"{len(beside)} windows beside a write: {mean:.3f} s, {usual / mean:.2f} of the speed (at least 0.97)"
            )


def _saved_tensors(run: Run) -> dict[str, Tensor]:
    optimizer = next(iter(run.optimizers.values()))
    tensors = {f"weight.{name}": _local(value.detach()) for name, value in run.parameters.items()}
    for number, values in enumerate(optimizer.state.values()):
        tensors |= {f"{number}.{name}": _local(value) for name, value in values.items()}
    return tensors


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


if __name__ == "__main__":
    main()
