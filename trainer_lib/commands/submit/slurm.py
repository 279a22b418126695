"""The command `trainer-lib submit slurm`: write an sbatch file for a launch, and submit it."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer_lib.commands.submit.job_launch import JobLaunch, describe, read_launch
from trainer_lib.commands.submit.sweep import TASK, check_places, grid
from trainer_lib.foundation.errors import ConfigurationError, TrainerLibError
from trainer_lib.launchers.settings.setting import COUNT, COUNT_OR_ZERO, FILLED, SWITCH, Kind, Setting


def _option(name: str, kind: Kind, text: str, default: object = None) -> Setting:
    return Setting(name=name, group="slurm", kind=kind, help=text, default=default, key=None)


OPTIONS = {
    setting.name: setting
    for setting in (
        _option("job_name", FILLED, "the name of the job (default: the script's)"),
        _option("time", FILLED, "the time limit, as in 04:00:00 or 1-12:00:00; the trainer saves before it"),
        _option("partition", FILLED, "the partition"),
        _option("account", FILLED, "the account"),
        _option("qos", FILLED, "the quality of service"),
        _option("gpus_per_node", FILLED, "GPUs of each node, as in 8 or a100:4"),
        _option("cpus_per_task", COUNT, "cores of each node"),
        _option("mem", FILLED, "memory of each node, as in 64G"),
        _option("sbatch", FILLED, "more options of sbatch, as in 'exclusive mail-type=END'"),
        _option("setup", FILLED, "a command before the launch, as in 'module load cuda'"),
        _option("sweep", FILLED, "an array with a task for each combination, as in 'lr=0.1,0.01 batch_size=8,16'"),
        _option("max_tasks", COUNT, "how many tasks of the sweep run at a time"),
        _option("save_seconds", COUNT_OR_ZERO, "from SIGUSR1, at which the trainer saves, to the time limit", 120),
        _option("no_requeue", SWITCH, "end for good at a time limit or a preemption", False),
        _option("job_folder", FILLED, "the folder of the job file and the logs", "slurm_jobs"),
    )
}
_DIRECTIVES = ("time", "partition", "account", "qos", "gpus_per_node", "cpus_per_task", "mem")

_HELP = """\
usage: trainer-lib submit slurm [options] [options of launch] SCRIPT [options of the script]

Write a job file for sbatch and submit it: one task on each of --num_machines nodes runs `trainer-lib launch` with the
given options. A job that is preempted or reaches its time limit saves, is requeued, and resumes with resume="auto".

{options}
  --dry_run                                       print the file, write and submit nothing

`trainer-lib launch --help` lists the options of a launch.\
"""
_END_TIME = """\
# When the job ends, for the trainer's deadline; SLURM sets it from 23.02 on.
if [ -z "${SLURM_JOB_END_TIME:-}" ]; then
    SLURM_JOB_END_TIME=$(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %e)" +%s 2>/dev/null) && export SLURM_JOB_END_TIME
fi"""
_ADDRESS = """\
address=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR=${MASTER_ADDR:-$address} MASTER_PORT=${MASTER_PORT:-$((15000 + SLURM_JOB_ID % 17000))}"""
_REQUEUE = """\
code=$?
# 75: the trainer's deadline; 138 and 143: SIGUSR1 and SIGTERM. The run is saved, and resumes.
case $code in 75 | 138 | 143) scontrol requeue "$SLURM_JOB_ID" ;; esac
exit $code"""


def run(arguments: Sequence[str]) -> int:
    """Write the job file and submit it; return 0."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(_HELP.format(options=describe(OPTIONS)))
        return 0
    launch = read_launch(arguments, OPTIONS)
    text = job_file(launch)
    if launch.is_dry:
        print(text, end="")
        return 0
    folder = _folder(launch)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{launch.name}.sbatch"
    file.write_text(text)
    job = _submit(file)
    print(f"Submitted job {job}: {file}; output in {folder / _log(launch).replace('%x', launch.name)}")
    return 0


def job_file(launch: JobLaunch) -> str:
    """Return the text of the job file of a launch."""
    settings = launch.settings
    tasks = grid(settings["sweep"] or "")
    check_places(tasks, launch.script)
    parts = [
        "#!/bin/bash\n" + "\n".join(f"#SBATCH --{line}" for line in map(_directive, _directives(launch, len(tasks)))),
        *([settings["setup"]] if settings["setup"] else []),
        _END_TIME,
        *([_ADDRESS] if launch.machines > 1 else []),
        *([_task_arguments(tasks)] if tasks else []),
        _command(launch, is_sweep=bool(tasks)) + ("" if settings["no_requeue"] else f"\n{_REQUEUE}"),
    ]
    return "\n\n".join(parts) + "\n"


def _directives(launch: JobLaunch, tasks: int) -> list[str]:
    settings = launch.settings
    at_once = f"%{settings['max_tasks']}" if settings["max_tasks"] else ""
    return [
        f"job-name={launch.name}",
        f"nodes={launch.machines}",
        "ntasks-per-node=1",
        f"output={_folder(launch) / _log(launch)}",
        "open-mode=append",
        "no-requeue" if settings["no_requeue"] else "requeue",
        *([f"signal=USR1@{settings['save_seconds']}"] if settings["save_seconds"] else []),
        *([f"array=0-{tasks - 1}{at_once}"] if tasks else []),
        *(f"{name.replace('_', '-')}={settings[name]}" for name in _DIRECTIVES if settings[name] is not None),
        *(word.lstrip("-") for word in shlex.split(settings["sbatch"] or "")),
    ]


def _directive(line: str) -> str:
    """Return an option of sbatch; a value with a space or a "#" is quoted as sbatch reads it."""
    name, equals, value = line.partition("=")
    if re.fullmatch(r"[\w@%+=:,./-]*", value):
        return line
    return name + equals + '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def _folder(launch: JobLaunch) -> Path:
    return Path(launch.settings["job_folder"]).absolute()


def _log(launch: JobLaunch) -> str:
    return "%x-%A_%a.log" if launch.settings["sweep"] else "%x-%j.log"


def _task_arguments(tasks: Sequence[Sequence[str]]) -> str:
    lines = [f"    {number}) task=({shlex.join(words)}) ;;" for number, words in enumerate(tasks)]
    return "\n".join(["case $SLURM_ARRAY_TASK_ID in", *lines, "esac"])


def _command(launch: JobLaunch, is_sweep: bool) -> str:
    words = [_quoted(word) for word in launch.script] + (['"${task[@]}"'] if is_sweep else [])
    start = shlex.join([sys.executable, "-m", "trainer_lib", "launch", *launch.options])
    if launch.machines == 1:
        return f"srun {start} {' '.join(words)}"
    places = (
        f"--num_machines {launch.machines} --machine_rank $SLURM_NODEID "
        "--main_process_ip $MASTER_ADDR --main_process_port $MASTER_PORT"
    )
    # Each task gets the number of its node from its own environment.
    on_a_node = f'exec {start} {places} "$@"'
    return f"srun bash -c {shlex.quote(on_a_node)} launch {' '.join(words)}"


def _quoted(word: str) -> str:
    return '"$SLURM_ARRAY_TASK_ID"'.join(shlex.quote(part) if part else "" for part in word.split(TASK)) or "''"


def _submit(file: Path) -> str:
    program = shutil.which("sbatch")
    if program is None:
        raise ConfigurationError(
            f"There is no program sbatch here. Submit {file} where SLURM is installed, or give --dry_run to print it."
        )
    done = subprocess.run([program, "--parsable", str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise TrainerLibError(f"sbatch refused {file}: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]
