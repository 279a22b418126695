"""This file is what a checkpoint tells of its run, in its manifest: to be read without anything else."""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trainer_lib.events import Run

if TYPE_CHECKING:
    from trainer_lib.trainer.trainer import Trainer


def manifest_facts(trainer: "Trainer", run: Run, reasons: Collection[str]) -> dict[str, Any]:
    """Return the facts, as `register_state_facts` takes them.

    Args:
        trainer: The trainer, whose averages were just put together, as a part of the state.
        run: Its run.
        reasons: Why the checkpoint is saved.
    """
    state = run.state
    here = [one for one in state.checkpoints if one["step"] == state.step]
    return {
        "run_id": state.run_id or None,
        "step": state.step,
        "epoch": state.epochs,
        "samples": state.samples,
        "items": None if trainer.has_own_step else state.items + trainer.averages.items,
        "arguments": run.args.to_dict(unwritable="leave out"),
        "reasons": sorted(reasons) or ["asked"],
        "metrics": numeric_metrics(here[-1]["metrics"]) if here else {},
        "best": None if state.best is None else asdict(state.best),
    }


def numeric_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return those metrics that are numbers; of others a manifest is no place."""
    return {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
