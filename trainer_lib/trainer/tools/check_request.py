"""What `fit` does in a script that `trainer-lib check` started: check instead of training, and end the script."""

import json

from trainer_lib.foundation import environment
from trainer_lib.trainer.trainer_interface import TrainerInterface


def answer(trainer: TrainerInterface) -> None:
    """Check the trainer, if a check was asked for, write the report, and end the script.

    Raises:
        SystemExit: After the check; what it found is in the report.
    """
    file = environment.check_report_file()
    if file is None or trainer.parts.in_sandbox:
        return
    from trainer_lib.trainer.tools.run_check import check

    report = check(trainer)
    if trainer.accelerator.is_main_process:
        file.write_text(json.dumps({**report.to_dict(), "text": str(report)}))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    raise SystemExit(0)
