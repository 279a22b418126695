"""Tests that each tracker stores what was logged, read back by its own reader if it has one."""

import importlib
import json
import math
import os
import re
import sqlite3
import subprocess
import sys
import time
import zipfile
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.imports import is_package_available
from trainer_lib.tracking import Patience, TrackerGroup

PATIENT = Patience(linger=0.02, finish=60.0)
SETTINGS = {"lr": 0.1, "model": {"layers": 2, "hub_token": "not-to-be-written"}, "names": ["a", "b"], "nothing": None}


def needs(module: str, extra: str) -> None:
    pytest.importorskip(module, reason=f"{module} is not installed: pip install trainer_lib[{extra}]")


def reported(tracker: str, folder: Path, token: str = "a" * 32, resume_step: int | None = None, **options: Any) -> None:
    """Report a run of three steps to a tracker, new or resumed."""
    begin = 0 if resume_step is None else resume_step
    trackers = TrackerGroup(
        tracker, "digits", folder, {tracker: options}, token=token, resume_step=resume_step, patience=PATIENT
    )
    trackers.store_init_configuration(SETTINGS)
    for step in range(begin + 1, begin + 4):
        trackers.log({"loss": 1.0 / step, "eval": {"accuracy": np.float32(0.5)}, "odd": math.nan}, step=step)
    trackers.finish()
    assert not list((folder / "spool").glob("*.jsonl")), (folder / "spool" / f"{tracker}.log").read_text()


def test_tensorboard(tmp_path: Path) -> None:
    needs("tensorboard", "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = TrackerGroup("tensorboard", "digits", tmp_path, patience=PATIENT)
    trackers.store_init_configuration(SETTINGS)
    for step in range(1, 6):
        trackers.log({"loss": 1.0 / step, "eval": {"accuracy": 0.5}, "odd": math.inf, "phase": "warm-up"}, step=step)
    (handle,) = trackers.trackers
    handle.log_images({"one": np.zeros((3, 4, 4), np.uint8), "two": np.zeros((2, 3, 4, 4), np.uint8)}, step=2)
    handle.log_images({"last": np.zeros((2, 5, 6, 3)), "sizes": [torch.zeros(3, 4, 4), torch.zeros(3, 6, 4)]}, step=2)
    handle.log_images({"described": np.zeros((4, 6, 3))}, step=2, dataformats="HWC")
    handle.log_table("table", ["a", "b"], [[1, "x"]], step=3)
    writer: Any = handle.tracker
    writer.add_scalar("by hand", 3.0, 1)
    trackers.finish()
    again = TrackerGroup("tensorboard", "digits", tmp_path, resume_step=3, patience=PATIENT)
    again.log({"loss": 9.0}, step=4)
    again.finish()

    read: Any = EventAccumulator(str(tmp_path / "digits"))
    read.Reload()
    # What was made after the step that training went on from is gone.
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [
        (1, 1.0),
        (2, 0.5),
        (3, pytest.approx(1 / 3)),
        (4, 9.0),
    ]
    assert [event.value for event in read.Scalars("odd")] == [math.inf] * 3
    assert read.Scalars("by hand")[0].value == 3.0
    sizes = {name: (image.height, image.width) for name in read.Tags()["images"] for image in read.Images(name)}
    assert sizes == {
        "one": (4, 4),
        "two": (4, 8),
        "last": (5, 12),
        "sizes/0": (4, 4),
        "sizes/1": (6, 4),
        "described": (4, 6),
    }
    assert {"phase/text_summary", "table/text_summary", "settings/text_summary"} <= set(read.Tags()["tensors"])
    assert "hub_token: '***'" in (tmp_path / "digits" / "hparams.yml").read_text()


def test_tensorboard_shows_figures_as_they_were_when_they_were_logged(tmp_path: Path) -> None:
    needs("tensorboard", "tensorboard")
    needs("matplotlib", "plot")
    needs("PIL", "images")
    from io import BytesIO

    from matplotlib.figure import Figure
    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = TrackerGroup("tensorboard", "digits", tmp_path, patience=PATIENT)
    (handle,) = trackers.trackers
    figure = Figure(figsize=(2, 1), dpi=50, facecolor="red")
    canvas = figure.canvas
    handle.log_images({"figure": figure, "several": [figure, figure]}, step=1)
    figure.set_facecolor("blue")
    assert figure.canvas is canvas  # a window that shows it stays its window
    trackers.finish()

    read: Any = EventAccumulator(str(tmp_path / "digits"))
    read.Reload()
    (image,) = read.Images("figure")
    assert Image.open(BytesIO(image.encoded_image_string)).convert("RGB").getpixel((1, 1)) == (255, 0, 0)
    assert (image.width, image.height, read.Images("several")[0].width) == (100, 50, 200)


def test_tensorboard_shows_several_images_with_transparency(tmp_path: Path) -> None:
    needs("tensorboard", "tensorboard")
    needs("PIL", "images")
    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = TrackerGroup("tensorboard", "digits", tmp_path, patience=PATIENT)
    (handle,) = trackers.trackers
    handle.log_images({"pictures": [Image.new("RGBA", (8, 6), "red")] * 2, "tensor": torch.rand(2, 4, 6, 8)}, step=1)
    trackers.finish()
    read: Any = EventAccumulator(str(tmp_path / "digits"))
    read.Reload()
    sizes = {name: (image.height, image.width) for name in read.Tags()["images"] for image in read.Images(name)}
    assert sizes == dict.fromkeys(["pictures/0", "pictures/1", "tensor/0", "tensor/1"], (6, 8))


def test_tensorboard_keeps_the_rows_of_a_table_whole(tmp_path: Path) -> None:
    needs("tensorboard", "tensorboard")
    from markdown import markdown  # as TensorBoard's page does
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = TrackerGroup("tensorboard", "digits", tmp_path, patience=PATIENT)
    (handle,) = trackers.trackers
    handle.log_table("answers", ["a|b", "text"], [[1, "two\nlines"], [2, "x|y"]], step=1)
    trackers.finish()
    read: Any = EventAccumulator(str(tmp_path / "digits"))
    read.Reload()
    (event,) = read.Tensors("answers/text_summary")
    page = markdown(event.tensor_proto.string_val[0].decode(), extensions=["tables"])
    assert page.count("<tr>") == 3
    assert re.findall("<t[dh]>(.*?)</t[dh]>", page) == ["a|b", "text", "1", "two<br>lines", "2", "x|y"]


def test_an_image_that_cannot_be_read_hurts_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    needs("tensorboard", "tensorboard")
    needs("matplotlib", "plot")
    from matplotlib.figure import Figure
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = TrackerGroup("tensorboard", "digits", tmp_path, patience=PATIENT)
    (handle,) = trackers.trackers
    figure = Figure()
    figure.suptitle(r"$\frac{$")
    handle.log_images({"first": torch.rand(3, 4, 4), "mistake": figure, "text": "a", "last": torch.rand(4, 4)}, step=1)
    trackers.finish()
    read: Any = EventAccumulator(str(tmp_path / "digits"))
    read.Reload()
    assert set(read.Tags()["images"]) == {"first", "last"}
    assert caplog.messages[0].startswith("The tracker tensorboard cannot take mistake (ValueError: ")
    assert caplog.messages[1].startswith("The tracker tensorboard cannot take text (TypeError: an image must be ")


def test_jsonl_continues_where_training_resumes(tmp_path: Path) -> None:
    reported("jsonl", tmp_path)
    reported("jsonl", tmp_path, resume_step=2)
    lines = [json.loads(line) for line in (tmp_path / "digits.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "step" in line] == [1, 2, 3, 4, 5]
    assert lines[1]["odd"] == "NaN"
    reported("jsonl", tmp_path)
    assert len((tmp_path / "digits.jsonl.old").read_text().splitlines()) == len(lines)


def test_jsonl_keeps_the_step_of_a_call_beside_a_value_of_that_name(tmp_path: Path) -> None:
    for resume_step in (None, 2):
        trackers = TrackerGroup("jsonl", "digits", tmp_path, resume_step=resume_step, patience=PATIENT)
        for step in range((resume_step or 0) + 1, 4):
            trackers.log({"step": 10 * step, "loss": 0.5}, step=step)
        trackers.log({"step": "none"})  # without a step it is a value like others
        trackers.finish()
    lines = [json.loads(line) for line in (tmp_path / "digits.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, "none", 3, "none"]


@pytest.mark.parametrize("name", ["jsonl", "tensorboard"])
def test_numbers_of_numpy_are_taken(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    needs(name, name) if name != "jsonl" else None
    trackers = TrackerGroup(name, "digits", tmp_path, patience=PATIENT)
    trackers.store_init_configuration({"lr": np.float64(0.5), "level": IntEnum("Level", "LOW").LOW})  # type: ignore[attr-defined]
    trackers.log({"loss": np.float64(0.25)}, step=np.int64(3))  # type: ignore[arg-type]
    trackers.log({"loss": 0.125}, step=torch.tensor(4))  # type: ignore[arg-type]
    trackers.finish()
    assert caplog.messages == []
    if name == "jsonl":
        lines = [json.loads(line) for line in (tmp_path / "digits.jsonl").read_text().splitlines()]
        assert lines[0] == {"settings": {"lr": 0.5, "level": 1}}
        assert [(line["step"], line["loss"]) for line in lines[1:]] == [(3, 0.25), (4, 0.125)]
    else:
        assert (tmp_path / "digits" / "hparams.yml").read_text() == "level: 1\nlr: 0.5\n"


@pytest.mark.slow
def test_comet_offline(tmp_path: Path) -> None:
    needs("comet_ml", "comet")
    reported("comet_ml", tmp_path, online=False)
    (archive,) = (tmp_path / "comet").glob("*.zip")
    assert archive.name.startswith("a" * 32)
    messages = [json.loads(line) for line in zipfile.ZipFile(archive).read("messages.json").decode().splitlines()]
    metrics = [message["payload"]["metric"] for message in messages if message["type"] == "metric_msg"]
    losses = [(metric["metricName"], metric["metricValue"], metric["step"]) for metric in metrics]
    assert [point for point in losses if point[0] == "loss"] == [("loss", 1.0, 1), ("loss", 0.5, 2), ("loss", 1 / 3, 3)]
    assert ("eval/accuracy", 0.5, 3) in losses
    text = json.dumps(messages)
    assert "not-to-be-written" not in text
    assert "model/layers" in text


@pytest.mark.slow
def test_comet_takes_a_configuration_beside_the_name_that_the_trainer_gives(tmp_path: Path) -> None:
    program = """
import sys
from comet_ml import ExperimentConfig
from trainer_lib.tracking import Patience, TrackerGroup
configuration = ExperimentConfig(name="mine", offline_directory=sys.argv[1] + "/mine")
options = {"online": False, "name": "run", "experiment_config": configuration}
trackers = TrackerGroup("comet_ml", "digits", sys.argv[1], {"comet_ml": options}, patience=Patience(finish=60.0))
trackers.log({"loss": 0.5}, step=1)
trackers.finish()
"""
    if not is_package_available("comet_ml"):
        pytest.skip("comet_ml is not installed: pip install trainer_lib[comet]")
    # In a process of its own, since the package leaves files and threads behind.
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=300, env=variables)
    (archive,) = (tmp_path / "mine").glob("*.zip")
    assert '"value":"mine"' in zipfile.ZipFile(archive).read("messages.json").decode().replace(" ", "")


@pytest.mark.slow
def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("trackio", "trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    reported("trackio", tmp_path, name="first")
    reported("trackio", tmp_path, name="first", resume_step=3)
    (database,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select run_name, step, metrics from metrics order by step").fetchall()
    connection.close()
    assert [(run, step, json.loads(metrics)["loss"]) for run, step, metrics in rows] == [
        ("first", step, 1.0 / step) for step in range(1, 7)
    ]


@pytest.mark.slow
def test_trackio_keeps_a_run_with_large_integers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("trackio", "trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackers = TrackerGroup("trackio", "digits", tmp_path, patience=PATIENT)
    trackers.store_init_configuration({"large": 10**30})
    trackers.log({"loss": 0.5, "tokens": 10**30}, step=1)
    trackers.finish()
    (database,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics from metrics").fetchall()
    connection.close()
    assert [(step, json.loads(metrics)) for step, metrics in rows] == [(1, {"loss": 0.5, "tokens": 1e30})]


@pytest.mark.slow
def test_wandb_offline(tmp_path: Path) -> None:
    needs("wandb", "wandb")
    reported("wandb", tmp_path, mode="offline")
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert "a" * 32 in file.name
    ends = time.monotonic() + 60  # its own process writes the file
    while b"accuracy" not in file.read_bytes() and time.monotonic() < ends:
        time.sleep(0.05)
    written = file.read_bytes()
    assert b"eval" in written
    assert b"accuracy" in written
    assert b"not-to-be-written" not in written


@pytest.mark.slow
def test_wandb_says_that_it_drops_values_of_steps_before_its_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    needs("wandb", "wandb")
    trackers = TrackerGroup("wandb", "digits", tmp_path, {"wandb": {"mode": "offline"}}, patience=PATIENT)
    for step in (5, 5, 3, 4, 6):
        trackers.log({"loss": 0.5}, step=step)
    trackers.finish()
    (message,) = (record.getMessage() for record in caplog.records if "drops values" in record.getMessage())
    assert "these are of step 3, and step 5 is reported already. Log them without a step." in message


@pytest.mark.parametrize("project", ["vision/digits", "digits: first", "d" * 129])
def test_wandb_refuses_a_project_at_the_start(tmp_path: Path, project: str) -> None:
    needs("wandb", "wandb")
    with pytest.raises(ConfigurationError, match=r"W&B does not take .* as the name of a project: it has "):
        TrackerGroup("wandb", project, tmp_path, {"wandb": {"mode": "offline"}})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_images_of_floats_are_stored_as_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    needs(name, name)
    from PIL import Image

    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.chdir(tmp_path)
    options = {"wandb": {"mode": "offline"}, "mlflow": {"tracking_uri": "sqlite:///mlflow.db"}}.get(name, {})
    trackers = TrackerGroup(name, "digits", tmp_path, {name: options}, patience=PATIENT)
    (handle,) = trackers.trackers
    handle.log_images({"half": torch.full((3, 8, 6), 0.5), "gray": torch.full((1, 8, 6), 0.5)}, step=1)
    trackers.finish()
    images = [Image.open(file).convert("RGB") for file in tmp_path.rglob("*.png")]
    assert len(images) >= 2
    assert {(image.size, image.getpixel((2, 2))) for image in images} == {((6, 8), (127, 127, 127))}


def test_swanlab_offline(tmp_path: Path) -> None:
    needs("swanlab", "swanlab")
    reported("swanlab", tmp_path, mode="offline")
    written = b"".join(file.read_bytes() for file in (tmp_path / "swanlab").rglob("*") if file.is_file())
    assert b"accuracy" in written


def test_dvclive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("dvclive", "dvclive")
    monkeypatch.chdir(tmp_path)  # it makes a repository of DVC in one of git
    reported("dvclive", tmp_path, save_dvc_exp=False, dvcyaml=None)
    metrics = json.loads((tmp_path / "dvclive" / "metrics.json").read_text())
    assert (metrics["step"], metrics["loss"]) == (3, 1 / 3)
    assert (tmp_path / "dvclive" / "plots" / "metrics" / "loss.tsv").read_text().splitlines()[1:] == [
        "1\t1.0",
        "2\t0.5",
        f"3\t{1 / 3}",
    ]


def test_clearml_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("clearml", "clearml")
    monkeypatch.setenv("CLEARML_OFFLINE_MODE", "1")
    monkeypatch.setenv("CLEARML_CACHE_DIR", str(tmp_path / "clearml"))
    reported("clearml", tmp_path)
    written = b"".join(file.read_bytes() for file in (tmp_path / "clearml").rglob("*metrics*") if file.is_file())
    assert b"loss" in written


@pytest.mark.slow
def test_aim_continues_its_run(tmp_path: Path) -> None:
    needs("aim", "aim")
    (tmp_path / ".aim" / "locks").mkdir(parents=True)  # left by a program that was killed while it made the repository
    reported("aim", tmp_path, name="first")
    reported("aim", tmp_path, name="first", resume_step=2)  # goes back by a step
    trackers = TrackerGroup("aim", "digits", tmp_path, patience=PATIENT)
    (handle,) = trackers.trackers
    pictures = {"one": torch.rand(3, 4, 4), "two": np.zeros((2, 4, 4, 3), np.uint8)}
    handle.log_images(
        pictures, step=3, kwargs={"aim_image": {"caption": "seen"}, "track": {"context": {"set": "test"}}}
    )
    trackers.log({"phase": "warm-up"}, step=3)
    trackers.finish()
    program = "from aim.cli.cli import cli_entry_point; cli_entry_point()"
    # As `aim up` does while it shows runs.
    arguments = ["storage", "--repo", str(tmp_path), "reindex", "--yes"]
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, capture_output=True, timeout=300)
    runs = {run.name: run for run in importlib.import_module("aim").Repo(str(tmp_path)).iter_runs()}
    assert set(runs) == {"first", "digits"}
    assert {run.experiment for run in runs.values()} == {"digits"}
    values = {metric.name: metric.dataframe() for metric in runs["first"].metrics()}
    assert dict(zip(values["loss"]["step"], values["loss"]["value"], strict=True)) == {
        step: 1.0 / step for step in range(1, 6)
    }
    assert values["eval/accuracy"]["value"].tolist() == [0.5] * 5
    assert runs["first"]["hparams"]["model"] == {"layers": 2, "hub_token": "***"}
    stored = runs["digits"].collect_sequence_info(("images", "texts"))
    assert [text["values"]["first"].data for text in stored["texts"]] == ["warm-up"]
    assert {image["name"]: (image["context"], image["values"]["first_step"]) for image in stored["images"]} == {
        name: ({"set": "test"}, 3) for name in pictures
    }
    one = next(image["values"]["first"] for image in stored["images"] if image["name"] == "one")
    assert (one.caption, one.width, one.height) == ("seen", 4, 4)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mlflow", {"tracking_uri": "htp://host"}, "Unknown kind of address 'htp'.*Did you mean 'http'"),
        ("mlflow", {"tracking_uri": "http://"}, "has no host"),
        ("mlflow", {"tracking_uri": "/some/folder"}, "is a folder, which MLflow no longer writes to"),
        ("mlflow", {"tracking_uri": "sqlite:////proc/nowhere/ml.db"}, "mlflow cannot write to /proc/nowhere"),
        ("comet_ml", {}, "comet_ml has no key. Set COMET_API_KEY"),
        ("wandb", {}, "wandb has no key. Set WANDB_API_KEY"),
        ("wandb", {"mode": "ofline"}, "Unknown mode of wandb 'ofline'.*Did you mean 'offline'"),
        ("swanlab", {"mode": "online"}, "swanlab has no key"),
        ("swanlab", {"mode": "of"}, "Unknown mode of swanlab 'of'"),
        ("clearml", {}, "clearml is not configured"),
    ],
)
def test_configuration_errors_are_raised_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for variable in ("COMET_API_KEY", "WANDB_API_KEY", "WANDB_MODE", "SWANLAB_API_KEY", "CLEARML_API_ACCESS_KEY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("trainer_lib.tracking.base.is_package_available", lambda module: True)
    with pytest.raises(ConfigurationError, match=message):
        TrackerGroup(name, "digits", tmp_path, {name: options})


def test_names_that_mlflow_refuses_are_changed() -> None:
    from trainer_lib.tracking import MLflowTracker

    assert MLflowTracker.metric_name("train/loss@8!") == "train/loss_8_"
    assert MLflowTracker.metric_name("a" * 300) == "a" * 250
    # MLflow refuses names that lead elsewhere as paths of files, and with one of them all values of a call.
    names = ["train//loss", "/loss", "loss/", "./a/../b", "..", "", "a" * 249 + "/b"]
    assert [MLflowTracker.metric_name(name) for name in names] == [
        "train/loss", "loss", "loss", "a/b", "_", "_", "a" * 249,
    ]  # fmt: skip
