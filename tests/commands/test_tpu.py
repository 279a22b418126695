"""`trainer-lib tpu-config`: the command that gcloud gets."""

from pathlib import Path

import pytest

from trainer_lib.commands.main import main
from trainer_lib.commands.tpu import tpu_command_launcher, tpu_command_parser

PLACE = ["--tpu_name", "pod", "--tpu_zone", "us-central1-a"]


@pytest.fixture
def gcloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a gcloud into the PATH that writes down its words and fails; return where it writes."""
    written = tmp_path / "words"
    (tmp_path / "gcloud").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {written}\nexit 3\n')
    (tmp_path / "gcloud").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return written


def test_commands_reach_all_machines(gcloud: Path) -> None:
    assert main(["tpu-config", *PLACE, "--command", "echo", "it's", "--command", "ls $HOME"]) == 3
    assert gcloud.read_text().splitlines() == [
        *("compute", "tpus", "tpu-vm", "ssh", "pod", "--zone", "us-central1-a"),
        *("--command", "cd /usr/share; echo it's; ls $HOME", "--worker", "all"),
    ]
    assert main(["tpu-config", *PLACE, "--command", "pip install .", "ls"]) == 3  # as Accelerate's pages do
    assert "cd /usr/share; pip install .; ls" in gcloud.read_text().splitlines()
    with pytest.raises(SystemExit, match="3"):
        tpu_command_launcher(tpu_command_parser().parse_args([*PLACE, "--command", "a"]))


def test_debug_prints_and_runs_nothing(gcloud: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "commands").write_text("echo a\n\necho b\n")
    config = tmp_path / "tpu.yaml"
    config.write_text("tpu_name: other\ntpu_zone: europe-west4-a\ncommands: [echo c]\n")
    words = ["tpu-config", "--config-file", str(config), "--debug"]
    assert main([*words, "--use_alpha", "--install_accelerate", "--accelerate_version", "0.1.0"]) == 0
    assert main([*words, "--tpu_name", "pod", "--command_file", str(tmp_path / "commands")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "Would run: gcloud alpha compute tpus tpu-vm ssh other --zone europe-west4-a --command "
        "'cd /usr/share; pip install -U trainer_lib==0.1.0; echo c' --worker all",
        "Would run: gcloud compute tpus tpu-vm ssh pod --zone europe-west4-a --command "
        "'cd /usr/share; echo a; echo b' --worker all",
    ]
    assert not gcloud.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (PLACE, "There is no command to run. Give --command or --command_file."),
        ([*PLACE, "--command_file", "none"], "The command file none cannot be read: No such file or directory."),
        ([*PLACE[:2], "--command", "a"], "--tpu_zone is missing, and no configuration file says it."),
        ([*PLACE, "--command", "a"], "There is no program gcloud here."),
        (
            [*PLACE, "--debug", "--install_accelerate", "--accelerate_version", "dev"],
            "--trainer_lib_version must be a version such as 1.0.0, or latest (got 'dev').",
        ),
        (
            [*PLACE, "--debug", "--install_trainer_lib", "--trainer_lib_version", "1.0; reboot"],
            "--trainer_lib_version must be a version such as 1.0.0, or latest (got '1.0; reboot').",
        ),
    ],
)
def test_what_is_missing(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["tpu-config", *words]) == 2
    assert message in capsys.readouterr().err
