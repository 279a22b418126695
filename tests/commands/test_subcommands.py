"""`trainer-lib estimate-memory`, `merge-weights` and `to-fsdp2`: what a user types and reads."""

import re
import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file
from transformers import BertConfig

from tests.launchers.test_config_reader import FSDP
from tests.runs.histories import make_run
from trainer_lib.commands.main import main

# Written by Accelerate: a model in shards.
SHARDS = Path(__file__).parent.parent / "data" / "foreign" / "accelerate_fsdp" / "pytorch_model_fsdp_0"


def sizes(table: str) -> list[str]:
    """Return the cells of the last row of a table."""
    return [cell.strip() for cell in table[: table.index("┘")].splitlines()[-2].split("│")[1:-1]]


def test_the_memory_of_a_folders_model_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = BertConfig(vocab_size=10, hidden_size=4, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    config.save_pretrained(tmp_path)
    assert main(["estimate-memory", str(tmp_path), "--dtypes", "float32"]) == 0
    folder = capsys.readouterr().out
    assert "Memory Usage for loading" in folder
    assert sizes(folder)[0] == "float32"
    assert sizes(folder)[3].endswith("KB")
    assert main(["estimate-memory", str(tmp_path / "config.json"), "--dtypes", "float32"]) == 0
    assert sizes(capsys.readouterr().out) == sizes(folder)


def test_a_model_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["estimate-memory", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"The configuration of {str(tmp_path)!r} cannot be read: " in error
    assert "Name a folder with a config.json" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["estimate-memory", "gpt", "--batch_size", "0"], "The value must be a whole number of at least 1 (got '0')."),
        (["plan", "gpt", "--world", "two"], "The value must be a whole number of at least 1 (got 'two')."),
        (
            ["plan", "gpt", "--memory", "lots"],
            "'lots' is not a size. Give bytes as a number, or ",
        ),
    ],
)
def test_numbers_that_are_not_allowed_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert f"error: argument {arguments[2]}" in (error := capsys.readouterr().err)
    assert message in error


def test_shards_are_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = tmp_path / "shards"
    shutil.copytree(SHARDS, shards)
    assert main(["merge-weights", str(shards), str(tmp_path / "whole"), "--remove-checkpoint-dir"]) == 0
    assert capsys.readouterr().out == f"The whole weights of {shards} are in {tmp_path / 'whole'}.\n"
    assert "0.weight" in load_file(tmp_path / "whole" / "model.safetensors")
    assert not shards.exists()
    assert main(["merge-weights", str(tmp_path), str(tmp_path / "again")]) == 1
    assert "has no shards" in capsys.readouterr().err
    shutil.copytree(SHARDS, shards)
    assert main(["merge-weights", str(shards), str(tmp_path / "bin"), "--unsafe_serialization"]) == 0
    assert shards.exists()
    assert [path.name for path in (tmp_path / "bin").iterdir()] == ["pytorch_model.bin"]


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("config default", "--config_file"),
        ("to-fsdp2 --config_file fsdp1.yaml", "--output_file"),
        ("runs .", "--html"),
        ("report .", "--output"),
        ("report .", "--charts"),
    ],
)
def test_output_that_cannot_be_written_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "one")
    Path("fsdp1.yaml").write_text("distributed_type: FSDP\n")
    assert main([*command.split(), option, "fsdp1.yaml/new"]) == 2
    reasons = "(fsdp1.yaml is a file|Not a directory)"
    assert re.search(
        rf"error: fsdp1.yaml/new cannot be written: {reasons}. Name another place.\n$", capsys.readouterr().err
    )


@pytest.mark.parametrize("option", ["--output", "--charts"])
def test_a_history_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "one")
    Path("one/history.jsonl").unlink()
    Path("one/history.jsonl").mkdir()
    assert main(["report", "one", option, "one/new"]) == 2
    assert "error: one/history.jsonl cannot be read: Is a directory.\n" in capsys.readouterr().err


def test_a_configuration_of_fsdp1_is_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, converted = tmp_path / "old.yaml", tmp_path / "new.yaml"
    file.write_text(FSDP)
    assert main(["to-fsdp2", "--config-file", str(file), "--output-file", str(converted)]) == 0
    assert str(converted) in capsys.readouterr().out
    options = yaml.safe_load(converted.read_text())["fsdp_config"]
    assert (options["fsdp_version"], options["fsdp_reshard_after_forward"]) == (2, True)
    assert "fsdp_backward_prefetch" not in options
    capsys.readouterr()
    assert main(["to-fsdp2", "--config_file", str(converted), "--overwrite"]) == 0
    assert capsys.readouterr().out == f"{converted} has no options of FSDP1: {converted} has the same options.\n"
    assert main(["to-fsdp2", "--config_file", str(tmp_path / "gone.yaml"), "--overwrite"]) == 2
    assert "There is no configuration file" in capsys.readouterr().err
    assert main(["to-fsdp2", "--overwrite"]) == 2
