"""Tests of trackers by name, and of errors for unknown names."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer_lib import Accelerator
from trainer_lib.foundation.errors import ConfigurationError, MissingPackageError
from trainer_lib.foundation.imports import is_package_available
from trainer_lib.tracking import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    filter_trackers,
    get_available_trackers,
    register_tracker_class,
    registry,
)
from trainer_lib.utils import LoggerType


class Silent(GeneralTracker):
    name = "silent"
    requires_logging_directory = False
    tracker = None


def test_names_and_objects_may_be_mixed() -> None:
    silent = Silent()
    assert registry.resolve(["comet", LoggerType.MLFLOW, silent], "log_with") == ["comet_ml", "mlflow", silent]
    assert registry.resolve(None, "log_with") == []
    assert registry.resolve("jsonl", "log_with") == ["jsonl"]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("tensorbord", "Unknown tracker 'tensorbord'.*Known: aim, all, clearml, comet_ml.*Did you mean 'tensorboard'?"),
        (["mlflow", "mlflow"], "log_with has the tracker 'mlflow' twice"),
        ([Silent(), Silent()], "log_with has the tracker 'silent' twice"),
        (Silent, "log_with must hold names or objects .got the class Silent."),
        (
            "neptune",
            "The tracker neptune is not supported: its service ended on 5 March 2026.*Use one of aim, clearml, comet",
        ),
        (3, "Unknown tracker '3'"),
    ],
)
def test_invalid_trackers_are_refused(wanted: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        registry.resolve(wanted, "log_with")


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_lib.tracking.base.is_package_available", lambda module: False)
    with pytest.raises(MissingPackageError, match=r'needs the package comet_ml.*pip install "trainer_lib\[comet\]"'):
        registry.tracker_class("comet_ml")
    assert get_available_trackers() == ["jsonl", *sorted(registry._registered)]
    assert filter_trackers(["wandb", "jsonl"], "logs") == ["jsonl"]


def test_all_means_installed_and_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("COMET_API_KEY", "WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    available = registry.available_names()
    assert not {"comet_ml", "wandb", "jsonl"} & set(available)
    assert ("tensorboard" in available) == is_package_available("tensorboard")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("COMET_API_KEY", "k")
    available = registry.available_names()
    assert ("wandb" in available, "comet_ml" in available) == (
        is_package_available("wandb"),
        is_package_available("comet_ml"),
    )


def test_registered_classes_take_the_place_of_others() -> None:
    register_tracker_class(Silent)
    register_tracker_class(Silent)  # as a module that is imported again does
    assert registry.tracker_class("silent") is Silent
    assert "silent" in registry.available_names()

    class Other(GeneralTracker):
        name = "silent"

    class Wandb(GeneralTracker):
        name = "wandb"

    class Nameless(GeneralTracker):
        requires_logging_directory = False

    class Every(GeneralTracker):
        name = "all"

    for kind, message in ((Every, "is taken"), (Nameless, "has no name"), (3, "must be a subclass")):
        with pytest.raises(ConfigurationError, match=message):
            register_tracker_class(kind)  # type: ignore[arg-type]
    known = dict(LOGGER_TYPE_TO_CLASS)
    try:
        with pytest.warns(UserWarning, match="The tracker name 'silent' was that of Silent, and is that of Other now"):
            register_tracker_class(Other)
        with pytest.warns(UserWarning, match="The tracker name 'wandb' was that of this library"):
            register_tracker_class(Wandb)
        assert registry.tracker_class("silent") is LOGGER_TYPE_TO_CLASS["silent"] is Other
        assert registry.tracker_class("wandb") is LOGGER_TYPE_TO_CLASS["wandb"] is Wandb
        assert registry.available_names().count("wandb") == 1  # as every registered class is
        del LOGGER_TYPE_TO_CLASS["silent"]
        assert "silent" not in LOGGER_TYPE_TO_CLASS
        LOGGER_TYPE_TO_CLASS.clear()
    finally:
        LOGGER_TYPE_TO_CLASS.update(known)
    assert dict(LOGGER_TYPE_TO_CLASS) == known
    assert registry.tracker_class("silent") is Silent


def test_other_packages_bring_theirs_by_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        importlib.metadata.EntryPoint("theirs", f"{__name__}:Silent", registry.ENTRY_POINTS),
        importlib.metadata.EntryPoint("broken", "json:dumps", registry.ENTRY_POINTS),
    ]
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: points if group == registry.ENTRY_POINTS else []
    )
    registry._entry_points.cache_clear()
    try:
        assert registry.tracker_class("theirs").__name__ == "Silent"
        with pytest.raises(ConfigurationError, match=r"'broken' of trainer_lib.trackers must be a subclass"):
            registry.tracker_class("broken")
    finally:
        registry._entry_points.cache_clear()


def test_a_tracker_lacks_nothing() -> None:
    class Incomplete(GeneralTracker):
        name = "incomplete"

    with pytest.raises(NotImplementedError, match="Incomplete lacks requires_logging_directory, tracker"):
        Incomplete()
    assert Incomplete(_blank=True).name == "incomplete"


def test_classes_by_name() -> None:
    from trainer_lib.tracking import AimTracker, TensorBoardTracker

    assert LOGGER_TYPE_TO_CLASS["tensorboard"] is LOGGER_TYPE_TO_CLASS[LoggerType.TENSORBOARD] is TensorBoardTracker
    assert LOGGER_TYPE_TO_CLASS["aim"] is AimTracker
    assert {str(kind) for kind in LoggerType if kind != LoggerType.ALL} <= set(LOGGER_TYPE_TO_CLASS)
    assert len(LOGGER_TYPE_TO_CLASS) == len(list(LOGGER_TYPE_TO_CLASS))
    assert "neptune" not in LOGGER_TYPE_TO_CLASS


def test_a_tracker_named_twice_or_not_installed_is_left_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer_lib.tracking.adapters.swanlab import SwanLabTracker

    monkeypatch.setattr(SwanLabTracker, "is_installed", classmethod(lambda cls: False))
    silent = Silent()
    accelerator = Accelerator(cpu=True, log_with=["mlflow", LoggerType.MLFLOW, "swanlab", silent, silent])
    assert accelerator.log_with == ["mlflow", silent]
    twice, gone, again = [record.message for record in caplog.records]
    assert twice == "log_with names the tracker mlflow twice. It gets each value once."
    assert gone.startswith("log_with: The tracker swanlab needs the package swanlab, which is not installed.")
    assert gone.endswith('`pip install "trainer_lib[swanlab]"`. It is left out.')
    assert "twice" in again
    with pytest.raises(ConfigurationError, match="log_with has the tracker 'silent' twice"):
        Accelerator(cpu=True, log_with=[Silent(), Silent()])


def test_a_tracker_made_by_hand_starts_with_its_first_value(tmp_path: Path) -> None:
    from trainer_lib.tracking import JsonlTracker

    tracker = JsonlTracker("mine", tmp_path)
    tracker.log({"loss": 0.5}, step=1)
    tracker.log({"loss": 0.25}, step=2)
    tracker.finish()
    lines = [json.loads(line) for line in (tmp_path / "mine.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines if "loss" in line] == [0.5, 0.25]


@pytest.mark.skipif(not is_package_available("tensorboard"), reason="tensorboard is not installed")
def test_a_tracker_starts_once(tmp_path: Path) -> None:
    from trainer_lib.tracking import TensorBoardTracker

    tracker = TensorBoardTracker("mine", tmp_path)
    tracker.store_init_configuration({"lr": 0.1})
    writer = tracker.tracker
    tracker.log({"loss": 0.5}, step=1)
    assert tracker.tracker is writer
    tracker.finish()
    TensorBoardTracker("never used", tmp_path).finish()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("name", "option", "set_by_init_trackers"),
    [
        ("tensorboard", "flush_secs", "log_dir"),
        ("mlflow", "tracking_uri", "experiment_name"),
        ("comet_ml", "workspace", "project_name"),
        ("wandb", "entity", "project"),
        ("trackio", "space_id", "project"),
        ("clearml", "tags", "run_name"),
        ("dvclive", "exp_name", "run_name"),
        ("aim", "repo", "run_name"),
        ("jsonl", "resume_step", "logging_dir"),
    ],
)
def test_options_are_known_without_an_import_of_the_package(name: str, option: str, set_by_init_trackers: str) -> None:
    kind: Any = registry._built_in(name)
    if not kind.is_installed():
        pytest.skip(f"{kind.module} is not installed: pip install trainer_lib[{kind.extra}]")
    program = (
        "import sys\nfrom trainer_lib.tracking import registry\n"
        f"kind = registry.tracker_class({name!r})\nprint(*registry.option_names(kind))\n"
        f"assert {kind.module!r} not in sys.modules"
    )
    known = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert option in known
    assert not {set_by_init_trackers, "self", "kwargs"} & set(known)


def test_a_class_derived_from_a_tracker_may_take_other_options() -> None:
    from trainer_lib.tracking import TensorBoardTracker

    class Mine(TensorBoardTracker):
        def __init__(self, run_name: str, logging_dir: str, **kwargs: Any) -> None:
            self.prefix = kwargs.pop("prefix")
            super().__init__(run_name, logging_dir, **kwargs)

    assert registry.option_names(Mine) is None


def test_an_option_that_init_trackers_sets_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install trainer_lib[tensorboard]")
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    with pytest.raises(ConfigurationError, match=r"must not have 'log_dir'.*gets it from project_name and project_dir"):
        accelerator.init_trackers("project", init_kwargs={"tensorboard": {"log_dir": "logs"}})
    with pytest.raises(ConfigurationError, match=r"Unknown option of tensorboard in init_kwargs.*'flush_secs'"):
        accelerator.init_trackers("project", init_kwargs={"tensorboard": {"flush_sec": 1}})
