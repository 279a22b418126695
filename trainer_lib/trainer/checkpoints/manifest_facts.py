"""The facts about a run in each checkpoint's manifest, which you can read without any other file."""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from trainer_lib.trainer.fit.context import FitContext


def manifest_facts(context: FitContext, reasons: Collection[str]) -> dict[str, Any]:
    """Return the facts, as `register_state_facts` takes them.

    Args:
        context: The fit, whose running means were just reduced, as a part of the state.
        reasons: Why the checkpoint is saved.
    """
    run, state = context.run, context.run.state
    at_step = [checkpoint for checkpoint in state.checkpoints if checkpoint["step"] == state.step]
    return {
        "run_id": state.run_id or None,
        "step": state.step,
        "epoch": state.epochs,
        "samples": state.samples,
        "items": None if context.has_own_step else state.items + context.means.items,
        "arguments": run.args.to_dict(unwritable="leave out"),
        "reasons": sorted(reasons) or ["asked"],
        "metrics": numeric_metrics(at_step[-1]["metrics"]) if at_step else {},
        "best": None if state.best is None else asdict(state.best),
    }


def numeric_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are numbers: a manifest holds no others."""
    return {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
