"""Tests of trackers in the Accelerator."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tracking.misbehaving import Misbehaving, taken
from tests.worlds import run_world
from trainer_lib import Accelerator, GeneralTracker, ProjectConfiguration
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError
from trainer_lib.tracking import on_main_process, register_tracker_class
from trainer_lib.tracking.tracker_group import TrackerHandle

register_tracker_class(Misbehaving)


class Listing(GeneralTracker):
    """As people write them for Accelerate."""

    name = "listing"
    requires_logging_directory = False

    @on_main_process
    def __init__(self, run_name: str) -> None:
        super().__init__()
        self.run_name = run_name
        self.run: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.append(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.run.append((step, values))


def test_a_tracker_written_for_accelerate_works_unchanged() -> None:
    mine = Listing("mine")
    accelerator = Accelerator(cpu=True, log_with=mine)
    accelerator.log({"loss": 9.0}, step=0)  # before there is anybody to tell
    accelerator.init_trackers("project", config={"lr": 0.1, "api_key": "k"})
    accelerator.log({"loss": torch.tensor(0.5)}, step=1)
    tracker = accelerator.get_tracker("listing")
    assert isinstance(tracker, TrackerHandle)
    assert isinstance(tracker, Listing)
    assert not isinstance(tracker, Misbehaving)
    assert tracker.run_name == "mine"
    assert accelerator.get_tracker("listing", unwrap=True) is mine.run
    accelerator.end_training()
    assert mine.run == [{"lr": 0.1, "api_key": "***"}, (1, {"loss": torch.tensor(0.5)})]
    assert accelerator.trackers == []


def test_names_take_their_folder_and_options(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with=["jsonl", Listing("mine")], project_dir=tmp_path)
    accelerator.init_trackers("digits", config={"lr": 0.1})
    accelerator.log({"loss": {"train": float("nan")}}, step=1, log_kwargs={"jsonl": {"epoch": 2}})
    for tracker in accelerator.trackers:
        if tracker.name == "jsonl":
            tracker.log_table("table", columns=["a"], data=[[1], [2]], step=1)
    accelerator.end_training()
    lines = [json.loads(line) for line in (tmp_path / "digits.jsonl").read_text().splitlines()]
    assert lines[0] == {"settings": {"lr": 0.1}}
    assert lines[1].pop("time") > 1.7e9
    assert lines[1] == {"step": 1, "epoch": 2, "loss/train": "NaN"}
    assert lines[2] == {"step": 1, "table": "table", "columns": ["a"], "data": [[1], [2]]}


def test_a_tracker_in_another_process_forwards_calls(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="misbehaving", project_dir=tmp_path)
    options = {"path": str(tmp_path / "taken"), "apart": True}
    accelerator.init_trackers("project", init_kwargs={"misbehaving": options})
    tracker = accelerator.get_tracker("misbehaving")
    assert isinstance(tracker, TrackerHandle)
    assert isinstance(tracker, Misbehaving)
    assert tracker.runs_apart
    tracker.say("hello", times=2)
    tracker.log_images({"batch": torch.zeros(2, 3, 8, 4)}, step=1)
    tracker.log_artifact(__file__, "a test")
    accelerator.get_tracker("misbehaving", unwrap=True).parent.chmod(0o750)
    for call, error in (
        (lambda: tracker.log_table("t", ["a"], [[1]]), UnsupportedError),
        (lambda: tracker.log_artifact("nowhere"), ConfigurationError),
        (lambda: tracker.path, AttributeError),
    ):
        with pytest.raises(error):
            call()
    accelerator.end_training()
    assert tmp_path.stat().st_mode & 0o777 == 0o750
    calls = taken(tmp_path / "taken")[1:]
    assert calls == [
        {"said": "hellohello"},
        {"step": 1, "shapes": {"batch": [2, 3, 8, 4]}},
        {"artifact": __file__, "as": "a test"},
        {"finished": "finished"},
    ]


def test_a_thread_may_be_asked_for(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="misbehaving", project_dir=tmp_path)
    options = {"misbehaving": {"path": str(tmp_path / "taken"), "apart": True}}
    accelerator.init_trackers("project", init_kwargs=options, isolation={"misbehaving": "thread"})
    assert accelerator.get_tracker("misbehaving").path == tmp_path / "taken"
    assert accelerator.get_tracker("misbehaving", unwrap=True) == tmp_path / "taken"
    accelerator.init_trackers("again", init_kwargs=options, isolation="thread")  # ends those before
    assert taken(tmp_path / "taken")[-1]["finished"] == "finished"
    accelerator.end_training()


def test_options_of_a_tracker_that_is_not_used_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
    for _ in range(2):
        accelerator.init_trackers("project", init_kwargs={"wandb": {"name": "run"}})
        accelerator.log({"loss": 0.5}, step=1, log_kwargs={"wandb": {"commit": True}})
    accelerator.end_training()
    assert [record.getMessage() for record in caplog.records] == [
        "init_kwargs has options for the tracker wandb, which is not used. They are left out."
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda a: a.init_trackers(""), "project_name must be a non-empty string"),
        (lambda a: a.init_trackers("p", config=[1]), r"config must be a dictionary \(got a list\)"),
        (lambda a: a.init_trackers("p", init_kwargs={"wnadb": {}}), "Unknown tracker in init_kwargs 'wnadb'.*'wandb'"),
        (lambda a: a.init_trackers("p", init_kwargs={"jsonl": {"resume_stp": 1}}), "Did you mean 'resume_step'"),
        (lambda a: a.init_trackers("p", isolation="prosess"), "Unknown isolation 'prosess'.*'process'"),
        (lambda a: a.get_tracker("jsonl"), "jsonl has not started. Call init_trackers first."),
        (lambda a: a.get_tracker("json"), "Unknown tracker 'json'. Known: jsonl. Did you mean 'jsonl'"),
    ],
)
def test_unsupported_calls_raise(tmp_path: Path, make: Any, message: str) -> None:
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
    with pytest.raises(ConfigurationError, match=message):
        make(accelerator)


def test_missing_and_unwritable_folders_raise(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path / "file" / "inside")
    with pytest.raises(ConfigurationError, match=r"jsonl cannot write to .*inside: Not a directory. Give another"):
        accelerator.init_trackers("p")
    config = ProjectConfiguration(logging_dir=str(tmp_path / "logs"))
    assert Accelerator(cpu=True, log_with="jsonl", project_config=config).logging_dir == str(tmp_path / "logs")
    assert Accelerator(cpu=True, log_with="jsonl", logging_dir=tmp_path).logging_dir == tmp_path
    with pytest.raises(ConfigurationError, match=r"logging_dir=.* contradict each other"):
        Accelerator(cpu=True, logging_dir="a", project_config=ProjectConfiguration(logging_dir="b"))


def test_the_main_process_reports_and_others_do_nothing(tmp_path: Path) -> None:
    class Everywhere(Listing):
        name = "everywhere"
        main_process_only = False

    def train() -> tuple[int, int, int, Any]:
        accelerator = Accelerator(cpu=True, log_with=["jsonl", Listing("l"), everywhere], project_dir=tmp_path)
        accelerator.init_trackers("digits")
        accelerator.log({"rank": accelerator.process_index}, step=1)
        blank = accelerator.get_tracker("jsonl")
        blank.log({"more": 1}, step=2)
        count = len(accelerator.trackers)
        accelerator.end_training()
        return accelerator.process_index, count, len(everywhere.run), type(blank).__name__

    everywhere = Everywhere("e")
    assert run_world(train, (), 2, timeout=60) == [(0, 3, 1, "TrackerHandle"), (1, 1, 1, "SilentTracker")]
    lines = [json.loads(line) for line in (tmp_path / "digits.jsonl").read_text().splitlines()]
    assert [(line["step"], line.get("rank")) for line in lines] == [(1, 0), (2, None)]
