"""The command `trainer-lib train`: train a model of a common task on a data file, without a script."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_lib.commands.train.train_help import help_text

if TYPE_CHECKING:
    from trainer_lib import Trainer
    from trainer_lib.commands.train.data_table import Table
    from trainer_lib.commands.train.prepared_task import PreparedTask
    from trainer_lib.commands.train.train_arguments import TrainArguments

FACTS_FILE = "task.json"

# The module and the function that prepare each task.
_TASKS = {
    "text-classification": ("text_tasks", "text_classification"),
    "token-classification": ("text_tasks", "token_classification"),
    "causal-lm": ("text_tasks", "causal_lm"),
    "seq2seq": ("text_tasks", "seq2seq"),
    "image-classification": ("image_tasks", "image_classification"),
    "regression": ("table_tasks", "regression"),
    "tabular": ("table_tasks", "tabular"),
}


def run(arguments: Sequence[str]) -> int:
    """Train, and save the model; with `--dry-run` check what would be trained. Return the exit code."""
    words = list(arguments)
    if not words or words[0] in ("-h", "--help"):
        print(help_text(words[1] if len(words) > 1 else ""), file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    parsed = read_arguments(words)
    trainer, task, banner = make_trainer(parsed)
    is_main = trainer.accelerator.is_main_process
    if is_main:
        print(banner, file=sys.stderr, flush=True)
    if parsed.dry_run:
        report = trainer.check()
        if is_main:
            print(report)
        return 0 if report.passed else 1
    result = trainer.fit()
    folder = _save(trainer, parsed, task)
    if is_main:
        print(result)
        print(f"The model is in {folder}." if folder else "Nothing is saved: output_dir is null.")
    trainer.accelerator.end_training()
    return 0


def read_arguments(words: Sequence[str]) -> "TrainArguments":
    """Return the arguments of a command line; options override the files of `--config`.

    Raises:
        ConfigurationError: For an argument that is unknown, missing or wrong.
    """
    from trainer_lib.commands.train.train_arguments import TrainArguments
    from trainer_lib.trainer.arguments.command_line import read

    return read(TrainArguments, _with_values(words), {})


def make_trainer(arguments: "TrainArguments") -> "tuple[Trainer, PreparedTask, str]":
    """Return the trainer of a task, what it was prepared from, and a banner that says what is trained.

    Args:
        arguments: The arguments; the trainer gets those for training.
    """
    import importlib

    from trainer_lib import Trainer
    from trainer_lib.commands.train.data_files import read_data
    from trainer_lib.seeding import set_seed

    assert arguments.data is not None
    assert arguments.task is not None
    data, evaluation = read_data(arguments.data, split=arguments.data_split)
    if arguments.eval_data is not None:
        evaluation, _ = read_data(arguments.eval_data, "eval_data")
    elif arguments.validation_split is not None:
        evaluation = None
    if arguments.seed is not None:
        set_seed(arguments.seed)  # new weights are the same each time, also on each rank
    module, function = _TASKS[arguments.task]
    prepare: Any = getattr(importlib.import_module(f"trainer_lib.commands.train.{module}"), function)
    task: PreparedTask = prepare(arguments, data, evaluation)
    evaluates = task.evaluation is not None or arguments.validation_split is not None
    trainer = Trainer(
        task.model,
        arguments.training_arguments(dry_run=False),
        train_dataset=task.train,
        eval_dataset=task.evaluation,
        processing_class=task.processor,
        loss_fn=task.loss_fn,
        metrics=task.metrics if evaluates else None,
        compute_metrics=task.compute_metrics if evaluates else None,
    )
    return trainer, task, _banner(arguments, task, data, evaluation)


def _banner(arguments: "TrainArguments", task: "PreparedTask", data: "Table", evaluation: "Table | None") -> str:
    held_out = "none"
    if evaluation is not None:
        held_out = f"{evaluation.source}, {evaluation.rows:,} rows"
    elif arguments.validation_split is not None:
        held_out = f"{arguments.validation_split:g} of the training data"
    from trainer_lib.commands.train.task_models import is_factory, is_table_network

    name = str(arguments.model)
    weights = "new weights" if arguments.from_config or is_table_network(name) else "with its weights"
    model = name if is_factory(name) else f"{name}, {weights}"
    return "\n".join([
        f"trainer-lib train: {arguments.task}",
        f"  data        {data.source}, {data.rows:,} rows: {task.columns}",
        f"  evaluation  {held_out}",
        f"  model       {type(task.model).__name__} ({model})",
    ])  # fmt: skip


def _save(trainer: "Trainer", arguments: "TrainArguments", task: "PreparedTask") -> Path | None:
    """Save the model with what is needed to use it, and return its folder; `None` without an output folder."""
    run_folder = trainer.parts.run_folder
    if run_folder is None:
        return None
    trainer.save_model()
    folder = run_folder / "model"
    if trainer.accelerator.is_main_process:
        facts = {"task": arguments.task, "arguments": arguments.own_arguments(), **task.facts}
        (folder / FACTS_FILE).write_text(json.dumps(facts, indent=2, default=str))
    trainer.accelerator.wait_for_everyone()
    return Path(str(folder))


def _with_values(words: Sequence[str]) -> list[str]:
    """Return the words with `--resume` alone as `--resume=auto`."""
    ends = [*words[1:], "--"]
    return [
        "--resume=auto" if word == "--resume" and end.startswith("--") else word
        for word, end in zip(words, ends, strict=True)
    ]
