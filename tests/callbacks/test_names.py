"""Tests of importing callbacks."""

import copy
import importlib
import inspect
import re
import subprocess
import sys
from typing import Any

import pytest

import trainer_lib.callbacks
from trainer_lib import TrainingArguments
from trainer_lib.events import constructor_names
from trainer_lib.foundation.errors import SignatureError
from trainer_lib.foundation.public_names import foreign_classes
from trainer_lib.tracking.registry import option_names, tracker_class
from trainer_lib.trainer.arguments.declaration import settings


def test_all_public_names_can_be_imported() -> None:
    assert sorted(trainer_lib.callbacks.__all__) == dir(trainer_lib.callbacks)
    for name in trainer_lib.callbacks.__all__:
        assert getattr(trainer_lib.callbacks, name).__name__ == name
    with pytest.raises(AttributeError, match="Did you mean 'EarlyStopping'"):
        _ = trainer_lib.callbacks.EarlyStoping  # type: ignore[attr-defined]


@pytest.mark.parametrize("package", ["trainer_lib", "trainer_lib.callbacks"])
@pytest.mark.parametrize("name", foreign_classes.INSTEAD)
def test_a_class_of_another_library_is_answered_with_ours(name: str, package: str) -> None:
    instead = foreign_classes.INSTEAD[name]
    with pytest.raises(ImportError) as error:
        __import__(package, fromlist=[name])  # what `from package import name` does first
    assert str(error.value).endswith(f"from {package!r}. Use {instead}.")
    for path in re.findall(r"trainer_lib\.[\w.]*\w", instead):
        module, _, kind = path.rpartition(".")
        assert inspect.isclass(getattr(importlib.import_module(module), kind))
    for option in re.findall(r"(\w+)=", instead.partition(")")[0]):
        assert option in settings(TrainingArguments), option


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            "EarlyStopping",
            {"monitor": "val_loss", "mode": "min"},
            "EarlyStopping takes no 'monitor'. Give metric. Known: ",
        ),
        (
            "EarlyStopping",
            {"patience": 3, "mode": "min"},
            "'mode'. Give greater_is_better: True for max, False for min.",
        ),
        ("Checkpoint", {"dirpath": "runs"}, "Checkpoint takes no 'dirpath'. Give TrainingArguments(output_dir=…). "),
        ("Checkpoint", {"filename": "best"}, "'filename'. Leave it out: a checkpoint is named by its step. "),
        ("EMA", {"dekay": 0.9}, "EMA takes no 'dekay'. Did you mean 'decay'? Known: decay, warmup, every, buffers."),
        ("Timer", {"interval": 1}, "Timer takes no 'interval'. Known: no arguments."),
        ("Timer", {"duration": "00:12:00:00"}, "'duration'. Give TrainingArguments(max_time=…). Known: no arguments."),
        ("EarlyStopping", {"check_on_train_epoch_end": True}, "Leave it out: it looks at each evaluation."),
        ("SWA", {"annealing_epochs": 3}, "'annealing_epochs'. Give a schedule of the Trainer."),
        ("AccumulationSchedule", {"scheduling": {0: 2}}, "'scheduling'. Give steps."),
    ],
)
def test_an_argument_of_another_library_is_answered_with_ours(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SignatureError) as error:
        getattr(trainer_lib.callbacks, kind)(**options)
    assert message in str(error.value)


def test_the_table_of_other_names_fits_the_constructors() -> None:
    for kind, names in constructor_names._INSTEAD.items():
        constructor = getattr(trainer_lib.callbacks, kind)
        known = list(inspect.signature(constructor).parameters)
        if issubclass(constructor, trainer_lib.callbacks.TrackerCallback):
            known += inspect.signature(trainer_lib.callbacks.TrackerCallback).parameters
            known += option_names(tracker_class(constructor.name)) or []
        assert not set(names) & set(known)
        for instead in names.values():
            ours = instead.partition("=")[0].partition(":")[0].split(" ")[0]
            assert ours in known or ours.startswith(("Leave", "TrainingArguments(", "trainer.", "a")), (kind, instead)


def test_constructors_of_your_own_take_what_they_declare() -> None:
    class Mine(trainer_lib.callbacks.EarlyStopping):
        def __init__(self, monitor: str, **options: Any) -> None:
            super().__init__(monitor, **options)

    stopping = copy.deepcopy(Mine(monitor="eval_f1", patience=2))
    assert (stopping.metric, stopping.patience) == ("eval_f1", 2)
    assert list(inspect.signature(Mine).parameters) == ["monitor", "options"]
    assert list(inspect.signature(trainer_lib.callbacks.Timer).parameters) == []


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
