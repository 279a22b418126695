"""This file is what a run has done so far, in numbers that survive a restart."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["new", "running", "finished", "stopped", "unsaved", "interrupted", "failed"]


@dataclass
class Best:
    """The best evaluation so far."""

    metric: str
    value: float
    step: int


@dataclass
class RunState:
    """What a run has done so far.

    Attributes:
        run_id: The run's name, and that of its folder.
        step: The updates made.
        micro_batches: The batches of this process that updates were made from.
        samples: The samples of all processes that updates were made from.
        tokens: The tokens in them, without padding; `None` where nothing asks for their number.
        items: What the loss counted in them (tokens of a language model, samples of a classifier), up to the last log.
        epoch: The passes over the data that are through.
        steps_in_epoch: The updates made in the pass under way.
        skipped: The updates that were left out because they, or what led to them, were not finite.
        left_out: From which to which sample training is not to use the data, as that led astray.
        steps_per_epoch: The updates of a pass; `None` where the data does not tell.
        max_steps: The updates of the run; `None` where that is not known.
        max_epochs: The passes of the run; `None` where it is not they that end it.
        max_tokens: The tokens that end the run; `None` where it is not they that end it.
        seconds: How long training took, over all restarts, without the time since the last step.
        save_seconds: How long the last checkpoint took until it was on the disk; `None` before there was one.
        best: The best evaluation so far.
        history: What was logged, each with the step and the epoch at which it was.
        checkpoints: The folders saved and still there, the oldest first, each with its step, epoch, samples and
            seconds, and its metrics.
        status: How the run stands. "unsaved": training ended, and its last checkpoint could not be written.
        reason: Why it ended.
    """

    run_id: str = ""
    step: int = 0
    micro_batches: int = 0
    samples: int = 0
    tokens: int | None = None
    items: float = 0.0
    epoch: int = 0
    steps_in_epoch: int = 0
    skipped: int = 0
    left_out: list[list[int]] = field(default_factory=list[list[int]])
    steps_per_epoch: int | None = None
    max_steps: int | None = None
    max_epochs: float | None = None
    max_tokens: int | None = None
    seconds: float = 0.0
    save_seconds: float | None = None
    best: Best | None = None
    history: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]], repr=False)
    checkpoints: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]], repr=False)
    status: Status = "new"
    reason: str | None = None

    @property
    def has_ended(self) -> bool:
        """Whether training came to its end, whether or not its last checkpoint could be written."""
        return self.status in ("finished", "stopped", "unsaved")

    @property
    def has_reached_limit(self) -> bool:
        """Whether the run has made the steps, epochs or tokens that end it."""
        return (
            (self.max_steps is not None and self.step >= self.max_steps)
            or (self.max_epochs is not None and self.epoch >= self.max_epochs)
            or (self.max_tokens is not None and (self.tokens or 0) >= self.max_tokens)
        )

    @property
    def epochs(self) -> float:
        """The passes made, with the part of the one under way; without it where its length is not known."""
        if not self.steps_per_epoch or not self.steps_in_epoch:
            return float(self.epoch)
        return self.epoch + self.steps_in_epoch / self.steps_per_epoch

    def state_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "RunState":
        """Return what `state_dict` returned, limits included."""
        best = state["best"]
        # Copied: entries may change after a state was taken.
        copied: dict[str, Any] = {name: [dict(entry) for entry in state[name]] for name in ("history", "checkpoints")}
        copied["best"] = None if best is None else Best(**best)
        return cls(**{**state, **copied})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned; limits stay those of now."""
        there = RunState.of(state)
        for name in _SURVIVING:
            setattr(self, name, getattr(there, name))


_SURVIVING = (
    "run_id",
    "step",
    "micro_batches",
    "samples",
    "tokens",
    "items",
    "epoch",
    "steps_in_epoch",
    "skipped",
    "left_out",
    "seconds",
    "save_seconds",
    "best",
    "history",
    "checkpoints",
    "status",
    "reason",
)
