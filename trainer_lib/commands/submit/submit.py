"""The command `trainer-lib submit`: write a job for a scheduler from a launch, and submit it."""

import importlib
import sys
from collections.abc import Sequence

from trainer_lib.foundation.errors import ConfigurationError, unknown

# The module of each scheduler, whose `run(arguments)` writes and submits the job.
SCHEDULERS = {
    "slurm": ("trainer_lib.commands.submit.slurm", "an sbatch file: nodes, time limit, requeue, sweeps"),
    "kubeflow": ("trainer_lib.commands.submit.kubeflow", "a TrainJob for Kubernetes: image, nodes, GPUs, volume"),
}


def run(arguments: Sequence[str]) -> int:
    """Submit a job, and return the exit code of the submission."""
    name = arguments[0] if arguments else ""
    if name in ("", "-h", "--help"):
        lines = [f"  {scheduler:12}{what}" for scheduler, (_, what) in SCHEDULERS.items()]
        usage = ["usage: trainer-lib submit SCHEDULER [options] [options of launch] SCRIPT [options of the script]", ""]
        print("\n".join([*usage, *lines, "", "`trainer-lib submit SCHEDULER --help` lists its options."]))
        return 0 if name else 2
    if name not in SCHEDULERS:
        raise ConfigurationError(unknown("scheduler", name, SCHEDULERS))
    return importlib.import_module(SCHEDULERS[name][0]).run(arguments[1:])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
