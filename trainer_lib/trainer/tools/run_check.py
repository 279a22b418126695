"""Checking a trainer before its run: two updates, an evaluation, a save, a load, and the same update after a resume."""

import dataclasses
import hashlib
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

import numpy as np
import torch
from torch import Tensor

from trainer_lib.accelerator import Accelerator
from trainer_lib.collectives.agreement import run_on_main_process
from trainer_lib.events import Modifier, Run
from trainer_lib.filesystem.remote_paths import RemotePath
from trainer_lib.foundation.byte_sizes import convert_bytes
from trainer_lib.foundation.device_types import synchronize
from trainer_lib.foundation.duration import NEVER, Every
from trainer_lib.foundation.errors import NonFiniteError, TrainerLibError
from trainer_lib.foundation.lengths import length_of
from trainer_lib.foundation.tensors.pytree import leaves, tensors
from trainer_lib.foundation.tensors.tensor_operations import as_bytes
from trainer_lib.memory.device_memory import get_max_memory
from trainer_lib.memory.peak_memory import PeakMemory
from trainer_lib.seeding import set_seed
from trainer_lib.trainer import defaults
from trainer_lib.trainer.checks import before_fit
from trainer_lib.trainer.fit.fit_run import fit
from trainer_lib.trainer.tools.check_report import CheckReport, Stage
from trainer_lib.trainer.tools.checkpoint_differences import differences, parts_of
from trainer_lib.trainer.tools.learning_rate_curve import learning_rates
from trainer_lib.trainer.tools.sandbox import check_can_sandbox, copy_callbacks, sandbox
from trainer_lib.trainer.trainer_interface import TrainerInterface

_TOOL = "check"
_UPDATES = 2
_EVAL_BATCHES = 2
_SEEDS = (1, 2)  # of the two evaluations: a model that draws random numbers gives another result
_HISTORY_LINE = 400  # bytes of a logged step, with its part of the report
_REPORT_PAGE = 60_000

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
        self._first, self._second = _Probe(self._accelerator), _Probe(self._accelerator)
        self._facts: dict[str, Any] = {}
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
        self._warn()
        use = peak.over_processes()
        return CheckReport(
            stages=self._stages,
            **self._facts,
            **self._memory(use.device or use.host),
            **self._time(),
            **self._output(first[1] if first else None),
            warnings=list(dict.fromkeys([*self._warnings, *heard])),
        )

    # -- the two runs ------------------------------------------------------------------------------------------------

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
        if len(checkpoints) < _UPDATES:
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
    def _sandbox(self, name: str, probe: "_Probe") -> Generator[None]:
        trainer = self._trainer
        args = dataclasses.replace(trainer.args, **_CHANGES, output_dir=str(self._folder / name))
        modifiers = [each for each in trainer.events if isinstance(each, Modifier) and each.runs_in_sandbox]
        callbacks = defaults.callbacks(args, copy_callbacks(trainer, _TOOL, modifiers))
        with sandbox(trainer, _TOOL, args, [*(each for each in callbacks if not each.is_display), probe]):
            yield

    def _train(self, stage: str, probe: "_Probe", checkpoint: Path | None) -> bool:
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
            self._facts = self._facts or probe.facts
        return True

    def _fail(self, stage: str, error: Exception, doing: str = "") -> None:
        """Note an error as the failure of a stage; raise it again if other ranks may wait for this one."""
        is_known = isinstance(error, TrainerLibError)
        if self._accelerator.num_processes > 1 and not is_known:
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
        step = _UPDATES - 1
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

    # -- the whole run -----------------------------------------------------------------------------------------------

    def _memory(self, peak: int) -> dict[str, Any]:
        device, size = self._accelerator.device, self._facts.get("per_device_batch_size")
        parts, free = dict(self._first.memory), _free_memory(device)
        activations = parts.get("activations", 0)
        parts["peak of the process" if device.type == "cpu" else "peak of the device"] = peak
        advice = f"{convert_bytes(free)} free"
        if size and activations:
            room = size * (free + activations) // activations
            whole = self._facts.get("samples_per_epoch") or math.inf
            fits = f"about {room:,} samples" if room < whole else "more samples than there are"
            advice += f", activations {convert_bytes(activations / size)} a sample: room for {fits}"
        return {"memory": parts, "memory_advice": advice}

    def _time(self) -> dict[str, Any]:
        steps, seconds, counts = self._facts.get("steps"), dict[str, float](), dict[str, int]()
        if self._first.step_seconds:
            seconds["step"] = self._first.step_seconds
        args, plan = self._trainer.args, self._trainer.parts.evaluation
        for name, plural, cost, interval in (
            ("evaluation", "evaluations", self._eval_seconds, plan.interval),
            ("save", "saves", self._first.save_seconds or None, args.save_interval),
        ):
            if cost is not None and interval is not None:
                seconds[name] = cost
                count = self._times(interval)
                counts |= {} if count is None else {plural: count}
        limits = [] if args.time_limit is None else [float(args.time_limit)]
        if steps is not None and "step" in seconds:
            others = sum(counts[f"{name}s"] * seconds[name] for name in ("evaluation", "save") if f"{name}s" in counts)
            limits.append(steps * seconds["step"] + others)
        if limits:
            seconds["total"] = min(limits)
        return {"seconds": seconds, "counts": counts}

    def _times(self, interval: Every) -> int | None:
        """Return how often something happens in the run; `None` if that is not known."""
        steps, per_epoch = self._facts.get("steps"), self._facts.get("steps_per_epoch")
        batch, seconds = self._facts.get("batch_size"), self._first.step_seconds
        lengths = {
            "steps": 1.0,
            "epochs": float(per_epoch) if per_epoch else None,
            "samples": 1.0 / batch if batch else None,
            "seconds": 1.0 / seconds if seconds else None,
        }
        length = lengths.get(interval.unit)
        if steps is None or length is None:
            return None
        return math.ceil(steps / max(1.0, interval.amount * length) - 1e-9)  # the last step too

    def _output(self, checkpoint: Path | None) -> dict[str, Any]:
        args, root = self._trainer.args, self._trainer.args.output_folder
        if root is None:
            return {"output": "nothing is written: there is no output_dir"}
        saves = None if args.save_interval is None else self._times(args.save_interval)
        kept = self._kept(saves)
        size = 0 if checkpoint is None else _size(checkpoint)
        steps, log = self._facts.get("steps"), args.log_interval
        logs = 0 if log is None else self._times(log) or 0
        total = None if not size or steps is None or kept is None else kept * size + _REPORT_PAGE + logs * _HISTORY_LINE
        of_saves = f"{kept} of {saves} checkpoints stay" if saves else f"up to {kept} checkpoints stay"
        words = ["all checkpoints stay" if kept is None else of_saves]
        words[0] += f", {convert_bytes(size)} each" if size else ""
        if args.save_interval is None and kept == 0:
            words = ["no checkpoints"]
            total = None if steps is None else _REPORT_PAGE + logs * _HISTORY_LINE
        words.append("run.json, history.jsonl and report.html")
        words += [f"about {convert_bytes(total)} in all"] if total is not None else []
        trackers = ", ".join(str(name) for name in args.report_to)
        words += [f"logs go to {trackers}"] if trackers else []
        free = None if isinstance(root, RemotePath) else _free_disk(root)
        if free is not None:
            words.append(f"{convert_bytes(free)} free there")
            if (total or 2 * size) > free:
                self._warnings.append(f"{root} has {convert_bytes(free)} free, which is not enough for the run.")
        return {"output": f"a folder of the run in {root}: {'; '.join(words)}", "output_bytes": total}

    def _kept(self, saves: int | None) -> int | None:
        saver = next((each for each in self._trainer.events if each.saves_checkpoints), None)
        newest = getattr(saver, "keep_last", self._trainer.args.keep_last)
        is_evaluated = self._trainer.parts.evaluation.interval is not None
        best = getattr(saver, "keep_best", self._trainer.args.keep_best) if is_evaluated else 0
        if self._trainer.args.save_interval is None and best == 0:
            return 0
        if newest is None or self._trainer.args.keep_every is not None:
            return saves
        kept = newest + best
        return kept if saves is None else min(kept, saves)

    def _warn(self) -> None:
        """Note what is not wrong, and yet may not be meant."""
        trainer, steps, per_epoch = self._trainer, self._facts.get("steps"), self._facts.get("steps_per_epoch")
        if trainer.args.output_dir is None:
            self._warnings.append("There is no output_dir: an interrupted run starts again from nothing.")
        if steps and per_epoch and steps < per_epoch:
            self._warnings.append(f"The run ends after {steps} of the {per_epoch} updates of the first epoch.")
        interval = trainer.args.save_interval
        if interval is not None and interval.unit == "steps" and steps and interval.amount > steps:
            self._warnings.append(f'save_every="{interval}" is longer than the run: only its end is saved.')


class _Probe(Modifier):
    """Stops a run after two updates, and notes its batches, times and sizes."""

    order = 1000  # after the callbacks that change batches

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.has_begun = False
        self.step = 0
        self.batches: dict[int, list[str]] = {}
        self.facts: dict[str, Any] = {}
        self.memory: dict[str, int] = {}
        self.step_seconds = self.save_seconds = 0.0
        self._mark = 0.0
        self._saved = _SavedTensors()

    def on_fit_begin(self, run: Run) -> None:
        """Note the run as it would be, and have it end after two updates."""
        self.has_begun = True
        self.facts = _facts(run)
        state = run.state
        state.max_steps = _UPDATES if state.max_steps is None else min(state.max_steps, _UPDATES)
        self._mark = time.perf_counter()

    def on_micro_batch_begin(self, run: Run) -> None:
        """Note a digest of a batch, and what the first one keeps for its backward."""
        self.batches.setdefault(run.state.step, []).append(_digest(run.batch))
        if "activations" not in self.memory and not run.args.compile:
            self._saved.enter(run)

    def on_micro_batch_end(self, run: Run) -> None:
        """Note the memory of activations."""
        if "activations" not in self.memory:
            self.close()
            self.memory["activations"] = self._saved.bytes

    def close(self) -> None:
        """Stop counting the memory of activations."""
        self._saved.exit()

    def on_optimizer_step_end(self, run: Run) -> None:
        """Note what weights, gradients and optimizers take."""
        parameters = [parameter for model in run.modules.values() for parameter in model.parameters()]
        states = [run.optimizers[name].state for name in run.optimizers]
        self.memory |= {
            "weights": sum(map(_bytes, parameters)),
            "gradients": sum(_bytes(each.grad) for each in parameters if each.grad is not None),
            "optimizer": sum(_bytes(tensor) for state in states for tensor in tensors([*state.values()])),
        }

    def on_step_end(self, run: Run) -> None:
        """Note the time of an update; the first one also warms up."""
        synchronize(self._accelerator.device)
        self.step, self.step_seconds = run.state.step, time.perf_counter() - self._mark

    def on_save_begin(self, run: Run, folder: Path) -> None:
        """Note when a save begins."""
        del run, folder
        self._mark = time.perf_counter()

    def on_save_end(self, run: Run, folder: Path) -> None:
        """Note the time of a save."""
        del run, folder
        self.save_seconds = time.perf_counter() - self._mark
        self._mark = time.perf_counter()


class _SavedTensors:
    """Counts the bytes that forwards keep for their backward, without the weights."""

    def __init__(self) -> None:
        self._hooks: Any = None
        self._seen: set[int] = set()
        self.bytes = 0

    def enter(self, run: Run) -> None:
        """Begin to count."""
        self._seen = {_address(parameter) for model in run.modules.values() for parameter in model.parameters()}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._count, lambda tensor: tensor)
        self._hooks.__enter__()

    def exit(self) -> None:
        """Count no more."""
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None

    def _count(self, tensor: Tensor) -> Tensor:
        address = _address(tensor)
        if address not in self._seen:
            self._seen.add(address)
            self.bytes += _local(tensor).untyped_storage().nbytes()
        return tensor


def _facts(run: Run) -> dict[str, Any]:
    """Return what is known of a run when it begins, in the words of the report."""
    accelerator, state = run.accelerator, run.state
    loader = accelerator.prepared.dataloaders[-1]
    of_round, ranks, accumulated = (
        loader.total_batch_size,
        accelerator.num_processes,
        accelerator.gradient_accumulation_steps,
    )
    count = sum(parameter.numel() for model in run.modules.values() for parameter in model.parameters())
    schedule_length = run.args.schedule_steps or state.max_steps
    return {
        "model": f"{', '.join(type(model).__name__ for model in run.modules.values())}, {count:,} parameters",
        "devices": f"{ranks} {'process' if ranks == 1 else 'processes'} on {accelerator.device.type}",
        "batch_size": None if of_round is None else of_round * accumulated,
        "per_device_batch_size": None if of_round is None else of_round // accelerator.data_group.size,
        "accumulation": accumulated,
        "processes": ranks,
        "replicas": accelerator.data_group.size,
        "samples_per_epoch": length_of(loader.dataset),
        "steps_per_epoch": state.steps_per_epoch,
        "steps": state.max_steps,
        "epochs": state.max_epochs,
        "learning_rates": {
            name: learning_rates(optimizer, run.schedulers.get(name), state.max_steps or schedule_length)
            for name, optimizer in run.optimizers.items()
        },
    }


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


def _digest(batch: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            values = leaf.detach().cpu()
            digest.update(f"{values.dtype}{tuple(values.shape)}".encode())
            digest.update(as_bytes(values).numpy().tobytes())
        else:
            digest.update(leaf.tobytes() if isinstance(leaf, np.ndarray) else repr(leaf).encode())
    return digest.hexdigest()


def _local(tensor: Any) -> Tensor:
    """Return the part of a tensor that is on this rank."""
    return getattr(tensor, "_local_tensor", tensor)


def _address(tensor: Any) -> int:
    return _local(tensor).untyped_storage().data_ptr()


def _bytes(tensor: Any) -> int:
    tensor = _local(tensor)
    return tensor.numel() * tensor.element_size()


def _equal(first: float, second: float) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _free_memory(device: torch.device) -> int:
    free = get_max_memory()
    return free.get("cpu" if device.type == "cpu" else device.index or 0, free["cpu"])


def _free_disk(folder: Path) -> int | None:
    there = next((path for path in (folder, *folder.parents) if path.is_dir()), None)
    return None if there is None else shutil.disk_usage(there).free


def _eval_batches(trainer: TrainerInterface) -> int | None:
    """Return how many batches of this rank an evaluation has; `None` if that is not known."""
    loaders = before_fit.eval_loaders(trainer, trainer.eval_dataset, "eval_dataset").values()
    lengths = [length_of(loader) for loader in loaders]
    limit = trainer.args.limit_eval_batches or math.inf
    if any(length is None for length in lengths):
        return None
    ranks = trainer.accelerator.num_processes
    return math.ceil(sum(min(length or 0, limit * ranks) for length in lengths) / ranks)
