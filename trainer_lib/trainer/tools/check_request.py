"""What `fit` does in a script that `trainer-lib check`, `evaluate` or `plan` started: answer instead of training."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Generator
from typing import Any

from trainer_lib.foundation import environment
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments
from trainer_lib.trainer.trainer_interface import TrainerInterface

# What an engine of one process without devices is made from, while a script is planned for a world that is not there.
_LONE: dict[str, Any] = {
    "use_cpu": True, "parallelism": None, "fsdp": None, "ddp": None, "fp8": None, "mixed_precision": "no",
    "compile": False,
}  # fmt: skip
_handlers: list[Callable[[TrainerInterface], None]] = []


@contextlib.contextmanager
def fits_handed_to(handler: Callable[[TrainerInterface], None]) -> Generator[None]:
    """Return the context in which `fit` hands its trainer to a function, and ends the script."""
    _handlers.append(handler)
    try:
        yield
    finally:
        _handlers.remove(handler)


def engine_arguments(args: TrainingArguments) -> TrainingArguments:
    """Return the arguments that a trainer's engine is made from: those of one process, while a script is planned."""
    return dataclasses.replace(args, **_LONE) if _handlers and args.deepspeed is None else args


def answer(trainer: TrainerInterface) -> None:
    """Do with the trainer what the command asked for that started this script, if one did, and end the script.

    Raises:
        SystemExit: After that.
    """
    if _handlers:
        _handlers[-1](trainer)
        raise SystemExit(0)
    file, evaluated = environment.check_report_file(), environment.evaluated_run()
    if (file is None and evaluated is None) or trainer.parts.in_sandbox:
        return
    if file is not None:
        from trainer_lib.trainer.tools.run_check import check

        report = check(trainer)
        if trainer.accelerator.is_main_process:
            file.write_text(json.dumps({**report.to_dict(), "text": str(report)}))
    elif evaluated is not None:
        from trainer_lib.trainer.tools.evaluate_run import evaluate_run

        if trainer.accelerator.is_local_main_process:
            environment.tell_of_evaluation()
        evaluate_run(trainer, *evaluated)
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    raise SystemExit(0)
