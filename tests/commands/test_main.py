"""The program `trainer-lib`."""

import contextlib
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.launched import PYTHON_PATH
from trainer_lib import __version__
from trainer_lib.commands.main import main, main_of_program


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "launch           start a script" in capsys.readouterr().out


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the second one is that of the locale C
@pytest.mark.parametrize("command", [["--help"], ["launch", "--help", "all"], ["train", "--help"], ["plan", "--help"]])
def test_an_encoding_without_a_character_is_no_error(command: list[str], errors: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trainer_lib", *command],
        env={**os.environ, "PYTHONPATH": PYTHON_PATH, "PYTHONIOENCODING": f"ascii:{errors}"},
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert b"\\u2026" in done.stdout


def test_bash_completes_commands_and_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion"]) == 0
    (tmp_path / "completion").write_text(capsys.readouterr().out)

    def completed(*words: str) -> list[str]:
        line = " ".join(shlex.quote(word) for word in words)
        start = f"source completion; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _trainer_lib"
        command = ["bash", "-c", f'{start}; printf "%s\\n" "${{COMPREPLY[@]}}"']
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.split()

    assert completed("trainer-lib", "la") == ["launch"]
    assert completed("trainer-lib", "launch", "--num_p") == ["--num_processes"]
    assert completed("trainer-lib", "launch", "--megatron_lm_eod") == ["--megatron_lm_eod_mask_loss"]
    assert completed("trainer-lib", "launch", "--megatron_lm_no_load") == []  # an option that is refused
    assert completed("trainer-lib", "config", "up") == ["update"]
    assert completed("trainer-lib", "env", "--j") == ["--json"]
    assert completed("trainer-lib", "train", "--label_c") == ["--label_column"]


@pytest.mark.parametrize("arguments", [["--help"], ["runs", "--help"], ["launch", "--help", "all"], ["env"]])
def test_commands_end_quietly_when_nobody_reads_their_output(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as `head -1` does after a line
    command = [sys.executable, "-m", "trainer_lib", *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("arguments", [["--help"], ["runs", "--help"], ["launch", "--help", "all"], ["env"]])
def test_output_that_cannot_be_written_is_an_error(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "trainer_lib", *arguments]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    reason = "the output could not be written: No space left on device."
    assert (done.returncode, done.stderr) == (1, f"trainer-lib {arguments[0]}: error: {reason}\n")


@pytest.mark.parametrize("module", ["foundation.errors", "commands.env", "commands.subcommands"])
def test_ctrl_c_during_an_import_has_no_traceback(tmp_path: Path, module: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"""
import signal, sys

class PressCtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == "trainer_lib.{module}":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, PressCtrlC())
"""
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), PYTHON_PATH])}
    command = [sys.executable, "-m", "trainer_lib", "env"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "trainer-lib env: interrupted.\n")


def test_no_command_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: trainer-lib COMMAND" in capsys.readouterr().err


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"trainer-lib {__version__}\n"


def test_programs_run_the_command_in_their_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
    assert {"trainer-lib-config", "trainer-lib-env", "trainer-lib-launch", "trainer-lib-test"} < set(scripts)
    for program in sorted(set(scripts) - {"trainer-lib"}):
        assert scripts[program] == "trainer_lib.commands.main:main_of_program"
        monkeypatch.setattr(sys, "argv", [f"/usr/bin/{program}", "-h"])
        with contextlib.suppress(SystemExit):
            main_of_program()
        assert f"usage: trainer-lib {program.removeprefix('trainer-lib-')}" in capsys.readouterr().out


def test_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lunch"]) == 2
    error_output = capsys.readouterr().err
    assert error_output.startswith("trainer-lib lunch: error: Unknown command 'lunch'. Known: check, checkpoint, ")
    assert error_output.endswith(" Did you mean 'launch'?\n")


@pytest.mark.parametrize(
    ("module", "shown"),
    [
        ("trainer_lib.commands.launch", "usage: trainer-lib launch "),
        ("trainer_lib.commands.accelerate_cli launch", "usage: trainer-lib launch "),
        ("trainer_lib.commands.env", "usage: trainer-lib env "),
        ("trainer_lib.commands.estimate", "usage: trainer-lib estimate-memory "),
        ("trainer_lib.commands.merge", "usage: trainer-lib merge-weights "),
        ("trainer_lib.commands.test", "usage: trainer-lib test "),
    ],
)
def test_modules_of_commands_run_as_those_of_accelerate_do(module: str, shown: str) -> None:
    command = [sys.executable, "-m", *module.split(), "--help"]
    assert shown in subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_a_module_launches_and_ends_as_its_script_does(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print(sys.argv[1:]); sys.exit(3)")
    command = [sys.executable, "-m", "trainer_lib.commands.launch", "--cpu", "--num_processes", "1", "script.py", "--a"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout) == (3, "['--a']\n")
