"""Tests of MLflow: a database, and a server that is killed and restarted."""

import importlib
import math
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer_lib.foundation.imports import is_package_available
from trainer_lib.processes.ports import free_port
from trainer_lib.tracking import Patience, TrackerGroup

if not is_package_available("mlflow"):
    pytest.skip("mlflow is not installed: pip install trainer_lib[mlflow]", allow_module_level=True)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # those of SQLAlchemy in MLflow, where the tests read
]

PATIENT = Patience(linger=0.05, call=20.0, finish=60.0, first_pause=0.2, longest_pause=1.0)
TOKEN = "b" * 32


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with its tables, which take seconds to make."""
    return tmp_path_factory.mktemp("mlflow") / "ml.db"


class Server:
    """A real server, on a free port of this machine."""

    def __init__(self, folder: Path, database: Path) -> None:
        self._folder, self._database = folder, database
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: Any = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--backend-store-uri", f"sqlite:///{self._database}", "--workers", "1"]
        command += ["--artifacts-destination", str(self._folder / "artifacts")]
        environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self._folder, env=environment, start_new_session=True
            )

    def wait(self) -> None:
        end = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=2):
                    return
            except OSError:
                assert time.monotonic() < end, (self._folder / "server.log").read_text()
                time.sleep(0.1)

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture
def server(tmp_path: Path, database: Path) -> Iterator[Server]:
    mlflow_server = Server(tmp_path, database)
    try:
        yield mlflow_server
    finally:
        mlflow_server.kill()


def group(uri: str, folder: Path, **more: Any) -> TrackerGroup:
    return TrackerGroup("mlflow", "digits", folder, {"mlflow": {"tracking_uri": uri}}, patience=PATIENT, **more)


def reader(uri: str) -> Any:
    return importlib.import_module("mlflow").MlflowClient(tracking_uri=uri)


def the_run(uri: str, token: str) -> tuple[Any, Any]:
    client = reader(uri)
    experiment = client.get_experiment_by_name("digits")
    (run,) = client.search_runs([experiment.experiment_id], f"tags.`trainer_lib.run` = '{token}'")
    return client, run


def test_a_database(tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where MLflow puts artifacts
    uri = f"sqlite:///{database}"
    trackers = group(uri, tmp_path, token=TOKEN)
    trackers.store_init_configuration({"lr": 0.1, "model": {"layers": 2}, "api_key": "k", "long": "x" * 7000})
    for step in range(1, 4):
        trackers.log({"loss": 1.0 / step, "eval": {"a@1": 0.5}, "odd": math.nan, "norms//": 2.0}, step=step)
    (handle,) = trackers.trackers
    (tmp_path / "notes.txt").write_text("hello")
    handle.log_artifact(tmp_path / "notes.txt", "notes")
    handle.log_table("table", ["a"], [[1]], step=3)
    trackers.finish("interrupted")

    again = group(uri, tmp_path, token=TOKEN, resume_step=3)  # the same run, by its tag
    again.store_init_configuration({"lr": 0.2, "model": {"layers": 2}})
    again.log({"loss": 0.25}, step=4)
    again.finish()

    client, run = the_run(uri, TOKEN)
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(1, 1.0), (2, 0.5), (3, 1.0 / 3), (4, 0.25)]
    assert all(abs(point.timestamp / 1000 - time.time()) < 300 for point in history)
    assert run.info.status == "FINISHED"
    assert {name: run.data.params[name] for name in ("lr", "model.layers", "api_key")} == {
        "lr": "0.1",
        "model.layers": "2",
        "api_key": "***",
    }
    assert len(run.data.params["long"]) == 6000
    assert run.data.tags["changed.lr"] == "0.2"
    assert (run.data.metrics["eval/a_1"], run.data.metrics["norms"]) == (0.5, 2.0)
    assert math.isnan(run.data.metrics["odd"])
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"notes", "table-3.json"}


def test_names_that_mlflow_makes_the_same_keep_their_values(
    tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{database}"
    trackers = group(uri, tmp_path, token="d" * 32)
    trackers.store_init_configuration({"a@b": 1, "a_b": 2, "x//y": 3, "x": {"y": 4}})
    for step in (1, 2):
        trackers.log({"loss@8": 1.0, "loss_8": 2.0, "loss!8": 3.0, "x" * 300: 4.0, "x" * 400: 5.0}, step=step)
    trackers.log({"loss@8": 6.0}, step=3)
    trackers.finish()

    client, run = the_run(uri, "d" * 32)
    assert run.data.params == {"a_b": "2", "a_b_2": "1", "x.y": "4", "x/y": "3"}
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    assert {name: [(point.step, point.value) for point in history] for name, history in histories.items()} == {
        "loss_8": [(1, 2.0), (2, 2.0)],
        "loss_8_2": [(1, 3.0), (2, 3.0)],
        "loss_8_3": [(1, 1.0), (2, 1.0), (3, 6.0)],
        "x" * 250: [(1, 4.0), (2, 4.0)],
        "x" * 245 + "_2": [(1, 5.0), (2, 5.0)],
    }


def test_a_tracker_of_your_own_takes_mlflows_variables(
    tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from trainer_lib.tracking import MLflowTracker

    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{database}"
    monkeypatch.setenv("MLFLOW_TAGS", '{"team": "b"}')
    tracker = MLflowTracker("variables", "kept", tracking_uri=uri, tags={"team": "a"})
    tracker.start()
    tracker.log({"accuracy": 0.95, "text": "left out"}, step=10)
    tracker.finish()
    assert "text is a str: it is left out" in caplog.text
    run_id = tracker.active_run.info.run_id

    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    again = MLflowTracker("variables", tracking_uri=uri)
    again.start()
    assert again.active_run.info.run_id == run_id
    again.log({"accuracy": 1.0}, step=11)
    again.finish()
    for text, nested in (("no", False), ("yes", True)):
        monkeypatch.setenv("MLFLOW_NESTED_RUN", text)
        assert MLflowTracker("variables", tracking_uri=uri, nested_run=not nested).nested_run is nested
    child = MLflowTracker("variables", tracking_uri=uri)
    child.start()
    child.finish()
    assert child.active_run.data.tags["mlflow.parentRunId"] == run_id

    run = reader(uri).get_run(run_id)
    assert Path(run.info.artifact_uri).is_relative_to(tmp_path / "kept")
    assert run.data.metrics == {"accuracy": 1.0}
    assert run.data.tags["team"] == "b"


@pytest.mark.server
def test_a_server_that_is_killed_and_comes_back(
    tmp_path: Path, database: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.start()
    server.wait()
    trackers = group(server.uri, tmp_path, token="c" * 32)
    spool = tmp_path / "spool" / "mlflow.jsonl"
    trackers.log({"loss": 0.0}, step=0)
    client = reader(f"sqlite:///{database}")

    def arrived() -> list[int]:
        experiment = client.get_experiment_by_name("digits")
        runs = (
            []
            if experiment is None
            else client.search_runs([experiment.experiment_id], f"tags.`trainer_lib.run` = '{'c' * 32}'")
        )
        return [point.step for point in client.get_metric_history(runs[0].info.run_id, "loss")] if runs else []

    end = time.monotonic() + 60
    while arrived() != [0]:
        assert time.monotonic() < end, (tmp_path / "spool" / "mlflow.log").read_text()
        time.sleep(0.1)
    server.kill()
    durations = []
    for step in range(1, 50):
        begun = time.perf_counter()
        trackers.log({"loss": float(step)}, step=step)
        durations.append(time.perf_counter() - begun)
        time.sleep(0.01)
    assert sorted(durations)[-3] < 0.05  # but for what other programs on the machine do
    end = time.monotonic() + 60
    while not spool.exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    server.start()  # on the same port
    server.wait()
    end = time.monotonic() + 60
    while sorted(set(arrived())) != list(range(50)):
        assert time.monotonic() < end, sorted(set(arrived()))
        time.sleep(0.1)
    trackers.finish()
    assert not spool.exists()
    assert len(caplog.records) == 1
    assert the_run(server.uri, "c" * 32)[1].info.status == "FINISHED"
