"""What every test of the command line starts with: no configuration file of this machine."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def settings_home(afresh: None, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the empty folder in which this library's and Accelerate's configuration files are looked for."""
    del afresh
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("TRAINER_LIB_HOME", str(home / "trainer_lib"))
    monkeypatch.setenv("HF_HOME", str(home / "huggingface"))
    return home
