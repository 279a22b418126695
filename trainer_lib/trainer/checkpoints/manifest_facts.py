"""The facts about a run in each checkpoint's manifest, which you can read without any other file."""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from trainer_lib.events import Run
from trainer_lib.trainer.trainer_interface import TrainerInterface


def manifest_facts(trainer: TrainerInterface, run: Run, reasons: Collection[str]) -> dict[str, Any]:
    """Return the facts, as `register_state_facts` takes them.

    Args:
        trainer: The trainer, whose running means were just reduced, as a part of the state.
        run: Its run.
        reasons: Why the checkpoint is saved.
    """
    state = run.state
    at_step = [checkpoint for checkpoint in state.checkpoints if checkpoint["step"] == state.step]
    return {
        "run_id": state.run_id or None,
        "step": state.step,
        "epoch": state.epochs,
        "samples": state.samples,
        "items": None if trainer.parts.loss.has_own_step else state.items + trainer.parts.means.items,
        "arguments": run.args.to_dict(unwritable="leave out"),
        "reasons": sorted(reasons) or ["asked"],
        "metrics": numeric_metrics(at_step[-1]["metrics"]) if at_step else {},
        "best": None if state.best is None else asdict(state.best),
    }


def numeric_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are numbers: a manifest holds no others."""
    return {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
