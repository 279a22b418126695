"""Checking a trainer before its run: two updates, an evaluation, a save, a load, and the same update after a resume."""

import dataclasses
import logging
import math
import shutil
import tempfile
import time
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer_lib.collectives.agreement import run_on_main_process
from trainer_lib.events import Modifier
from trainer_lib.foundation.byte_sizes import convert_bytes
from trainer_lib.foundation.duration import NEVER
from trainer_lib.foundation.errors import NonFiniteError, TrainerLibError
from trainer_lib.foundation.lengths import length_of
from trainer_lib.memory.peak_memory import PeakMemory
from trainer_lib.seeding import set_seed
from trainer_lib.trainer import defaults
from trainer_lib.trainer.checks import before_fit
from trainer_lib.trainer.fit.fit_run import fit
from trainer_lib.trainer.tools.check_probe import UPDATES, CheckProbe
from trainer_lib.trainer.tools.check_report import CheckReport, Stage
from trainer_lib.trainer.tools.checkpoint_differences import differences, parts_of
from trainer_lib.trainer.tools.run_forecast import RunForecast
from trainer_lib.trainer.tools.sandbox import check_can_sandbox, copy_callbacks, sandbox
from trainer_lib.trainer.trainer_interface import TrainerInterface

_TOOL = "check"
_EVAL_BATCHES = 2
_SEEDS = (1, 2)  # of the two evaluations: a model that draws random numbers gives another result

# The arguments of the check: those of the run, without what it shows or decides on the way.
_CHANGES: Mapping[str, Any] = {
    "resume": NEVER,
    "deadline": None,
    "stop_signals": (),
    "log_every": "1 step",
    "eval_every": NEVER,
    "eval_delay": None,
    "eval_on_start": False,
    "save_every": "1 step",
    "save_in_background": False,
    "on_save_error": "raise",
    "on_exception": "raise",
    "on_nonfinite": "raise",
    "loss_spike": None,
    "keep_last": None,
    "keep_every": None,
    "load_best_at_end": False,
    "metric_for_best": None,
    "greater_is_better": None,
    "run_name": None,
    "dry_run": False,
    "report_to": (),
}


def check(trainer: TrainerInterface) -> CheckReport:
    """Check a trainer; see `Trainer.check`."""
    check_can_sandbox(trainer, _TOOL)
    group = trainer.accelerator.group
    folder = Path(run_on_main_process(group, _TOOL, lambda: tempfile.mkdtemp(prefix="trainer_lib-check-")))
    try:
        with _warnings_kept() as heard:
            return _Check(trainer, folder).run(heard)
    finally:
        group.barrier()
        if trainer.accelerator.is_local_main_process:
            shutil.rmtree(folder, ignore_errors=True)


class _Check:
    """One check.

    Args:
        trainer: The trainer.
        folder: A temporary folder.
    """

    def __init__(self, trainer: TrainerInterface, folder: Path) -> None:
        self._trainer, self._folder, self._accelerator = trainer, folder, trainer.accelerator
        self._stages: list[Stage] = []
        self._warnings: list[str] = []
        self._first, self._second = CheckProbe(self._accelerator), CheckProbe(self._accelerator)
        self._eval_seconds: float | None = None

    def run(self, heard: list[str]) -> CheckReport:
        """Return the report.

        Args:
            heard: The warnings that are logged meanwhile.
        """
        with PeakMemory() as peak:
            first, second = self._uninterrupted(), None
            if first is not None:
                second = self._resumed(first[0])
        if first is not None and second is not None:
            self._compare(first[1], second)
        use = peak.over_processes()
        whole_run = RunForecast(self._trainer, self._first, self._eval_seconds)
        return CheckReport(
            stages=self._stages,
            **self._first.facts,
            **whole_run.memory(use.device or use.host),
            **whole_run.time(),
            **whole_run.output(_size(first[1]) if first else 0),
            warnings=list(dict.fromkeys([*self._warnings, *whole_run.warnings, *heard])),
        )

    def _uninterrupted(self) -> tuple[Path, Path] | None:
        """Train, evaluate and save; return the checkpoints before and after the last update."""
        with self._sandbox("first", self._first):
            if not self._train("training", self._first, None):
                return None
            run = self._trainer.run
            losses = [entry["loss"] for entry in run.state.history if "loss" in entry]
            shown = f", loss {', '.join(f'{loss:.4g}' for loss in losses)}" if losses else ""
            self._add("training", True, f"{run.state.step} updates of {run.state.samples} samples{shown}")
            self._evaluate()
        checkpoints = sorted(self._folder.glob("first/*/checkpoints/checkpoint-*"))
        if not checkpoints:
            self._add("checkpoint", False, "no checkpoint was written")
            return None
        size = convert_bytes(_size(checkpoints[-1]))
        text = f"{size} saved in {self._first.save_seconds:.2g} s: {', '.join(parts_of(checkpoints[-1]))}"
        self._add("checkpoint", True, text)
        if len(checkpoints) < UPDATES:
            self._add("resume", None, "not compared: the run has a single update")
            return None
        return checkpoints[0], checkpoints[-1]

    def _resumed(self, checkpoint: Path) -> Path | None:
        """Resume from the first checkpoint, and return the one after the last update."""
        with self._sandbox("resumed", self._second):
            if not self._train("resume", self._second, checkpoint):
                return None
        return max(self._folder.glob("resumed/*/checkpoints/checkpoint-*"))

    @contextmanager
    def _sandbox(self, name: str, probe: CheckProbe) -> Generator[None]:
        trainer = self._trainer
        args = dataclasses.replace(trainer.args, **_CHANGES, output_dir=str(self._folder / name))
        modifiers = [each for each in trainer.events if isinstance(each, Modifier) and each.runs_in_sandbox]
        callbacks = defaults.callbacks(args, copy_callbacks(trainer, _TOOL, modifiers))
        with sandbox(trainer, _TOOL, args, [*(each for each in callbacks if not each.is_display), probe]):
            yield

    def _train(self, stage: str, probe: CheckProbe, checkpoint: Path | None) -> bool:
        """Train, and note an error as the failure of a stage, unless other ranks may wait for this one."""
        try:
            fit(self._trainer, checkpoint)
        except Exception as error:  # noqa: BLE001 - whatever the user's code raises goes into the report
            doing = "the checkpoint cannot be loaded: " if checkpoint is not None and not probe.has_begun else ""
            if isinstance(error, NonFiniteError) and not probe.step:
                doing = "in the first update: "
            self._fail(stage, error, doing)
            return False
        finally:
            probe.close()
        return True

    def _fail(self, stage: str, error: Exception, doing: str = "") -> None:
        """Note an error as the failure of a stage; raise it again if other ranks may wait for this one."""
        is_known = isinstance(error, TrainerLibError)
        if self._accelerator.use_distributed and not is_known:
            raise error
        self._add(stage, False, f"{doing}{'' if is_known else f'{type(error).__name__}: '}{error}")

    def _evaluate(self) -> None:
        if self._trainer.eval_dataset is None:
            self._add("evaluation", None, "there is no eval_dataset")
            return
        try:
            first, second = self._evaluated_twice()
        except Exception as error:  # noqa: BLE001 - as above
            self._fail("evaluation", error)
            return
        other = [name for name in first if not _equal(first[name], second.get(name, math.nan))]
        if other:
            pairs = ", ".join(f"{name} {first[name]:.6g}, then {second[name]:.6g}" for name in other[:3])
            text = f"the second evaluation of the same batches differs: {pairs}. The model draws random numbers in"
            self._add("evaluation", False, f"{text} evaluation mode, or changes while it evaluates.")
            return
        bad = [name for name, value in first.items() if not math.isfinite(value)]
        shown = ", ".join(f"{name} {value:.4g}" for name, value in list(first.items())[:3])
        self._add("evaluation", not bad, f"twice the same metrics: {shown}" if not bad else f"not finite: {shown}")

    def _evaluated_twice(self) -> list[dict[str, float]]:
        """Return the metrics of the first batches, computed twice from other states of the generators."""
        trainer, results = self._trainer, list[dict[str, float]]()
        whole, option = _eval_batches(trainer), "limit_eval_batches"
        if trainer.args.overfit_batches is not None:  # which limits evaluations too
            option = "overfit_batches"
        limit = min(getattr(trainer.args, option) or _EVAL_BATCHES, _EVAL_BATCHES)
        trainer.args = dataclasses.replace(trainer.args, **{option: limit})
        for seed in _SEEDS:
            set_seed(seed)
            began = time.perf_counter()
            results.append(trainer.evaluate())
            seconds = time.perf_counter() - began
            self._eval_seconds = None if whole is None else seconds * max(1.0, whole / _EVAL_BATCHES)
        return results

    def _compare(self, expected: Path, actual: Path) -> None:
        """Compare the last update with the one after the resume, over all ranks."""
        step = UPDATES - 1
        mine = self._first.batches.get(step) == self._second.batches.get(step)
        same_batches = all(self._accelerator.group.all_gather_objects(mine))
        found = run_on_main_process(self._accelerator.group, _TOOL, lambda: differences(expected, actual))
        if not same_batches:
            text = "the model gets other batches after a resume than without an interruption"
            hint = "A dataset or sampler that keeps a position or a generator of its own needs state_dict() and "
            workers = self._trainer.args.num_workers and not self._trainer.args.seed_each_sample
            hint = (
                "seed_each_sample=True makes random numbers in workers repeat."
                if workers
                else f"{hint}load_state_dict()."
            )
            self._add("resume", False, f"{text}. {hint}")
            return
        callbacks = [difference for difference in found if difference.part.startswith("state of the run")]
        self._warnings += [f"After a resume this differs: {difference}." for difference in callbacks]
        found = [difference for difference in found if difference not in callbacks]
        where = "; ".join(map(str, found))
        if not found:
            parts = ", ".join(part for part in parts_of(expected) if not part.startswith("state of the run"))
            self._add("resume", True, f"bit for bit the uninterrupted run: {parts}, and the same batches")
        elif all(difference.may_be_rounding for difference in found):
            self._add("resume", True, f"equal within rounding: {where}. deterministic=True makes kernels repeat.")
        else:
            self._add("resume", False, f"the update after a resume is not that of the uninterrupted run: {where}")

    def _add(self, stage: str, passed: bool | None, text: str) -> None:
        self._stages.append(Stage(name=stage, passed=passed, text=text))


@contextmanager
def _warnings_kept() -> Generator[list[str]]:
    """Return the list of the warnings that are logged or raised within a block; they are shown as ever."""
    heard: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    keeper, logger, show = Keeper(logging.WARNING), logging.getLogger("trainer_lib"), warnings.showwarning

    def keep(message: Any, *rest: Any, **named: Any) -> None:
        heard.append(str(message))
        show(message, *rest, **named)

    logger.addHandler(keeper)
    warnings.showwarning = keep
    try:
        yield heard
    finally:
        warnings.showwarning = show
        logger.removeHandler(keeper)


def _equal(first: float, second: float) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _eval_batches(trainer: TrainerInterface) -> int | None:
    """Return how many batches of this rank an evaluation has; `None` if that is not known."""
    loaders = before_fit.eval_loaders(trainer, trainer.eval_dataset, "eval_dataset").values()
    lengths = [length_of(loader) for loader in loaders]
    limit = trainer.args.limit_eval_batches or math.inf
    if any(length is None for length in lengths):
        return None
    ranks = trainer.accelerator.num_processes
    return math.ceil(sum(min(length or 0, limit * ranks) for length in lengths) / ranks)
