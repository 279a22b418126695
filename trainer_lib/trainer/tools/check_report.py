"""The result of `Trainer.check`: what was proved, what went wrong, and what the whole run will take, on one screen."""

import dataclasses
import math
import textwrap
from dataclasses import dataclass, field
from typing import Any

from trainer_lib.foundation.byte_sizes import convert_bytes
from trainer_lib.trainer.tools.learning_rate_curve import chart

_WIDTH = 110
_LABEL = 15
_CHART = 64  # columns
_MOST_WARNINGS = 4


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the check.

    Attributes:
        name: "training", "evaluation", "checkpoint" or "resume".
        passed: Whether it holds; `None` if it was not checked.
        text: What was proved, what is wrong, or why it was not checked.
    """

    name: str
    passed: bool | None
    text: str


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What a check found; printed, it fits on one screen.

    Attributes:
        stages: What was proved, and what is wrong.
        model: The model's class and size.
        devices: The processes and their devices.
        batch_size: The samples of an update; `None` if unknown.
        per_device_batch_size: The samples of a micro-batch of a rank; `None` if unknown.
        accumulation: The micro-batches of an update.
        processes: The number of ranks.
        replicas: The ranks, or groups of ranks that hold one replica of the model, that read batches of their own.
        samples_per_epoch: The samples of the training data; `None` if unknown.
        steps_per_epoch: The updates of an epoch; `None` if unknown.
        steps: The updates of the whole run; `None` if unknown.
        epochs: The epochs of the whole run; `None` without such a limit.
        memory: Bytes on the rank that has most, by what they are for.
        memory_advice: What the memory means for the run.
        seconds: Seconds of an update, an evaluation, a save, and of all of them over the whole run.
        counts: How many evaluations and saves the run makes, where that is known.
        learning_rates: The learning rate over the run, by the names of the optimizers.
        output: What is written, and where.
        output_bytes: The bytes that stay on disk at the end of the run; `None` if unknown.
        warnings: What may be wrong.

    Example:
        >>> import torch
        >>> from trainer_lib import Trainer, TrainingArguments
        >>> data = (torch.randn(64, 4), torch.randint(2, (64,)))
        >>> args = TrainingArguments(use_cpu=True, progress_bar=False)
        >>> loss_fn = torch.nn.functional.cross_entropy
        >>> Trainer(torch.nn.Linear(4, 2), args, train_dataset=data, loss_fn=loss_fn).check().passed
        True
    """

    stages: list[Stage]
    model: str = ""
    devices: str = ""
    batch_size: int | None = None
    per_device_batch_size: int | None = None
    accumulation: int = 1
    processes: int = 1
    replicas: int = 1
    samples_per_epoch: int | None = None
    steps_per_epoch: int | None = None
    steps: int | None = None
    epochs: float | None = None
    memory: dict[str, int] = field(default_factory=dict[str, int])
    memory_advice: str = ""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    counts: dict[str, int] = field(default_factory=dict[str, int])
    learning_rates: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    output: str = ""
    output_bytes: int | None = None
    warnings: list[str] = field(default_factory=list[str])

    @property
    def passed(self) -> bool:
        """Whether nothing was found that is wrong."""
        return all(stage.passed is not False for stage in self.stages)

    @property
    def failures(self) -> list[str]:
        """What is wrong, each with the stage that found it."""
        return [f"{stage.name}: {stage.text}" for stage in self.stages if stage.passed is False]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        return {"passed": self.passed, "failures": self.failures, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        """Return the report as text."""
        verdict = "passed" if self.passed else "FAILED"
        lines = [f"Check {verdict}: {self.model or 'the model'}{self.devices and f' on {self.devices}'}"]
        for stage in self.stages:
            mark = {True: "[ok]", False: "[FAILED]", None: "[-]"}[stage.passed]
            lines += _entry(f"{mark} {stage.name}", stage.text, indent=0, width=20)
        lines += _entry("batch", self._batch())
        lines += _entry("length", self._length())
        lines += _entry("time", self._time())
        lines += _entry("memory", self._memory())
        for name, rates in self.learning_rates.items():
            lines += self._rates(name, rates)
        lines += _entry("output", self.output)
        for warning in self.warnings[:_MOST_WARNINGS]:
            lines += _entry("warning", textwrap.shorten(warning, 2 * _WIDTH, placeholder=" …"))
        more = len(self.warnings) - _MOST_WARNINGS
        return "\n".join([*lines, *_entry("", f"and {more} more warnings" if more > 0 else "")])

    def _batch(self) -> str:
        singular, plural = ("process", "processes") if self.replicas == self.processes else ("replica", "replicas")
        ranks = f"{self.replicas} {plural if self.replicas > 1 else singular}"
        if self.batch_size is None:
            return f"batch size of the loader × {self.accumulation} accumulated × {ranks}"
        size = self.per_device_batch_size
        return f"{self.batch_size} samples per update = {size} per device × {self.accumulation} accumulated × {ranks}"

    def _length(self) -> str:
        known = [
            f"{self.samples_per_epoch:,} samples and" if self.samples_per_epoch is not None else "",
            f"{self.steps_per_epoch:,} updates per epoch;" if self.steps_per_epoch is not None else "",
            f"{self.steps:,} updates in total" if self.steps is not None else "number of updates unknown",
            f"({self.epochs:g} epoch{'' if self.epochs == 1 else 's'})" if self.epochs is not None else "",
        ]
        return " ".join(part for part in known if part)

    def _time(self) -> str:
        if "step" not in self.seconds:
            return ""
        parts = [f"{_duration(self.seconds['step'])} per update"]
        for name, plural in (("evaluation", "evaluations"), ("save", "saves")):
            if name in self.seconds:
                count = f" × {self.counts[plural]:,}" if plural in self.counts else ""
                parts.append(f"{_duration(self.seconds[name])} per {name}{count}")
        total = f"; about {_duration(self.seconds['total'])} in total" if "total" in self.seconds else ""
        return ", ".join(parts) + total

    def _memory(self) -> str:
        parts = [f"{name} {convert_bytes(size)}" for name, size in self.memory.items()]
        return ", ".join(parts) + (f". {self.memory_advice}" if self.memory_advice else "")

    def _rates(self, name: str, rates: list[float]) -> list[str]:
        label = "learning rate" if name == "default" else name
        if not rates:
            return _entry(label, "unknown before the run")
        if len(set(rates)) == 1:
            return _entry(label, f"{rates[0]:.3g} throughout")
        wide = [rate for rate in rates for _ in range(max(1, _CHART // len(rates)))]
        first, *others = chart(wide)
        end = len(first) - len(first.partition("│")[2])
        axis = f"{'':<{end - 1}}└{'─' * len(wide)} {self.steps or ''}"
        return [f"  {label:<{_LABEL}}{first}", *(f"  {'':<{_LABEL}}{line}" for line in [*others, axis])]


def _entry(label: str, text: str, indent: int = 2, width: int = _LABEL) -> list[str]:
    if not text:
        return []
    first = f"{' ' * indent}{label:<{width}}"
    return textwrap.wrap(
        " ".join(text.split()),
        _WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if days else f"{hours} h {minutes} min" if hours else f"{minutes} min"
