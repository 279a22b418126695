"""Tests of importing callbacks."""

import subprocess
import sys

import pytest

import trainer_lib.callbacks


def test_all_public_names_can_be_imported() -> None:
    assert sorted(trainer_lib.callbacks.__all__) == dir(trainer_lib.callbacks)
    for name in trainer_lib.callbacks.__all__:
        assert getattr(trainer_lib.callbacks, name).__name__ == name
    with pytest.raises(AttributeError, match="Did you mean 'EarlyStopping'"):
        _ = trainer_lib.callbacks.EarlyStoping  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.launch
def test_importing_a_callback_does_not_import_tqdm() -> None:
    statement = (
        "import sys; from trainer_lib.callbacks import Throughput, ProgressBar; print('tqdm.auto' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import torch; {statement}"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
