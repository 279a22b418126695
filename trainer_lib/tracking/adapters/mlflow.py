"""MLflow tracker: a database or a server."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from trainer_lib.foundation import environment
from trainer_lib.foundation.errors import ConfigurationError, unknown
from trainer_lib.foundation.imports import require
from trainer_lib.logging import get_logger
from trainer_lib.tracking.adapters.vendor import images_by_name
from trainer_lib.tracking.base import BuiltInTracker, Point, check_folder, on_main_process
from trainer_lib.tracking.delivery.plain_values import flat, plain_metrics

_logger = get_logger(__name__)
_DATABASES = ("sqlite", "mysql", "postgresql", "mssql")
_SCHEMES = (*_DATABASES, "http", "https", "databricks", "databricks-uc", "uc", "file")
_REFUSED = re.compile(r"[^/\w.\- :]")
_STATUS = {"failed": "FAILED", "interrupted": "KILLED"}
_TOKEN = "trainer_lib.run"  # the tag that identifies a run across resumes
_LONGEST_NAME, _LONGEST_VALUE = 250, 6000
_METRICS_AT_ONCE, _SETTINGS_AT_ONCE = 1000, 100


class MLflowTracker(BuiltInTracker):
    """Reports to MLflow.

    Args:
        experiment_name: The experiment; `MLFLOW_EXPERIMENT_NAME` overrides it.
        logging_dir: Where a new experiment keeps its artifacts; by default MLflow's place.
        run_id: The id of a run to continue; `MLFLOW_RUN_ID` overrides it.
        tags: Tags of the run, as a dict or as JSON; `MLFLOW_TAGS` overrides them.
        nested_run: Whether it is a child of the run in `MLFLOW_RUN_ID`; `MLFLOW_NESTED_RUN` overrides it.
        run_name: The name of the run.
        description: The description of the run.
        tracking_uri: The address of a database or a server; by default `MLFLOW_TRACKING_URI`, or MLflow's default.
        token: The identifier of the run across resumes.
    """

    name: ClassVar[str] = "mlflow"
    module: ClassVar[str] = "mlflow"
    extra: ClassVar[str] = "mlflow"
    takes_texts: ClassVar[bool] = False
    channels_last: ClassVar[bool] = True
    # The queue retries, so MLflow should not retry for minutes.
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
        tags: Mapping[str, Any] | str | None = None,
        nested_run: bool = False,
        run_name: str | None = None,
        description: str | None = None,
        tracking_uri: str | None = None,
        token: str | None = None,
    ) -> None:
        super().__init__()
        self._experiment = environment.variable("MLFLOW_EXPERIMENT_NAME") or experiment_name or "Default"
        self._uri = tracking_uri
        self._artifacts = None if logging_dir is None else str(logging_dir)
        self.nested_run: bool = environment.parse_flag_from_env("MLFLOW_NESTED_RUN", nested_run)
        self._run_id, self._parent = run_id, environment.variable("MLFLOW_RUN_ID")
        if not self.nested_run:
            self._run_id, self._parent = self._parent or run_id, None
        tags = environment.variable("MLFLOW_TAGS") or tags
        self._tags: dict[str, Any] = json.loads(tags) if isinstance(tags, str) else dict(tags or {})
        if description is not None:
            self._tags["mlflow.note.content"] = description
        self._run_name, self._token = run_name, token
        self._metric_keys: dict[str, str] = {}
        self._run: Any = None
        self._client: Any = None

    @classmethod
    def check(cls, project: str, **options: Any) -> None:
        """Raise for an address that MLflow does not support."""
        address = options.get("tracking_uri") or environment.variable("MLFLOW_TRACKING_URI")
        if address is None:
            return
        uri = str(address)
        scheme = urlsplit(uri).scheme.partition("+")[0] if "://" in uri else uri if uri in _SCHEMES else "file"
        if scheme not in _SCHEMES:
            raise ConfigurationError(f"tracking_uri={uri!r}: {unknown('kind of address', scheme, _SCHEMES)}")
        if scheme in ("http", "https") and not urlsplit(uri).hostname:
            raise ConfigurationError(
                f"tracking_uri has no host (got {uri!r}). Give an address such as http://127.0.0.1:5000."
            )
        if scheme == "file" and not environment.parse_flag_from_env("MLFLOW_ALLOW_FILE_STORE"):
            raise ConfigurationError(
                f"tracking_uri={uri!r} is a folder, which MLflow no longer writes to. Give a database: "
                "sqlite:///mlflow.db."
            )
        if scheme == "sqlite" and (path := uri.partition(":///")[2].partition("?")[0]):
            check_folder(Path(path).parent, cls.name)

    @classmethod
    def runs_apart(cls, **options: Any) -> bool:
        """Always: the server may be unreachable, or the database locked."""
        return True

    @classmethod
    def metric_name(cls, name: str) -> str:
        """Return a name that MLflow accepts: as a path of files, too, it has to lead to itself."""
        parts = _REFUSED.sub("_", name)[:_LONGEST_NAME].split("/")
        return "/".join(part for part in parts if part not in ("", ".", "..")) or "_"

    @classmethod
    def continuing(cls, token: str, resume_step: int | None) -> dict[str, Any]:
        """Return the options with which it finds its run."""
        return {"token": token}

    @classmethod
    def named(cls, run_name: str) -> dict[str, Any]:
        """Return the options that set the run's name."""
        return {"run_name": run_name}

    @property
    def tracker(self) -> Any:
        """MLflow's run object."""
        return self._run

    @property
    def active_run(self) -> Any:
        """MLflow's run object, under Accelerate's name."""
        return self._run

    @on_main_process
    def start(self) -> None:
        """Find or create the experiment and the run."""
        self._client = require(self.module, self.extra).MlflowClient(tracking_uri=self._uri)
        self._run = self._client.get_run(self._run_id) if self._run_id else self._find_or_create_run()
        self._client.update_run(self._run.info.run_id, status="RUNNING")

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the settings as parameters. MLflow's parameters cannot change, so a changed setting becomes a tag."""
        entities = require("mlflow.entities", self.extra)

        logged = self._client.get_run(self._run.info.run_id).data.params
        params: list[Any] = []
        tags: list[Any] = []
        settings = flat(values, ".")
        keys = self._keys(settings, {})
        for name, value in settings.items():
            key, text = keys[name], str(value)[:_LONGEST_VALUE]
            if key not in logged:
                params.append(entities.Param(key, text))
            elif logged[key] != text:
                tags.append(entities.RunTag(f"changed.{key}", text[:5000]))
        for part in _parts(params, _SETTINGS_AT_ONCE):
            self._client.log_batch(self._run.info.run_id, params=part)
        for part in _parts(tags, _SETTINGS_AT_ONCE):
            self._client.log_batch(self._run.info.run_id, tags=part)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers; other values are left out with a warning."""
        import time

        numbers, refused = plain_metrics(values, self.takes_texts)
        for name, description in refused.items():
            _logger.warning_once("MLflow takes numbers, and %s is %s: it is left out.", name, description)
        self.log_points([Point(numbers, step, time.time(), kwargs)])

    @on_main_process
    def log_points(self, points: Sequence[Point]) -> None:
        """Log the numbers of several calls, with their times."""
        entities = require("mlflow.entities", self.extra)

        all_values = [(point, flat(point.values)) for point in points]
        keys = self._keys((name for _, values in all_values for name in values), self._metric_keys)
        metrics = [
            entities.Metric(keys[name], float(value), int(point.time * 1000), point.step or 0)
            for point, values in all_values
            for name, value in values.items()
        ]
        for part in _parts(metrics, _METRICS_AT_ONCE):
            self._client.log_batch(self._run.info.run_id, metrics=part)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images, with the channels last."""
        for name, images in images_by_name(values):
            for image in images:
                self._client.log_image(self._run.info.run_id, image, key=self.metric_name(name), step=step, **kwargs)

    @on_main_process
    def log_table(
        self, table_name: str, columns: list[str], data: list[list[Any]], step: int | None = None, **kwargs: Any
    ) -> None:
        """Log a table, as a JSON file."""
        file = f"{table_name}.json" if step is None else f"{table_name}-{step}.json"
        self._client.log_dict(self._run.info.run_id, {"columns": columns, "data": data}, file, **kwargs)

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Log a matplotlib or plotly figure."""
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
        """Set the run's final status."""
        self._client.set_terminated(self._run.info.run_id, _STATUS.get(self.outcome, "FINISHED"))

    @classmethod
    def _keys(cls, names: Iterable[str], keys: dict[str, str]) -> dict[str, str]:
        """Add names to those whose accepted form is known; a form that another name has already gets a number."""
        new = set(names) - keys.keys()
        for name in sorted(new, key=lambda name: (cls.metric_name(name) != name, name)):
            key, number = cls.metric_name(name), 1
            while key in keys.values():
                number += 1
                key = f"{cls.metric_name(name)[: _LONGEST_NAME - 5]}_{number}"
            keys[name] = key
        return keys

    def _find_or_create_run(self) -> Any:
        experiment = self._experiment_id()
        if self._token is not None:
            runs = self._client.search_runs([experiment], f"tags.`{_TOKEN}` = '{self._token}'", max_results=1)
            if runs:
                return runs[0]
        tags = dict(self._tags)
        if self._token is not None:
            tags[_TOKEN] = self._token
        if self._parent is not None:
            tags["mlflow.parentRunId"] = self._parent
        return self._client.create_run(experiment, tags=tags, run_name=self._run_name)

    def _experiment_id(self) -> str:
        experiment = self._client.get_experiment_by_name(self._experiment)
        if experiment is None:
            return self._client.create_experiment(self._experiment, artifact_location=self._artifacts)
        return experiment.experiment_id


def _parts(values: list[Any], size: int) -> Iterator[list[Any]]:
    return (values[start : start + size] for start in range(0, len(values), size))
