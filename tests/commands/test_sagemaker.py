"""A launch on SageMaker: the job against a server that speaks AWS, and its instances as processes of this machine."""

import json
import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launched import PYTHON_PATH
from tests.remote.peer import LOOPBACK, server
from trainer_lib.commands.launch.launch import launch_command_parser, sagemaker_launcher
from trainer_lib.commands.main import main
from trainer_lib.commands.sagemaker.job_progress import follow
from trainer_lib.launchers.settings.config_file import SageMakerConfig

boto3 = pytest.importorskip("boto3", reason="the package boto3 is not installed")
pytest.importorskip("moto", reason="the package moto is not installed")

SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
from trainer_lib import Accelerator
accelerator = Accelerator()
total = accelerator.reduce(torch.tensor(accelerator.process_index + 1.0), "sum").item()
facts = [accelerator.num_processes, total, accelerator.mixed_precision, os.environ["SM_CHANNEL_TRAIN"], *sys.argv[1:]]
Path(os.environ["SM_MODEL_DIR"], f"rank{accelerator.process_index}").write_text(json.dumps(facts))
"""
CONFIG: dict[str, Any] = {
    "compute_environment": "AMAZON_SAGEMAKER",
    "distributed_type": "DATA_PARALLEL",
    "ec2_instance_type": "ml.p4d.24xlarge",
    "iam_role_name": "trainer",
    "image_uri": "registry.example/train:1",
    "region": "eu-west-1",
    "num_machines": 2,
    "mixed_precision": "bf16",
}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with server() as port:
        yield port


@pytest.fixture
def aws(port: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Return what makes clients of the server, which is empty but for a role."""
    variables = {
        "AWS_ENDPOINT_URL": f"http://{LOOPBACK}:{port}",
        "AWS_ACCESS_KEY_ID": "key-of-a-test",
        "AWS_SECRET_ACCESS_KEY": "secret-of-a-test",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    roles = boto3.client("iam", region_name="eu-west-1")
    if not roles.list_roles()["Roles"]:
        roles.create_role(RoleName="trainer", AssumeRolePolicyDocument="{}")
    return lambda service: boto3.client(service, region_name="eu-west-1")


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return what launches the script with a configuration, and with words before it."""
    folder = tmp_path / "a project"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("")
    (tmp_path / "inputs.tsv").write_text("channel_name\tdata_location\ntrain\ts3://data/train\n")
    (tmp_path / "metrics.tsv").write_text("metric_name\tmetric_regex\nloss\tloss=([0-9.]+)\n")
    monkeypatch.chdir(tmp_path)

    def run(
        config: dict[str, Any], *words: str, script: tuple[str, ...] = ("a project/train.py", "it's", "$HOME")
    ) -> int:
        (tmp_path / "sagemaker.yaml").write_text(yaml.safe_dump(config))
        return main(["launch", "--config_file", "sagemaker.yaml", *words, *script])

    return run


def test_a_job_is_described_and_followed(
    aws: Callable[[str], Any], launch: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    more = {
        "sagemaker_inputs_file": "inputs.tsv",
        "sagemaker_metrics_file": "metrics.tsv",
        "base_job_name": "my_run",
        "additional_args": {
            "max_run": 3600, "use_spot_instances": True, "max_wait": 7200, "volume_size": 200,
            "checkpoint_s3_uri": "s3://runs/a", "tags": {"team": "vision"}, "environment": {"WANDB_MODE": "offline"},
        },
    }  # fmt: skip
    assert launch(CONFIG | more) == 0
    printed = capsys.readouterr().out
    found = re.search(r"trainer-lib launch: (my-run-[-0-9]+) is submitted to SageMaker in eu-west-1", printed)
    assert found, printed
    name = found[1]
    assert f"trainer-lib launch: {name}: Completed\n" in printed
    job = aws("sagemaker").describe_training_job(TrainingJobName=name)
    where = f"s3://sagemaker-eu-west-1-123456789012/{name}"
    algorithm = job["AlgorithmSpecification"]
    assert algorithm["TrainingImage"] == "registry.example/train:1"
    assert algorithm["ContainerEntrypoint"] == ["bash", "/opt/ml/input/data/code/launch.sh"]
    assert job["RoleArn"] == "arn:aws:iam::123456789012:role/trainer"
    channels = {part["ChannelName"]: part["DataSource"]["S3DataSource"]["S3Uri"] for part in job["InputDataConfig"]}
    assert channels == {"code": f"{where}/source", "train": "s3://data/train"}
    assert job["ResourceConfig"] == {"InstanceType": "ml.p4d.24xlarge", "InstanceCount": 2, "VolumeSizeInGB": 200}
    assert job["StoppingCondition"] == {"MaxRuntimeInSeconds": 3600, "MaxWaitTimeInSeconds": 7200}
    assert (job["EnableManagedSpotTraining"], job["CheckpointConfig"]) == (True, {"S3Uri": "s3://runs/a"})
    assert job["OutputDataConfig"]["S3OutputPath"] == f"{where}/output"
    assert "secret" not in printed


@pytest.mark.slow
@pytest.mark.launch
def test_instances_run_what_was_uploaded(
    aws: Callable[[str], Any], launch: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert launch(CONFIG) == 0
    found = re.search(r"its files are in s3://([^/]+)/(\S+)\.\n", capsys.readouterr().out)
    assert found
    hosts = ["127.0.0.1", "127.0.0.2"]
    started: list[subprocess.Popen[bytes]] = []
    for host in hosts:
        root = tmp_path / host
        for folder in ("input/data/code", "input/data/train", "input/config", "model"):
            (root / folder).mkdir(parents=True)
        for file in ("source.tar.gz", "launch.sh"):
            aws("s3").download_file(found[1], f"{found[2]}/source/{file}", str(root / "input/data/code" / file))
        start = root / "input/data/code/launch.sh"
        start.write_text(
            start.read_text().replace("/opt/ml", str(root)).replace("exec python", f"exec {sys.executable}")
        )
        resources = {"hosts": hosts, "current_host": host, "network_interface_name": "lo"}
        (root / "input/config/resourceconfig.json").write_text(json.dumps(resources))
        environment = {**os.environ, "PYTHONPATH": PYTHON_PATH, "ACCELERATE_USE_CPU": "1"}
        started.append(subprocess.Popen(["bash", str(start)], env=environment))
    assert [process.wait(timeout=120) for process in started] == [0, 0]
    with tarfile.open(tmp_path / hosts[0] / "input/data/code/source.tar.gz") as archive:
        assert archive.getnames() == [".", "./train.py"]
    for rank, host in enumerate(hosts):
        facts = json.loads((tmp_path / host / "model" / f"rank{rank}").read_text())
        assert facts == [2, 3.0, "bf16", f"{tmp_path / host}/input/data/train", "it's", "$HOME"]


def test_a_failed_job_is_told_with_its_log(aws: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    logs, group = aws("logs"), "/aws/sagemaker/TrainingJobs"
    logs.create_log_group(logGroupName=group)

    def say(host: str, *lines: str) -> None:
        now = int(time.time() * 1000)
        events = [{"timestamp": now + place, "message": line} for place, line in enumerate(lines)]
        logs.put_log_events(logGroupName=group, logStreamName=f"run/{host}-1700000000", logEvents=events)

    class Jobs:
        """A job under way, which the server cannot show: its jobs are complete at once."""

        looks = 0

        def describe_training_job(self, TrainingJobName: str) -> dict[str, Any]:  # noqa: N803
            assert TrainingJobName == "run"
            self.looks += 1
            steps = [
                {"Status": "Starting", "StatusMessage": "Instances"},
                {"Status": "Training", "StatusMessage": "On"},
            ]
            if self.looks == 1:
                return {"TrainingJobStatus": "InProgress", "SecondaryStatusTransitions": steps[:1]}
            if self.looks == 2:
                for host in ("algo-1", "algo-2"):
                    logs.create_log_stream(logGroupName=group, logStreamName=f"run/{host}-1700000000")
                    say(host, "step 1", "step 2")
                return {"TrainingJobStatus": "InProgress", "SecondaryStatusTransitions": steps}
            say("algo-2", "ValueError: no data")
            end = {"TrainingJobStatus": "Failed", "FailureReason": "AlgorithmError: exit code 1"}
            return {**end, "SecondaryStatusTransitions": steps}

    assert follow(Jobs(), logs, "run", interval=0) == 1
    assert capsys.readouterr().out.splitlines() == [
        "trainer-lib launch: Starting: Instances",
        "trainer-lib launch: Training: On",
        "[algo-1] step 1",
        "[algo-1] step 2",
        "[algo-2] step 1",
        "[algo-2] step 2",
        "[algo-2] ValueError: no data",
        "trainer-lib launch: run: Failed: AlgorithmError: exit code 1",
    ]


def test_who_stops_watching_learns_how_to_stop_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    class Jobs:
        def describe_training_job(self, TrainingJobName: str) -> dict[str, Any]:  # noqa: N803
            del TrainingJobName
            raise KeyboardInterrupt

    assert follow(Jobs(), None, "run") == 130
    stop = "aws sagemaker stop-training-job --training-job-name run"
    assert f"run continues; this stops it: {stop}" in capsys.readouterr().err


def test_a_configuration_and_parsed_options_launch_too(
    aws: Callable[[str], Any], launch: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(CONFIG) == 0  # the file is another one
    values: dict[str, Any] = CONFIG | {"ec2_instance_type": "ml.g5.xlarge", "use_cpu": False, "debug": False}
    keys = ["--aws_access_key_id", "a", "--aws_secret_access_key", "b"]
    capsys.readouterr()
    sagemaker_launcher(
        SageMakerConfig(**values), launch_command_parser().parse_args([*keys, "--dry_run", "a project/train.py"])
    )
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed.partition("\n#")[0])["ResourceConfig"]["InstanceType"] == "ml.g5.xlarge"
    assert re.search(r"sagemaker\.node /opt/ml .*--mixed_precision=bf16 .*train\.py\n", printed)
    assert "aws_" not in printed


def test_a_dry_run_asks_nobody(launch: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(CONFIG, "--dry_run", "--num_machines", "3") == 0
    printed = capsys.readouterr().out
    job = yaml.safe_load(printed.partition("\n#")[0])
    assert (job["RoleArn"], job["ResourceConfig"]["InstanceCount"]) == ("trainer", 3)
    assert "sagemaker.node /opt/ml --mixed_precision=bf16 train.py 'it'\"'\"'s' '$HOME'" in printed


@pytest.mark.parametrize(
    ("changes", "words", "message"),
    [
        ({"image_uri": None}, [], "must say image_uri for a job on SageMaker. image_uri is an image"),
        ({"distributed_type": "MODEL_PARALLEL"}, [], "`distributed_type: MODEL_PARALLEL` in sagemaker.yaml is"),
        ({"iam_role_name": "nobody"}, [], "AWS refused the job: An error occurred (NoSuchEntity)"),
        ({"profile": "nobody"}, [], "The config profile (nobody) could not be found"),
        ({}, ["--aws_access_key_id", "a"], "--aws_access_key_id and --aws_secret_access_key belong together."),
        ({"additional_args": {"max_runs": 1}}, [], "Unknown name in `additional_args` 'max_runs'."),
        ({"additional_args": {"max_run": "long"}}, [], "AWS refused the job: Parameter validation failed"),
        ({"sagemaker_inputs_file": "none.tsv"}, [], "none.tsv cannot be read: No such file or directory"),
        ({"sagemaker_inputs_file": "metrics.tsv"}, [], "must have the columns channel_name and data_location"),
        ({"base_job_name": "--"}, [], "`base_job_name` needs a letter or a digit (got '--')."),
    ],
)  # fmt: skip
def test_what_cannot_be_a_job(
    aws: Callable[[str], Any], launch: Callable[..., int], capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any], words: list[str], message: str,
) -> None:  # fmt: skip
    del aws
    assert launch({key: value for key, value in (CONFIG | changes).items() if value is not None}, *words) == 2
    assert message in capsys.readouterr().err


def test_the_rest_of_the_command_line_says_where_sagemaker_counts(
    launch: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(CONFIG, script=("none.py",)) == 2
    assert "The script 'none.py' is not there" in capsys.readouterr().err
    assert main(["launch", "--aws_access_key_id", "a", "a project/train.py"]) == 2
    assert "--aws_access_key_id has no effect without a configuration file" in capsys.readouterr().err
    assert main(["submit", "slurm", "--config_file", "sagemaker.yaml", "--dry_run", "a project/train.py"]) == 2
    assert "sagemaker.yaml is for SageMaker: `trainer-lib launch` submits there." in capsys.readouterr().err
