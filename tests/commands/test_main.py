"""The program `trainer-lib`."""

import pytest

from trainer_lib.commands.main import main


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "launch      start a script" in capsys.readouterr().out


def test_no_command_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: trainer-lib COMMAND" in capsys.readouterr().err


def test_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lunch"]) == 2
    error_output = capsys.readouterr().err
    assert error_output.startswith("trainer-lib lunch: error: Unknown command 'lunch'. Known: checkpoint, ")
    assert error_output.endswith(" Did you mean 'launch'?\n")
