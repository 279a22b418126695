"""This file is the tracker that reports to MLflow: a database, or a server."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError, unknown
from trainer_lib.foundation.imports import require
from trainer_lib.tracking.base import BuiltInTracker, Point, check_folder, on_main_process
from trainer_lib.tracking.delivery.plain_values import flat

_DATABASES = ("sqlite", "mysql", "postgresql", "mssql")
_SCHEMES = (*_DATABASES, "http", "https", "databricks", "databricks-uc", "uc", "file")
_REFUSED = re.compile(r"[^/\w.\- :]")
_STATUS = {"failed": "FAILED", "interrupted": "KILLED"}
_TOKEN = "trainer_lib.run"  # the tag by which the run of an earlier program is found
_LONGEST_NAME, _LONGEST_VALUE = 250, 6000
_METRICS_AT_ONCE, _SETTINGS_AT_ONCE = 1000, 100


class MLflowTracker(BuiltInTracker):
    """Reports to MLflow.

    Args:
        experiment_name: The experiment; `MLFLOW_EXPERIMENT_NAME` overrules it.
        logging_dir: The address, as Accelerate calls it.
        run_id: A run to go on with.
        tags: Tags of the run.
        nested_run: Whether it is part of the run that `MLFLOW_RUN_ID` names.
        run_name: The name of the run.
        description: A description of it.
        tracking_uri: The address of a database or a server; by default `MLFLOW_TRACKING_URI`, else MLflow's own.
        token: What the run is found by again.
    """

    name: ClassVar[str] = "mlflow"
    module: ClassVar[str] = "mlflow"
    extra: ClassVar[str] = "mlflow"
    takes_texts: ClassVar[bool] = False
    channels_last: ClassVar[bool] = True
    # The queue tries again, so that MLflow need not for minutes.
    environment: ClassVar[Mapping[str, str]] = {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    }

    @on_main_process
    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | Path | None = None,
        run_id: str | None = None,
        tags: Mapping[str, Any] | None = None,
        nested_run: bool = False,
        run_name: str | None = None,
        description: str | None = None,
        tracking_uri: str | None = None,
        token: str | None = None,
    ) -> None:
        super().__init__()
        self._experiment = environment.variable("MLFLOW_EXPERIMENT_NAME") or experiment_name or "Default"
        self._uri = tracking_uri or (None if logging_dir is None else str(logging_dir))
        self._run_id, self._parent = run_id, None
        if nested_run:
            self._parent = environment.variable("MLFLOW_RUN_ID")
        self._tags = dict(tags or {})
        if description is not None:
            self._tags["mlflow.note.content"] = description
        self._run_name, self._token = run_name, token
        self._run: Any = None
        self._client: Any = None

    @classmethod
    def check(cls, project: str, **options: Any) -> None:
        """Raise for an address that MLflow cannot mean."""
        given = options.get("tracking_uri") or options.get("logging_dir") or environment.variable("MLFLOW_TRACKING_URI")
        if given is None:
            return
        uri = str(given)
        scheme = urlsplit(uri).scheme.partition("+")[0] if "://" in uri else uri if uri in _SCHEMES else "file"
        if scheme not in _SCHEMES:
            raise ConfigurationError(f"tracking_uri={uri!r}: {unknown('kind of address', scheme, _SCHEMES)}")
        if scheme in ("http", "https") and not urlsplit(uri).hostname:
            raise ConfigurationError(f"tracking_uri={uri!r} names no host. Give one such as http://127.0.0.1:5000.")
        if scheme == "file" and not environment.parse_flag_from_env("MLFLOW_ALLOW_FILE_STORE"):
            raise ConfigurationError(
                f"tracking_uri={uri!r} is a folder, which MLflow no longer writes to. Give a database: "
                "sqlite:///mlflow.db."
            )
        if scheme == "sqlite" and (path := uri.partition(":///")[2].partition("?")[0]):
            check_folder(Path(path).parent, cls.name)

    @classmethod
    def runs_apart(cls, **options: Any) -> bool:
        """Always: a server may be away, and a database locked."""
        return True

    @classmethod
    def metric_name(cls, name: str) -> str:
        """Return a name that MLflow takes."""
        return _REFUSED.sub("_", name)[:_LONGEST_NAME]

    @classmethod
    def continuing(cls, token: str, resume_step: int | None) -> dict[str, Any]:
        """Return the options that make it find its run."""
        return {"token": token}

    @classmethod
    def named(cls, run_name: str) -> dict[str, Any]:
        """Return the options that give a run its name."""
        return {"run_name": run_name}

    @property
    def tracker(self) -> Any:
        """The run, as MLflow has it."""
        return self._run

    @on_main_process
    def start(self) -> None:
        """Find the experiment and the run, or make them."""
        self._client = require(self.module, self.extra).MlflowClient(tracking_uri=self._uri)
        self._run = self._client.get_run(self._run_id) if self._run_id else self._found_or_made()
        self._client.update_run(self._run.info.run_id, status="RUNNING")

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the settings as parameters; one that changed, which MLflow has no place for, becomes a tag."""
        entities = require("mlflow.entities", self.extra)

        there = self._client.get_run(self._run.info.run_id).data.params
        params: list[Any] = []
        tags: list[Any] = []
        for name, value in flat(values, ".").items():
            key, text = self.metric_name(name), str(value)[:_LONGEST_VALUE]
            if key not in there:
                params.append(entities.Param(key, text))
            elif there[key] != text:
                tags.append(entities.RunTag(f"changed.{key}", text[:5000]))
        for part in _parts(params, _SETTINGS_AT_ONCE):
            self._client.log_batch(self._run.info.run_id, params=part)
        for part in _parts(tags, _SETTINGS_AT_ONCE):
            self._client.log_batch(self._run.info.run_id, tags=part)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers."""
        import time

        self.log_points([Point(values, step, time.time(), kwargs)])

    @on_main_process
    def log_points(self, points: Sequence[Point]) -> None:
        """Log the numbers of several calls, with their times."""
        entities = require("mlflow.entities", self.extra)

        metrics = [
            entities.Metric(self.metric_name(name), float(value), int(point.time * 1000), point.step or 0)
            for point in points
            for name, value in flat(point.values).items()
        ]
        for part in _parts(metrics, _METRICS_AT_ONCE):
            self._client.log_batch(self._run.info.run_id, metrics=part)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log pictures, with their channels last."""
        for name, value in values.items():
            for picture in value if value.ndim == 4 else [value]:
                self._client.log_image(self._run.info.run_id, picture, key=self.metric_name(name), step=step, **kwargs)

    @on_main_process
    def log_table(
        self, table_name: str, columns: list[str], data: list[list[Any]], step: int | None = None, **kwargs: Any
    ) -> None:
        """Log a table, as a file of JSON."""
        file = f"{table_name}.json" if step is None else f"{table_name}-{step}.json"
        self._client.log_dict(self._run.info.run_id, {"columns": columns, "data": data}, file, **kwargs)

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Log a figure of matplotlib or plotly."""
        self._client.log_figure(self._run.info.run_id, figure, artifact_file, **save_kwargs)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Log all files in a folder."""
        self._client.log_artifacts(self._run.info.run_id, local_dir, artifact_path)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Log a file, or a folder."""
        if Path(local_path).is_dir():
            self.log_artifacts(local_path, artifact_path)
        else:
            self._client.log_artifact(self._run.info.run_id, local_path, artifact_path)

    @on_main_process
    def finish(self) -> None:
        """Tell how the run ended."""
        self._client.set_terminated(self._run.info.run_id, _STATUS.get(self.outcome, "FINISHED"))

    def _found_or_made(self) -> Any:
        experiment = self._experiment_id()
        if self._token is not None:
            found = self._client.search_runs([experiment], f"tags.`{_TOKEN}` = '{self._token}'", max_results=1)
            if found:
                return found[0]
        tags = dict(self._tags)
        if self._token is not None:
            tags[_TOKEN] = self._token
        if self._parent is not None:
            tags["mlflow.parentRunId"] = self._parent
        return self._client.create_run(experiment, tags=tags, run_name=self._run_name)

    def _experiment_id(self) -> str:
        there = self._client.get_experiment_by_name(self._experiment)
        return self._client.create_experiment(self._experiment) if there is None else there.experiment_id


def _parts(values: list[Any], size: int) -> Iterator[list[Any]]:
    return (values[start : start + size] for start in range(0, len(values), size))
