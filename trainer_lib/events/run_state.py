"""The progress of a run: counts and results that survive a restart."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from trainer_lib.foundation.errors import UnknownMemberError, did_you_mean
from trainer_lib.foundation.light_dataclasses import LightDataclass

Status = Literal["new", "running", "finished", "stopped", "unsaved", "interrupted", "failed"]

# Attributes of the state of Hugging Face's Trainer and others, and what to use here.
_MEMBERS = {
    "global_step": "step",
    "iteration": "step",
    "log_history": "history",
    "num_train_epochs": "max_epochs",
    "best_metric": "best.value",
    "best_global_step": "best.step",
    "best_model_checkpoint": "the best_checkpoint of fit()",
    "num_input_tokens_seen": "tokens",
    "is_world_process_zero": "run.accelerator.is_main_process",
    "is_local_process_zero": "run.accelerator.is_local_main_process",
    "output": "run.outputs",
    "batch": "run.batch",
    "metrics": "run.metrics",
}


@dataclass(repr=False, eq=False)
class Best(LightDataclass):
    """The best evaluation so far."""

    metric: str
    value: float
    step: int


@dataclass(repr=False, eq=False)
class RunState(LightDataclass):
    """The progress of a run.

    Attributes:
        run_id: The name of the run and of its folder.
        step: The number of updates.
        micro_batches: The number of batches of this rank that updates used.
        samples: The number of samples of all ranks that updates used.
        tokens: The number of tokens in them, without padding; `None` where no option needs it.
        items: The number of items in their losses (tokens of a language model, samples of a classifier), up to the
            last log.
        epoch: The number of finished epochs.
        steps_in_epoch: The number of updates in the current epoch.
        skipped: The number of updates skipped because of NaN or Inf.
        left_out: The ranges of samples, `[first, end]` without the end, that training skips because they led to NaN,
            Inf or a loss spike.
        steps_per_epoch: The number of updates in an epoch; `None` where the length of the data is not known.
        max_steps: The number of updates after which the run ends; `None` where it is not known.
        max_epochs: The number of epochs after which the run ends; `None`: no such limit.
        max_tokens: The number of tokens after which the run ends; `None`: no such limit.
        seconds: The duration of training over all restarts, without the time since the last step.
        save_seconds: The seconds until the last checkpoint was on disk; `None` before the first.
        best: The best evaluation so far.
        history: The logged values, each with its step and epoch.
        checkpoints: The checkpoint folders that still exist, oldest first, each with its step, epoch, samples, seconds
            and metrics.
        status: The status of the run. "unsaved": training ended, and its last checkpoint could not be written.
        reason: Why the run ended.
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

    if not TYPE_CHECKING:  # type checkers find unknown names by the fields

        def __getattr__(self, name: str) -> Any:
            """Raise an error that names the equivalent of another trainer's state."""
            known = () if name.startswith("__") else dir(self)
            hint = f" Use {_MEMBERS[name]}." if name in _MEMBERS else did_you_mean(name, known)
            raise UnknownMemberError(f"RunState has no attribute {name!r}.{hint}")

    @property
    def has_ended(self) -> bool:
        """Whether training ended, even if its last checkpoint could not be written."""
        return self.status in ("finished", "stopped", "unsaved")

    @property
    def has_reached_limit(self) -> bool:
        """Whether the run has reached `max_steps`, `max_epochs` or `max_tokens`."""
        return (
            (self.max_steps is not None and self.step >= self.max_steps)
            or (self.max_epochs is not None and self.epoch >= self.max_epochs)
            or (self.max_tokens is not None and (self.tokens or 0) >= self.max_tokens)
        )

    @property
    def epochs(self) -> float:
        """The epochs so far, with the fraction of the current one if the length of an epoch is known."""
        if not self.steps_per_epoch or not self.steps_in_epoch:
            return float(self.epoch)
        return self.epoch + self.steps_in_epoch / self.steps_per_epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "RunState":
        """Return a `RunState` from a state that `state_dict` returned, limits included."""
        best = state["best"]
        # Copies, because the entries of the given state may change later.
        copied: dict[str, Any] = {name: [dict(entry) for entry in state[name]] for name in ("history", "checkpoints")}
        copied["best"] = None if best is None else Best(**best)
        return cls(**{**state, **copied})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned; the limits of this run do not change."""
        saved = RunState.of(state)
        for name in _RESTORED:
            setattr(self, name, getattr(saved, name))


_RESTORED = (
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
