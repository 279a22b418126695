"""Run folders written by hand."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BEGUN = 1_700_000_000.0


def line(event: str, step: int, **values: Any) -> dict[str, Any]:
    """Return a line as `JsonlLog` writes it: 8 samples and half a second a step, 50 steps an epoch."""
    place = {"step": step, "epoch": step / 50, "samples": 8 * step, "seconds": step / 2, "time": BEGUN + step}
    return {"event": event, **place, **values}


def training(steps: int = 100, rate: float = 0.1) -> list[dict[str, Any]]:
    """Return the lines of a run that was killed at step 60, went on from 50, and came to its end."""
    lines = [line("started", 0, processes=2, precision="bf16", device="cpu", torch="2.13", max_steps=steps)]
    for step in range(1, steps + 1):
        values = {"loss": math.exp(-step / 30), "learning_rate": rate * (1 - step / steps), "grad_norm": 1.0 / step}
        lines.append(line("log", step, **values, data_wait=0.25, host_memory=2**30, samples_per_second=16.0))
        if step % 25 == 0:
            lines.append(line("evaluation", step, eval_loss=step / 100, eval_accuracy=1 - abs(step - 50) / 100))
    lines.insert(30, line("best", 25, metric="eval_accuracy", value=0.75))
    lines.append(line("best", 50, metric="eval_accuracy", value=1.0))
    lines.append(line("save", 50, path="/nowhere/checkpoint-00000050", why=["best", "interval"], took=0.25))
    lines.append(line("died", 60))
    lines.append(line("resumed", 50, processes=1, precision="no", device="cpu", steps_lost=10))
    lines.append(line("ended", steps, status="finished", reason=None))
    return lines


def make_run(folder: Path, lines: list[dict[str, Any]] | None = None, facts: Mapping[str, Any] | None = None) -> Path:
    """Write a run into a folder, and return it."""
    folder.mkdir(parents=True)
    entries = training() if lines is None else lines
    (folder / "history.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    default = {
        "run_id": folder.name,
        "created": BEGUN,
        "status": "finished",
        "state": {"reason": None, "best": None},
        "arguments": {"learning_rate": 0.1, "max_steps": 100, "fsdp": {"offload": True}},
        "environment": {"host": "here", "memory": 2**34},
    }
    (folder / "run.json").write_text(json.dumps(default if facts is None else facts))
    return folder
