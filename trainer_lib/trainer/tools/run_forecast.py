"""What a whole run takes (memory, time, disk), estimated from its first updates."""

import math
import shutil
from pathlib import Path
from typing import Any

import torch

from trainer_lib.filesystem.remote_paths import RemotePath
from trainer_lib.foundation.byte_sizes import convert_bytes
from trainer_lib.foundation.duration import Every
from trainer_lib.memory.device_memory import get_max_memory
from trainer_lib.trainer.tools.check_probe import CheckProbe
from trainer_lib.trainer.trainer_interface import TrainerInterface

_HISTORY_LINE = 400  # bytes of a logged step, with its part of the report
_REPORT_PAGE = 60_000  # bytes


class RunForecast:
    """What the whole run takes, in the words of the report of a check.

    Args:
        trainer: The trainer.
        probe: What was measured in the first updates.
        eval_seconds: The seconds of an evaluation; `None` if unknown.

    Attributes:
        warnings: What may not be meant, and what the run may lack.
    """

    def __init__(self, trainer: TrainerInterface, probe: CheckProbe, eval_seconds: float | None) -> None:
        self._trainer, self._args = trainer, trainer.args
        self._probe, self._facts, self._eval_seconds = probe, probe.facts, eval_seconds
        self.warnings: list[str] = self._length_warnings()

    def memory(self, peak: int) -> dict[str, Any]:
        """Return what takes memory, and what that means for the run."""
        device, size = self._trainer.accelerator.device, self._facts.get("per_device_batch_size")
        parts, free = dict(self._probe.memory), _free_memory(device)
        activations = parts.get("activations", 0)
        parts["peak of the process" if device.type == "cpu" else "peak of the device"] = peak
        advice = f"{convert_bytes(free)} free"
        if size and activations:
            room = size * (free + activations) // activations
            whole = self._facts.get("samples_per_epoch") or math.inf
            fits = f"about {room:,} samples" if room < whole else "more samples than there are"
            advice += f", activations {convert_bytes(activations / size)} a sample: room for {fits}"
        return {"memory": parts, "memory_advice": advice}

    def time(self) -> dict[str, Any]:
        """Return the seconds of an update, an evaluation, a save and the run, and how many there are."""
        steps, seconds, counts = self._facts.get("steps"), dict[str, float](), dict[str, int]()
        if self._probe.step_seconds:
            seconds["step"] = self._probe.step_seconds
        for name, plural, cost, interval in (
            ("evaluation", "evaluations", self._eval_seconds, self._trainer.parts.evaluation.interval),
            ("save", "saves", self._probe.save_seconds or None, self._args.save_interval),
        ):
            if cost is not None and interval is not None:
                seconds[name] = cost
                count = self._times(interval)
                counts |= {} if count is None else {plural: count}
        limits = [] if self._args.time_limit is None else [float(self._args.time_limit)]
        if steps is not None and "step" in seconds:
            others = sum(counts[f"{name}s"] * seconds[name] for name in ("evaluation", "save") if f"{name}s" in counts)
            limits.append(steps * seconds["step"] + others)
        if limits:
            seconds["total"] = min(limits)
        return {"seconds": seconds, "counts": counts}

    def output(self, checkpoint_size: int) -> dict[str, Any]:
        """Return what is written, and where; a disk that is too small is a warning.

        Args:
            checkpoint_size: The bytes of a checkpoint; 0 if none was written.
        """
        root = self._args.output_folder
        if root is None:
            return {"output": "nothing is written: there is no output_dir"}
        saves = None if self._args.save_interval is None else self._times(self._args.save_interval)
        kept = self._kept_checkpoints(saves)
        total = self._written_bytes(kept, checkpoint_size)
        items = [self._checkpoints(saves, kept, checkpoint_size), "run.json, history.jsonl and report.html"]
        if total is not None:
            items.append(f"about {convert_bytes(total)} in all")
        if self._args.report_to:
            items.append(f"logs go to {', '.join(map(str, self._args.report_to))}")
        free = None if isinstance(root, RemotePath) else _free_disk(root)
        if free is not None:
            items.append(f"{convert_bytes(free)} free there")
            if (total or 2 * checkpoint_size) > free:
                self.warnings.append(f"{root} has {convert_bytes(free)} free, which is not enough for the run.")
        return {"output": f"a folder of the run in {root}: {'; '.join(items)}", "output_bytes": total}

    def _writes_checkpoints(self, kept: int | None) -> bool:
        return self._args.save_interval is not None or kept != 0

    def _checkpoints(self, saves: int | None, kept: int | None, size: int) -> str:
        """Return how many checkpoints stay on the disk, as a phrase."""
        if not self._writes_checkpoints(kept):
            return "no checkpoints"
        of_saves = f"{kept} of {saves} checkpoints stay" if saves else f"up to {kept} checkpoints stay"
        stay = "all checkpoints stay" if kept is None else of_saves
        return f"{stay}, {convert_bytes(size)} each" if size else stay

    def _written_bytes(self, kept: int | None, checkpoint_size: int) -> int | None:
        """Return the bytes on the disk at the end of the run; `None` if unknown."""
        if self._facts.get("steps") is None:
            return None
        logs = 0 if self._args.log_interval is None else self._times(self._args.log_interval) or 0
        records = _REPORT_PAGE + logs * _HISTORY_LINE
        if not self._writes_checkpoints(kept):
            return records
        return kept * checkpoint_size + records if checkpoint_size and kept is not None else None

    def _times(self, interval: Every) -> int | None:
        """Return how often something happens in the run; `None` if that is not known."""
        steps, per_epoch = self._facts.get("steps"), self._facts.get("steps_per_epoch")
        batch, seconds = self._facts.get("batch_size"), self._probe.step_seconds
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

    def _kept_checkpoints(self, saves: int | None) -> int | None:
        """Return how many checkpoints retention keeps; `None` if that is not known."""
        saver = next((each for each in self._trainer.events if each.saves_checkpoints), None)
        newest = getattr(saver, "keep_last", self._args.keep_last)
        is_evaluated = self._trainer.parts.evaluation.interval is not None
        best = getattr(saver, "keep_best", self._args.keep_best) if is_evaluated else 0
        if self._args.save_interval is None and best == 0:
            return 0
        if newest is None or self._args.keep_every is not None:
            return saves
        kept = newest + best
        return kept if saves is None else min(kept, saves)

    def _length_warnings(self) -> list[str]:
        """Return warnings of a run that is shorter than what it is set to do, or that cannot be resumed."""
        warnings: list[str] = []
        steps, per_epoch = self._facts.get("steps"), self._facts.get("steps_per_epoch")
        if self._args.output_dir is None:
            warnings.append("There is no output_dir: an interrupted run starts again from nothing.")
        if steps and per_epoch and steps < per_epoch:
            warnings.append(f"The run ends after {steps} of the {per_epoch} updates of the first epoch.")
        interval = self._args.save_interval
        if interval is not None and interval.unit == "steps" and steps and interval.amount > steps:
            warnings.append(f'save_every="{interval}" is longer than the run: only its end is saved.')
        return warnings


def _free_memory(device: torch.device) -> int:
    free = get_max_memory()
    return free.get("cpu" if device.type == "cpu" else device.index or 0, free["cpu"])


def _free_disk(folder: Path) -> int | None:
    parent = next((path for path in (folder, *folder.parents) if path.is_dir()), None)
    return None if parent is None else shutil.disk_usage(parent).free
