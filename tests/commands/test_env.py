"""`trainer-lib env`: a report without torch and without secrets."""

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest

from trainer_lib import __version__
from trainer_lib.commands.main import main
from trainer_lib.processes import nvidia_driver
from trainer_lib.processes.nvidia_driver import Gpu, read_gpus


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["env", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_versions_memory_and_packages_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    import yaml

    facts = report(capsys)
    assert facts["trainer_lib"] == __version__
    assert facts["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert facts["Packages"]["PyYAML"] == yaml.__version__
    assert "deepspeed" in facts["Packages"]["not installed"].split(", ")
    assert "available" in facts["Memory"]


def test_the_configuration_that_counts_is_reported(
    settings_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(capsys)["Configuration"] == {"file": "none (`trainer-lib config` writes one)"}
    file = settings_home / "trainer_lib" / "default_config.yaml"
    file.parent.mkdir()
    file.write_text("num_processes: 3\nfsdp_config: {version: 2}")
    configuration = report(capsys)["Configuration"]
    assert (configuration["file"], configuration["num_processes"]) == (str(file), 3)
    assert configuration["fsdp_config"] == {"fsdp_version": 2}
    (tmp_path / "other.yaml").write_text("num_processes: 5")
    assert report(capsys, "--config_file", str(tmp_path / "other.yaml"))["Configuration"]["num_processes"] == 5
    file.write_text("num_processes: two")
    assert "line 1: `num_processes` must be" in report(capsys)["Configuration"]["error"]
    assert main(["env", "--config_file", str(file)]) == 2


def test_variables_are_reported_without_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("ACCELERATE_API_KEY", "secret")
    monkeypatch.setenv("HF_ENDPOINT", "https://me:secret@hub.example/x")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("OTHER", "secret")
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert "    - HF_TOKEN: (set, not shown)\n" in text
    assert "    - HF_ENDPOINT: https://(login)@hub.example/x\n" in text
    assert "    - ACCELERATE_MIXED_PRECISION: bf16\n" in text
    assert "    - TOKENIZERS_PARALLELISM: false\n" in text
    assert "secret" not in text
    assert "OTHER" not in text


class Driver:
    """Does as NVIDIA's library: functions that fill in what they are given."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.is_shut_down = False

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return self.error

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_shut_down = True

    def nvmlDeviceGetCount_v2(self, count: Any) -> None:  # noqa: N802
        count._obj.value = 2

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> None:  # noqa: N802
        handle._obj.value = index + 1

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> None:  # noqa: N802
        memory._obj.total, memory._obj.free = 100 * handle.value, 10 * handle.value

    def nvmlDeviceGetName(self, handle: Any, text: Any, length: int) -> None:  # noqa: N802
        assert length == ctypes.sizeof(text)
        text.value = f"GPU {handle.value}".encode()

    def nvmlDeviceGetUUID(self, handle: Any, text: Any, length: int) -> None:  # noqa: N802
        assert length == ctypes.sizeof(text)
        text.value = f"GPU-{handle.value}".encode()

    def nvmlSystemGetDriverVersion(self, text: Any, length: int) -> None:  # noqa: N802
        assert length == ctypes.sizeof(text)
        text.value = b"570.1"


def test_the_driver_is_asked_for_its_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    driver = Driver()
    monkeypatch.setattr(nvidia_driver.ctypes, "CDLL", lambda name: driver)
    assert read_gpus() == ("570.1", [Gpu("GPU 1", 100, 10, "GPU-1"), Gpu("GPU 2", 200, 20, "GPU-2")])
    assert driver.is_shut_down
    assert report(capsys)["Devices"][1] == "GPU 2, 20 bytes of 200 bytes free, driver 570.1"
    driver.error = 9  # the driver is not loaded
    assert read_gpus() == ("", [])
