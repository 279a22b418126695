"""This file is what `fit` returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer_lib.events import RunState
from trainer_lib.foundation.remote import AnyPath, path_at


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What became of a run.

    Attributes:
        state: What the run did, in numbers.
        metrics: Those of the last evaluation, and the last loss of training.
        throughput: Samples and steps a second, over the whole run.
        best_checkpoint: The folder of the best evaluation, if it was saved.
        last_checkpoint: The folder saved last.
    """

    state: RunState
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    throughput: dict[str, float] = field(default_factory=dict[str, float])
    best_checkpoint: AnyPath | None = None
    last_checkpoint: AnyPath | None = None

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "FitResult":
        """Return the result of a run from what its file says of it."""
        state = RunState.of(facts["state"])
        losses = [entry["loss"] for entry in state.history if "loss" in entry]
        best = state.best
        at_best = [one["path"] for one in state.checkpoints if best is not None and one["step"] == best.step]
        seconds = max(state.seconds, 1e-9)
        return cls(
            state=state,
            metrics={**({"loss": losses[-1]} if losses else {}), **facts["metrics"]},
            throughput={"samples_per_second": state.samples / seconds, "steps_per_second": state.step / seconds},
            best_checkpoint=path_at(at_best[-1]) if at_best else None,
            last_checkpoint=path_at(state.checkpoints[-1]["path"]) if state.checkpoints else None,
        )

    @property
    def history(self) -> list[dict[str, Any]]:
        """What was logged, each entry with its step and epoch."""
        return self.state.history

    @property
    def status(self) -> str:
        """How it ended: "finished", "stopped" or "interrupted"."""
        return self.state.status

    def __str__(self) -> str:
        """Return it as a small table."""
        state = self.state
        rows: list[tuple[str, str]] = [
            (
                "run",
                ", ".join(filter(None, (state.run_id, state.status))) + (f" ({state.reason})" if state.reason else ""),
            ),
            ("steps", f"{state.step} in {state.epochs:.4g} epochs, {state.seconds:.1f} s"),
            *((name, f"{value:.6g}") for name, value in {**self.metrics, **self.throughput}.items()),
        ]
        if state.best is not None:
            rows.append(("best", f"{state.best.metric} {state.best.value:.6g} at step {state.best.step}"))
        for name, folder in (("best checkpoint", self.best_checkpoint), ("last checkpoint", self.last_checkpoint)):
            if folder is not None:
                rows.append((name, str(folder)))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
