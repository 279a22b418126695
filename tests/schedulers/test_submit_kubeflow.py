"""The TrainJobs of `trainer-lib submit kubeflow`, and the commands that their nodes run."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer_lib.commands.main import main


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINER_LIB_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return tmp_path


def job(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["submit", "kubeflow", "--dry_run", *words]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_a_job_of_two_nodes(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "two.yaml").write_text("num_machines: 2\nnum_processes: 16\nmixed_precision: bf16\n")
    options = ["--config_file", "two.yaml", "--image", "registry/train:1", "--gpus_per_node=8", "--mem", "64Gi"]
    places = ["--namespace", "team", "--volume", "runs-claim:/runs", "--job_name", "Big_Run.2", "--save_seconds=60"]
    written = job(capsys, *options, *places, "--max_restarts=1", "/app/train.py", "--lr", "1e-3")
    resources = {"memory": "64Gi", "nvidia.com/gpu": "8"}
    (command,) = [word for word in written["spec"]["trainer"]["command"] if word.startswith("exec")]
    pod = {
        "terminationGracePeriodSeconds": 60,
        "volumes": [{"name": "volume", "persistentVolumeClaim": {"claimName": "runs-claim"}}],
        "containers": [{"name": "node", "volumeMounts": [{"name": "volume", "mountPath": "/runs"}]}],
    }
    assert written == {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": "big-run-2", "namespace": "team"},
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": "torch-distributed",
            },
            "trainer": {
                "image": "registry/train:1",
                "numNodes": 2,
                "resourcesPerNode": {"limits": resources, "requests": resources},
                "command": ["bash", "-c", command, "launch"],
                "args": ["/app/train.py", "--lr", "1e-3"],
            },
            "runtimePatches": [
                {
                    "manager": "trainer-lib/submit",
                    "trainingRuntimeSpec": {
                        "template": {
                            "spec": {
                                "replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]
                            }
                        }
                    },
                }
            ],
        },
    }
    words = command.split()
    assert words[:5] == ["exec", "python", "-m", "trainer_lib", "launch"]
    assert {"--num_processes=16", "--mixed_precision=bf16", "--max_restarts=1"} <= set(words)
    assert not any(word.startswith("--config_file") for word in words)  # which is not in the image
    assert not (folder / "kubeflow_jobs").exists()  # a dry run writes nothing


@pytest.mark.parametrize("machines", [1, 2])
def test_a_node_runs_the_script_with_its_arguments(
    capsys: pytest.CaptureFixture[str], folder: Path, machines: int
) -> None:
    """Bash runs the command of a node, with a `python` that prints its arguments."""
    (folder / "python").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (folder / "python").chmod(0o755)
    odd = ["a b", "$HOME", "it's", '"x"', "", "--eval"]
    written = job(capsys, "--image=i", f"--num_machines={machines}", "--num_processes=2", "--cpu", "train.py", *odd)
    trainer = written["spec"]["trainer"]
    variables = {"PATH": f"{folder}:/usr/bin:/bin", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0-0"}
    done = subprocess.run(
        [*trainer["command"], *trainer["args"]],
        env={**variables, "PET_MASTER_PORT": "29400"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    words = done.stdout.splitlines()
    address = ["--main_process_ip", "job-node-0-0", "--main_process_port", "29400"]
    place = ["--num_machines", "2", "--machine_rank", "1", *address]
    assert words[-7 - 8 * (machines - 1) :] == [*(place if machines == 2 else []), "train.py", *odd]
    assert {"--cpu", "--num_processes=2"} <= set(words)


@pytest.mark.parametrize(("code", "said"), [(0, "trainjob/train created"), (1, "no such namespace")])
def test_kubectl_gets_the_file(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch, code: int, said: str
) -> None:
    stream = " >&2" if code else ""
    (folder / "kubectl").write_text(f'#!/bin/bash\necho "$@" > {folder}/called\necho "{said}"{stream}\nexit {code}\n')
    (folder / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    assert main(["submit", "kubeflow", "--image=i", "train.py"]) == code
    file = folder / "kubeflow_jobs" / "train.yaml"
    assert (folder / "called").read_text().split() == ["create", "-f", str(file)]
    assert json.loads(json.dumps(yaml.safe_load(file.read_text())))["metadata"] == {"name": "train"}
    printed = capsys.readouterr()
    assert said in (printed.err if code else printed.out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.py"], "No image was given."),
        (["--image=i", "--imagge=j", "train.py"], "Unknown option '--imagge'. Did you mean '--image'?"),
        (["--image=i", "--runtime_kind=Runtime", "train.py"], "--runtime_kind must be ClusterTrainingRuntime or "),
        (["--image=i", "--volume=runs", "train.py"], "--volume must be a claim and a path"),
        (["--image=i", "--job_name=7", "train.py"], "'7' makes no name for a job"),
        (["--image=i", "--machine_rank=1", "train.py"], "--machine_rank has no effect in a job"),
        (["--image=i"], "No script was given."),
    ],
)
def test_what_is_wrong_is_an_error_before_anything_is_written(
    capsys: pytest.CaptureFixture[str], folder: Path, words: list[str], message: str
) -> None:
    assert main(["submit", "kubeflow", *words]) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "kubeflow_jobs").exists()


def test_without_kubectl_the_file_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["submit", "kubeflow", "--image=i", "train.py"]) == 2
    assert "There is no program kubectl here. Submit " in capsys.readouterr().err
