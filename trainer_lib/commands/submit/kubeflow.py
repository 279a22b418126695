"""The command `trainer-lib submit kubeflow`: write a TrainJob of Kubeflow Trainer for a launch, and submit it."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trainer_lib.commands.submit.job_launch import JobLaunch, describe, read_launch
from trainer_lib.foundation.errors import ConfigurationError, TrainerLibError
from trainer_lib.launchers.settings.setting import COUNT, COUNT_OR_ZERO, FILLED, Kind, Setting


def _option(name: str, kind: Kind, text: str, default: object = None) -> Setting:
    return Setting(name=name, group="kubeflow", kind=kind, help=text, default=default, key=None)


OPTIONS = {
    setting.name: setting
    for setting in (
        _option("image", FILLED, "the container image, with the script, its data and trainer-lib"),
        _option("job_name", FILLED, "the name of the job (default: the script's)"),
        _option("namespace", FILLED, "the namespace (default: that of kubectl)"),
        _option("runtime", FILLED, "the training runtime", "torch-distributed"),
        _option("runtime_kind", FILLED, "ClusterTrainingRuntime or TrainingRuntime", "ClusterTrainingRuntime"),
        _option("gpus_per_node", COUNT, "GPUs of each node (nvidia.com/gpu)"),
        _option("cpus_per_node", COUNT, "cores of each node"),
        _option("mem", FILLED, "memory of each node, as in 64Gi"),
        _option("volume", FILLED, "a claim and where it is mounted, as in runs-claim:/runs"),
        _option("save_seconds", COUNT_OR_ZERO, "from SIGTERM, at which the trainer saves, to the end of a node", 120),
        _option("job_folder", FILLED, "the folder of the job file", "kubeflow_jobs"),
    )
}
_KINDS = ("ClusterTrainingRuntime", "TrainingRuntime")
_MOST_CHARACTERS = 63  # of a name in Kubernetes

_HELP = """\
usage: trainer-lib submit kubeflow --image IMAGE [options] [options of launch] SCRIPT [options of the script]

Write a TrainJob (Kubeflow Trainer 2.2 or later) and submit it with kubectl: each of --num_machines nodes runs
`trainer-lib launch` in the image with the given options. SCRIPT is a path in the image.

{options}
  --dry_run                                       print the file, write and submit nothing

`trainer-lib launch --help` lists the options of a launch.\
"""


def run(arguments: Sequence[str]) -> int:
    """Write the job file and submit it; return 0."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(_HELP.format(options=describe(OPTIONS)))
        return 0
    launch = read_launch(arguments, OPTIONS, runs_here=False)
    text = yaml.safe_dump(train_job(launch), sort_keys=False, width=10_000)
    if launch.is_dry:
        print(text, end="")
        return 0
    folder = Path(launch.settings["job_folder"]).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{_name(launch)}.yaml"
    file.write_text(text)
    print(f"{_submit(file)}: {file}")
    return 0


def train_job(launch: JobLaunch) -> dict[str, Any]:
    """Return the TrainJob of a launch, as Kubeflow's controller reads it."""
    settings = launch.settings
    if settings["image"] is None:
        raise ConfigurationError("No image was given. Name one that holds the script and trainer-lib: --image IMAGE.")
    if settings["runtime_kind"] not in _KINDS:
        raise ConfigurationError(f"--runtime_kind must be {' or '.join(_KINDS)} (got {settings['runtime_kind']!r}).")
    resources = {
        "cpu": settings["cpus_per_node"],
        "memory": settings["mem"],
        "nvidia.com/gpu": settings["gpus_per_node"],
    }
    limits = {name: str(amount) for name, amount in resources.items() if amount is not None}
    trainer = {
        "image": settings["image"],
        "numNodes": launch.machines,
        **({"resourcesPerNode": {"limits": limits, "requests": dict(limits)}} if limits else {}),
        "command": ["bash", "-c", _on_a_node(launch), "launch"],
        "args": launch.script,
    }
    metadata = {"name": _name(launch), **({"namespace": settings["namespace"]} if settings["namespace"] else {})}
    runtime = {"apiGroup": "trainer.kubeflow.org", "kind": settings["runtime_kind"], "name": settings["runtime"]}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": {"runtimeRef": runtime, "trainer": trainer, **_pod(settings)},
    }


def _on_a_node(launch: JobLaunch) -> str:
    """Return the command of a node, which learns its place from the variables that Kubeflow gives torchrun."""
    start = shlex.join(["python", "-m", "trainer_lib", "launch", *launch.options])
    if launch.machines == 1:
        return f'exec {start} "$@"'
    return (
        f"exec {start} --num_machines {launch.machines} --machine_rank $PET_NODE_RANK "
        '--main_process_ip $PET_MASTER_ADDR --main_process_port $PET_MASTER_PORT "$@"'
    )


def _pod(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is different from the runtime's pods: the volume, and the time to save after SIGTERM."""
    pod = {"terminationGracePeriodSeconds": settings["save_seconds"], **_volume(settings["volume"])}
    node = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    patch = {"manager": "trainer-lib/submit", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}}}
    return {"runtimePatches": [patch]}


def _volume(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    claim, _, path = text.partition(":")
    if not claim or not path.startswith("/"):
        raise ConfigurationError(f"--volume must be a claim and a path, as in runs-claim:/runs (got {text!r}).")
    volume = {"name": "volume", "persistentVolumeClaim": {"claimName": claim}}
    container = {"name": "node", "volumeMounts": [{"name": "volume", "mountPath": path}]}
    return {"volumes": [volume], "containers": [container]}


def _name(launch: JobLaunch) -> str:
    """Return the job's name in the characters that Kubernetes takes."""
    name = re.sub(r"[^a-z0-9]+", "-", launch.name.lower()).strip("-")[:_MOST_CHARACTERS].strip("-")
    if not name or not name[0].isalpha():
        raise ConfigurationError(
            f"{launch.name!r} makes no name for a job: it must begin with a letter from a to z. Give --job_name."
        )
    return name


def _submit(file: Path) -> str:
    program = shutil.which("kubectl")
    if program is None:
        raise ConfigurationError(
            f"There is no program kubectl here. Submit {file} where it is installed (kubectl create -f), or give "
            "--dry_run to print it."
        )
    done = subprocess.run([program, "create", "-f", str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise TrainerLibError(f"kubectl refused {file}: {done.stderr.strip()}")
    return done.stdout.strip()
