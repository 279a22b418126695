"""The scenarios: which loop, on which task, and this library's target."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from benchmarks import shapes
from benchmarks.task import Task


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One comparison.

    Args:
        name: What `--only` calls it.
        title: What the table calls it.
        loop: The contestants' method.
        settings: The fields of the `Task`.
        target: What `trainer_lib` is meant to reach, as the table shows it.
        tolerance: How far apart, relatively, what the contestants come to may be.
        steps: The batches of a run, if they are not for the command line to say.
        fresh: Each run has a process of its own, and is timed from `import torch` to the end.
        is_variant: It varies another scenario, and is left out of the main table.
    """

    name: str
    title: str
    loop: Literal["update", "update_by_weight", "read", "fit", "fit_by_default", "evaluate"]
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    target: str = ""
    tolerance: float = 1e-4
    steps: int | None = None
    fresh: bool = False
    is_variant: bool = False

    def on(self, device: str) -> "Scenario":
        """Return this scenario on another device, where sums are rounded in another order."""
        if device == "cpu":
            return self
        return replace(self, settings={**self.settings, "device": device}, tolerance=max(self.tolerance, 1e-3))

    def task(self, steps: int) -> Task:
        """Return the task with so many batches a process."""
        return Task(steps=steps, **self.settings)

    @property
    def world_size(self) -> int:
        """How many processes it takes."""
        return self.settings.get("world_size", 1)


SCENARIOS = [
    Scenario(
        name="step",
        title="An update for each batch",
        loop="update",
        target="CPU ≤ 1.08, calls ≤ 620",
    ),
    Scenario(
        name="accumulation",
        title="An update for each 4 batches",
        loop="update",
        settings={"accumulation": 4},
        target="CPU ≤ 1.08, calls ≤ 620",
    ),
    Scenario(
        name="reading",
        title="Reading the data, in order",
        loop="read",
        target="CPU ≤ 1.05",
    ),
    Scenario(
        name="shuffled",
        is_variant=True,
        title="Reading the data, shuffled",
        loop="read",
        settings={"shuffle": True},
        target="CPU ≤ 1.05",
    ),
    Scenario(
        name="ddp",
        title="Two processes (DDP)",
        loop="update",
        settings={"world_size": 2},
    ),
    Scenario(
        name="weighted",
        is_variant=True,
        title="Two processes (DDP), losses weighted by their labels",
        loop="update_by_weight",
        settings={"world_size": 2, "some_ignored": True},
    ),
    Scenario(
        name="fsdp",
        title="Two processes (FSDP2), four blocks",
        loop="update",
        settings={"world_size": 2, "blocks": 4},
        target="time ≤ 1.05",
        steps=20,
    ),
    Scenario(
        name="fit",
        title="Trainers",
        loop="fit",
        target="CPU ≤ 1.10, calls ≤ 700",
    ),
    Scenario(
        name="fit-callable",
        is_variant=True,
        title="Trainers, a method of the user as the loss",
        loop="fit",
        settings={"shape": shapes.CALLABLE},
        target="CPU ≤ 1.05, calls ≤ 490",
    ),
    Scenario(
        name="fit-dict",
        is_variant=True,
        title="Trainers, dicts as batches",
        loop="fit",
        settings={"shape": shapes.DICTS},
        target="CPU ≤ 1.05",
    ),
    Scenario(
        name="fit-model-loss",
        is_variant=True,
        title="Trainers, a model that returns its loss",
        loop="fit",
        settings={"shape": shapes.MODEL_LOSS},
        target="CPU ≤ 1.05",
    ),
    Scenario(
        name="fit-llama",
        title="Trainers, a Llama with `num_items_in_batch`",
        loop="fit",
        settings={"shape": shapes.LANGUAGE_MODEL},
        target="CPU ≤ 1.05",
        steps=40,
    ),
    Scenario(
        name="fit-folder",
        title="Trainers, with history, checkpoints and a report",
        loop="fit",
        settings={"folder": True},
        target="CPU ≤ 1.05",
    ),
    Scenario(
        name="fit-bar",
        title="Trainers, with a progress bar",
        loop="fit",
        settings={"bar": True},
        target="CPU ≤ 1.12",
    ),
    Scenario(
        name="fit-default",
        title="The Trainer's own defaults (a fused optimizer)",
        loop="fit_by_default",
        target="CPU ≤ 0.95",
        tolerance=1e-3,
    ),
    Scenario(
        name="fit-accumulation",
        is_variant=True,
        title="Trainers, an update for each 4 batches",
        loop="fit",
        settings={"accumulation": 4},
        target="CPU ≤ 1.10",
    ),
    Scenario(
        name="fit-callable-accumulation",
        is_variant=True,
        title="Trainers, a method of the user as the loss, an update for each 4 batches",
        loop="fit",
        settings={"accumulation": 4, "shape": shapes.CALLABLE},
        target="CPU ≤ 1.08",
    ),
    Scenario(
        name="fit-ddp",
        title="Trainers on two processes (DDP)",
        loop="fit",
        settings={"world_size": 2},
        target="CPU ≤ 1.10",
    ),
    Scenario(
        name="fit-callable-ddp",
        is_variant=True,
        title="Trainers on two processes (DDP), a method of the user as the loss",
        loop="fit",
        settings={"world_size": 2, "shape": shapes.CALLABLE},
        target="CPU ≤ 1.08",
    ),
    Scenario(
        name="fit-transformer",
        title="Trainers with a small transformer",
        loop="fit",
        settings={"layers": 2},
        steps=24,
    ),
    Scenario(
        name="evaluation",
        title="Evaluating 20,032 × 100 scores on two processes, for each batch",
        loop="evaluate",
        settings={"world_size": 2},
        target="time ≤ 2.0",
        steps=313,
    ),
    Scenario(
        name="evaluation-alone",
        is_variant=True,
        title="Evaluating 20,032 × 100 scores, for each batch",
        loop="evaluate",
        steps=626,
    ),
    Scenario(
        name="first-step",
        is_variant=True,
        title="From `import torch` to the end of the first step",
        loop="fit",
        target="0.12 s more",
        steps=1,
        fresh=True,
    ),
    Scenario(
        name="first-step-folder",
        title="From `import torch` to the end of the first step, with a run folder",
        loop="fit",
        settings={"folder": True},
        target="0.12 s more",
        steps=1,
        fresh=True,
    ),
    Scenario(
        name="first-step-llama",
        is_variant=True,
        title="From `import torch` to the end of the first step of a Llama",
        loop="fit",
        settings={"shape": shapes.LANGUAGE_MODEL},
        target="0.12 s more",
        steps=1,
        fresh=True,
    ),
    Scenario(
        name="memory",
        is_variant=True,
        title="From `import torch` to the end of 4 steps of a transformer (width 256, 4 layers)",
        loop="fit",
        settings={"layers": 4, "width": 256},
        steps=4,
        fresh=True,
    ),
]
