"""Configurations of Accelerate's launcher, and their conversion to FSDP2."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer_lib import ConfigurationError
from trainer_lib.commands.config.config_args import ClusterConfig, SageMakerConfig, load_config_from_file
from trainer_lib.commands.config.default import default_command_parser
from trainer_lib.commands.launch import launch_command, launch_command_parser
from trainer_lib.commands.main import main
from trainer_lib.commands.to_fsdp2 import convert_config_to_fsdp2, to_fsdp2_command_parser
from trainer_lib.launchers import device_count
from trainer_lib.launchers.settings.config_file import default_config_file, home_config_file
from trainer_lib.options.enums import ComputeEnvironment, DistributedType
from trainer_lib.utils import write_basic_config


@pytest.mark.parametrize("name", ["config.yaml", "config.json"])
def test_a_basic_configuration_is_read_back(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_count, "count_accelerators", lambda: 0)
    file = tmp_path / "new" / name
    assert write_basic_config("bf16", file) == file
    config = load_config_from_file(file)
    assert isinstance(config, ClusterConfig)
    assert (config.mixed_precision, config.use_cpu, config.num_processes) == ("bf16", True, 1)
    assert config.distributed_type is DistributedType.NO
    assert config.compute_environment is ComputeEnvironment.LOCAL_MACHINE
    read = ClusterConfig.from_json_file if name.endswith("json") else ClusterConfig.from_yaml_file
    assert read(file) == config
    values = yaml.safe_load(file.read_text())
    assert values["rdzv_backend"] == "static"
    assert "main_process_ip" not in values, "what is not set is left out"


def test_all_devices_of_the_machine_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_count, "count_accelerators", lambda: 4)
    monkeypatch.setattr(device_count, "get_current_device_type", lambda: ("cuda", "MULTI_GPU"))
    write_basic_config(save_location=tmp_path / "config.json")
    values = json.loads((tmp_path / "config.json").read_text())
    assert (values["num_processes"], values["distributed_type"], values["use_cpu"]) == (4, "MULTI_GPU", False)


def test_a_configuration_that_is_there_stays(settings_home: Path) -> None:
    assert write_basic_config() == default_config_file() == settings_home / "trainer_lib" / "default_config.yaml"
    before = default_config_file().read_text()
    assert write_basic_config("bf16") is False
    assert default_config_file().read_text() == before
    assert load_config_from_file(None).mixed_precision == "no"


@pytest.mark.parametrize("name", ["default_config.yaml", "default_config.json"])
def test_a_configuration_of_accelerate_is_found_unless_there_is_one_of_this_library(
    settings_home: Path, name: str
) -> None:
    file = settings_home / "huggingface" / "accelerate" / name
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"mixed_precision": "fp16"}))
    assert default_config_file() == file
    assert load_config_from_file(None).mixed_precision == "fp16"
    assert write_basic_config() is False, "the one that is there counts"
    write_basic_config("bf16", home_config_file())
    assert load_config_from_file(None).mixed_precision == "bf16"


def test_the_folder_of_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINER_LIB_HOME")
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert home_config_file() == tmp_path / ".config" / "trainer_lib" / "default_config.yaml"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    assert home_config_file() == tmp_path / "xdg" / "trainer_lib" / "default_config.yaml"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache" / "huggingface" / "accelerate").mkdir(parents=True)
    file = tmp_path / "cache" / "huggingface" / "accelerate" / "default_config.yaml"
    file.write_text("num_processes: 2")
    assert default_config_file() == file


def test_a_configuration_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no configuration file .*gone\.yaml \(No such.*`trainer-lib config`"):
        load_config_from_file(tmp_path / "gone.yaml")
    with pytest.raises(ConfigurationError, match="Unknown mixed_precision"):
        write_basic_config("fp12", tmp_path / "other.yaml")


def test_sagemakers_configuration_needs_its_names(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("compute_environment: AMAZON_SAGEMAKER")
    with pytest.raises(ConfigurationError, match=r"lacks ec2_instance_type, iam_role_name\. Add"):
        load_config_from_file(tmp_path / "config.yaml")


def test_a_configuration_of_sagemaker_is_one(tmp_path: Path) -> None:
    values = {"compute_environment": "AMAZON_SAGEMAKER", "ec2_instance_type": "ml", "iam_role_name": "me"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    config = load_config_from_file(tmp_path / "config.yaml")
    assert isinstance(config, SageMakerConfig)
    assert config.base_job_name == "accelerate-sagemaker-1"


def test_the_command_for_a_basic_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    default_command_parser(parser.add_subparsers(), parents=[])
    args = parser.parse_args(["default", "--config_file", str(tmp_path / "c.yaml"), "--mixed_precision", "fp16"])
    args.func(args)
    assert capsys.readouterr().out == f"The configuration is in {tmp_path / 'c.yaml'}.\n"
    assert load_config_from_file(tmp_path / "c.yaml").mixed_precision == "fp16"


@pytest.mark.parametrize("command", ["default", "update"])
def test_the_file_may_be_named_before_the_command(
    settings_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    write_basic_config("bf16")
    (tmp_path / "c.yaml").write_text("fp16: true\nnum_processes: 3\n")
    for words in (
        ["--config_file", str(tmp_path / "c.yaml"), command],
        [command, "--config_file", str(tmp_path / "c.yaml")],
    ):
        assert main(["config", *words]) == 0
        assert str(tmp_path / "c.yaml") in capsys.readouterr().out
    assert (tmp_path / "c.yaml.bak").exists() == (command == "update")
    assert not list(settings_home.rglob("*.bak"))


FSDP1 = {
    "fsdp_version": 1,
    "fsdp_sharding_strategy": "SHARD_GRAD_OP",
    "fsdp_offload_params": False,
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_use_orig_params": True,
}


def test_options_of_fsdp1_become_those_of_fsdp2() -> None:
    config: dict[str, Any] = {"fsdp_config": FSDP1, "debug": True}
    converted = {"fsdp_reshard_after_forward": False, "fsdp_offload_params": False, "fsdp_version": 2}
    assert convert_config_to_fsdp2(config) == {"fsdp_config": converted, "debug": True}
    assert config["fsdp_config"]["fsdp_version"] == 1, "the argument does not change"
    resharding = {"fsdp_reshard_after_forward": "FULL_SHARD", "other": 1}
    assert convert_config_to_fsdp2({"fsdp_config": resharding})["fsdp_config"] == {
        "fsdp_reshard_after_forward": True, "other": 1, "fsdp_version": 2
    }  # fmt: skip
    for unchanged in ({}, {"fsdp_config": {"fsdp_version": 2, "fsdp_use_orig_params": True}}):
        assert convert_config_to_fsdp2(unchanged) == unchanged


def test_the_command_converts_a_file(tmp_path: Path) -> None:
    file, result = tmp_path / "old.yaml", tmp_path / "new.yaml"
    file.write_text(yaml.safe_dump({"fsdp_config": FSDP1}))
    parser = to_fsdp2_command_parser()
    args = parser.parse_args(["--config_file", str(file), "--output_file", str(result)])
    args.func(args)
    assert yaml.safe_load(result.read_text())["fsdp_config"]["fsdp_version"] == 2
    assert yaml.safe_load(file.read_text())["fsdp_config"]["fsdp_version"] == 1
    with pytest.raises(ConfigurationError, match="no file to write to"):
        args.func(parser.parse_args(["--config_file", str(file)]))
    with pytest.raises(ConfigurationError, match=r"The output file .*new.yaml exists"):
        args.func(args)
    result.write_text("")
    before = file.read_text()
    args.func(parser.parse_args(["--config_file", str(file), "--output_file", str(result), "--overwrite"]))
    assert file.read_text() == before
    args.func(parser.parse_args(["--config_file", str(file), "--overwrite"]))
    assert file.read_text() == result.read_text() != ""


@pytest.mark.launch
def test_a_script_launches_through_the_parser(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "file = pathlib.Path(sys.argv[1] + os.environ['RANK'])\n"
        "file.write_text(os.environ['ACCELERATE_MIXED_PRECISION'])\n"
        "sys.exit(int(sys.argv[2]))\n"
    )
    commands = argparse.ArgumentParser().add_subparsers()
    parser = launch_command_parser(commands)
    options = ["--cpu", "--num_processes", "2", "--mixed_precision", "bf16", str(script), str(tmp_path / "out.")]
    args = parser.parse_args([*options, "0"])
    args.func(args)
    assert [(tmp_path / f"out.{rank}").read_text() for rank in range(2)] == ["bf16", "bf16"]
    with pytest.raises(SystemExit) as ended:
        launch_command(launch_command_parser().parse_args(["--quiet", *options, "3"]))
    assert ended.value.code == 3
