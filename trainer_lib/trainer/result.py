"""The result of `fit`."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainer_lib.events import RunState
from trainer_lib.filesystem.remote_paths import AnyPath, path_at
from trainer_lib.foundation.errors import ConfigurationError, UnknownMemberError, did_you_mean, unknown
from trainer_lib.foundation.imports import require
from trainer_lib.runs.report.sparkline import shows_sparklines, sparkline

# Attributes of the results of other trainers, and what to use here.
_MEMBERS = {
    "training_loss": 'metrics["loss"], the last training loss, or the values of "loss" in history',
    "loss": 'metrics["loss"]',
    "global_step": "state.step",
    "step": "state.step",
    "epoch": "state.epoch",
    "log_history": "history",
    "best_metric": "state.best.value",
    "best_model_checkpoint": "best_checkpoint",
    "best_model_path": "best_checkpoint",
}


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class FitResult:
    """The result of a run.

    Attributes:
        state: The state of the run: steps, epochs, history, checkpoints.
        metrics: The metrics of the last evaluation, and the last training loss.
        throughput: Samples and steps per second, over the whole run.
        best_checkpoint: The checkpoint of the best evaluation, if it was saved.
        last_checkpoint: The last checkpoint.
        report: The HTML report of the run, if it has a folder.

    Example:
        >>> state = RunState(step=2, history=[{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}])
        >>> FitResult(state=state).to_pandas()["loss"].tolist()
        [0.5, 0.25]
    """

    state: RunState
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    throughput: dict[str, float] = field(default_factory=dict[str, float])
    best_checkpoint: AnyPath | None = None
    last_checkpoint: AnyPath | None = None
    report: AnyPath | None = None

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "FitResult":
        """Return the result of a run from the facts in its run.json."""
        state = RunState.of(facts["state"])
        losses = [entry["loss"] for entry in state.history if "loss" in entry]
        best = state.best
        at_best = [
            checkpoint["path"]
            for checkpoint in state.checkpoints
            if best is not None and checkpoint["step"] == best.step
        ]
        seconds = max(state.seconds, 1e-9)
        return cls(
            state=state,
            metrics={**({"loss": losses[-1]} if losses else {}), **facts["metrics"]},
            throughput={"samples_per_second": state.samples / seconds, "steps_per_second": state.step / seconds},
            best_checkpoint=path_at(at_best[-1]) if at_best else None,
            last_checkpoint=path_at(state.checkpoints[-1]["path"]) if state.checkpoints else None,
            report=path_at(facts["report"]) if facts.get("report") else None,
        )

    if not TYPE_CHECKING:  # type checkers would accept every misspelled name

        def __getattr__(self, name: str) -> Any:
            """Raise an error that names the equivalent of another trainer's result."""
            hint = f" Use {_MEMBERS[name]}." if name in _MEMBERS else did_you_mean(name, dir(self))
            raise UnknownMemberError(f"FitResult has no attribute {name!r}.{hint}")

    @property
    def history(self) -> list[dict[str, Any]]:
        """The logged values, each entry with its step and epoch."""
        return self.state.history

    @property
    def status(self) -> str:
        """How it ended: "finished", "stopped" or "interrupted"."""
        return self.state.status

    def to_pandas(self) -> Any:
        """Return the history as a data frame, with a row for each step with a log or an evaluation."""
        pandas = require("pandas", "plot")
        rows: dict[int, dict[str, Any]] = {}
        for entry in self.history:
            rows.setdefault(entry["step"], {}).update(entry)
        names = dict.fromkeys(("step", "epoch", *(name for row in rows.values() for name in row)))
        return pandas.DataFrame(list(rows.values()), columns=list(names)).set_index("step")

    def plot(self, *names: str, axes: Any = None) -> Any:
        """Plot curves over the steps, and return matplotlib's axes.

        Args:
            *names: The curves, such as "loss" and "eval_accuracy"; by default all losses.
            axes: The axes to draw on; by default those of a new figure.

        Raises:
            ConfigurationError: If nothing was logged under a name.
        """
        known = {name for entry in self.history for name in entry} - {"step", "epoch"}
        for name in names:
            if name not in known:
                raise ConfigurationError(unknown("curve", name, known))
        require("matplotlib", "plot")
        from matplotlib import pyplot

        axes = pyplot.subplots()[1] if axes is None else axes
        for name in names or sorted(name for name in known if name == "loss" or name.endswith("_loss")):
            points = [(entry["step"], entry[name]) for entry in self.history if name in entry]
            axes.plot(*zip(*points, strict=True), label=name, marker="o" if name.startswith("eval_") else None)
        axes.set_xlabel("step")
        if axes.lines:
            axes.legend()
        return axes

    def __repr__(self) -> str:
        """Return one line: the run, its status, steps and metrics."""
        facts = [f"run={self.state.run_id!r}"] if self.state.run_id else []
        facts += [f"status={self.status!r}", f"step={self.state.step}"]
        facts += [f"{name}={value:.6g}" for name, value in self.metrics.items()]
        return f"FitResult({', '.join(facts)})"

    def __str__(self) -> str:
        """Return the result as a small table."""
        rows = self._rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _repr_html_(self) -> str:
        """Return the result as an HTML table for notebooks."""
        import html

        left = 'style="text-align: left"'
        cells = "".join(
            f"<tr><th {left}>{html.escape(name)}</th><td {left}>{html.escape(value)}</td></tr>"
            for name, value in self._rows()
        )
        return f"<table>{cells}</table>"

    def _rows(self) -> list[tuple[str, str]]:
        """Return the names and values of the table."""
        state = self.state
        rows: list[tuple[str, str]] = [
            (
                "run",
                ", ".join(filter(None, (state.run_id, state.status))) + (f" ({state.reason})" if state.reason else ""),
            ),
            (
                "steps",
                f"{state.step} in {state.epochs:.4g} epoch{'' if state.epochs == 1 else 's'}, {state.seconds:.1f} s",
            ),
            *((name, self._number(name, value)) for name, value in {**self.metrics, **self.throughput}.items()),
        ]
        if state.best is not None:
            rows.append(("best", f"{state.best.metric} {state.best.value:.6g} at step {state.best.step}"))
        for name, path in (
            ("best checkpoint", self.best_checkpoint),
            ("last checkpoint", self.last_checkpoint),
            ("report", self.report),
        ):
            if path is not None:
                rows.append((name, str(path)))
        return rows

    def _number(self, name: str, value: float) -> str:
        """Return a number, with a sparkline of its history if the terminal can show it."""
        values = [entry[name] for entry in self.history if name in entry]
        curve = f"  {sparkline(values)}" if len(values) > 1 and shows_sparklines(sys.stdout) else ""
        return f"{value:.6g}{curve}"
