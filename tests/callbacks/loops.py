"""A loop without a trainer that fires the events of callbacks in order."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainer_lib.events import Callback, Dispatcher, Run, RunState

Metrics = dict[str, float]


def running(**state: Any) -> Run:
    """Return a run that is under way."""
    return Run(state=RunState(status="running", **state))


def folder_of(output_dir: Path) -> Path:
    """Return the folder of the only run in an `output_dir`."""
    (folder,) = [file.parent for file in output_dir.glob("*/run.json")]
    return folder


def go_through(
    callbacks: Sequence[Callback],
    steps: int,
    run: Run | None = None,
    *,
    log_every: int | None = None,
    loss: Callable[[int], float] = lambda step: 1 / step,
    evaluations: dict[int, Metrics] | None = None,
    at_step: Callable[[Run], Any] | None = None,
) -> Run:
    """Make updates up to step `steps`, with logs and evaluations, and return the run."""
    run, events = run or running(), Dispatcher(callbacks)
    state, result = run.state, evaluations or {}
    events.fire("on_fit_begin", run)
    while state.step < steps:
        events.fire("on_step_begin", run)
        events.fire("on_micro_batch_end", run)
        if at_step is not None:
            at_step(run)
        state.step += 1
        state.steps_in_epoch += 1
        state.samples += 4
        events.fire("on_step_end", run)
        if state.steps_per_epoch == state.steps_in_epoch:
            state.epoch, state.steps_in_epoch = state.epoch + 1, 0
            events.fire("on_epoch_end", run)
        if log_every and state.step % log_every == 0:
            values = {"loss": loss(state.step)}
            events.fire("on_log", run, values)
            state.history.append({"step": state.step, "epoch": state.epochs, **values})
        if state.step in result:
            evaluate(events, run, result[state.step])
    state.status = "finished"
    events.fire("on_fit_end", run)
    return run


def evaluate(events: Dispatcher, run: Run, metrics: Metrics, batches: int = 3) -> None:
    """Evaluate a set of so many batches."""
    events.fire("on_evaluate_begin", run)
    events.fire("on_evaluate_set_begin", run, "", batches)
    for _ in range(batches):
        events.fire("on_evaluate_batch_end", run)
    events.fire("on_evaluate_set_end", run, "", metrics)
    events.fire("on_evaluate_end", run, metrics)
    run.state.history.append({"step": run.state.step, "epoch": run.state.epochs, **metrics})
