"""Comet tracker."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from trainer_lib.foundation import environment
from trainer_lib.tracking.adapters.vendor import VendorTracker, images_by_name
from trainer_lib.tracking.base import on_main_process
from trainer_lib.tracking.delivery.plain_values import flat

# Comet's automatic logging would describe the tracker's process, not the training.
_QUIET = {
    "log_code": False,
    "parse_args": False,
    "auto_output_logging": False,
    "auto_param_logging": False,
    "auto_metric_logging": False,
    "display_summary_level": 0,
}


class CometMLTracker(VendorTracker):
    """Reports to Comet.

    Args:
        run_name: The project.
        token: The key of the experiment.
        is_resumed: Whether the experiment exists already.
        offline_directory: The folder for files with `online=False`.
        name: The name of the experiment, unless `experiment_config` is given.
        tags: Its tags, unless `experiment_config` is given.
        **kwargs: Arguments of `comet_ml.start`.
    """

    name: ClassVar[str] = "comet_ml"
    module: ClassVar[str] = "comet_ml"
    extra: ClassVar[str] = "comet"
    options_of: ClassVar[tuple[str, str] | None] = ("comet_ml.comet_start.comet_start", "start")
    set_options: ClassVar[frozenset[str]] = frozenset({"project", "project_name"})
    object_name: ClassVar[str] = "writer"
    image_options: ClassVar[frozenset[str]] = frozenset({"image_channels", "image_minmax", "image_scale"})
    key_variable: ClassVar[str] = "COMET_API_KEY"
    without_key: ClassVar[str] = (
        "The tracker comet_ml has no key. Set COMET_API_KEY, or give online=False to write files, which `comet upload` "
        "sends."
    )

    @on_main_process
    def __init__(
        self,
        run_name: str,
        token: str | None = None,
        is_resumed: bool = False,
        offline_directory: str | Path | None = None,
        name: str | None = None,
        tags: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(run_name, **kwargs)
        self._experiment_name, self._tags = name, tags
        self._folder = None if offline_directory is None else str(offline_directory)
        if token is not None and "experiment_key" not in kwargs:
            self._options |= {"experiment_key": token}
            if "mode" not in kwargs:
                self._options |= {"mode": self._mode(is_resumed)}

    @classmethod
    def is_online(cls, options: Mapping[str, Any]) -> bool:
        """Whether `online` or `COMET_START_ONLINE` says so, and there is no key in the options."""
        return _is_online(options) and not options.get("api_key")

    @classmethod
    def has_login(cls) -> bool:
        """Whether there is a configuration file."""
        config_file = environment.variable("COMET_CONFIG")
        files = [Path("~/.comet.config"), Path(".comet.config")] + ([Path(config_file)] if config_file else [])
        return any(file.expanduser().is_file() for file in files)

    @classmethod
    def continuing(cls, token: str, resume_step: int | None) -> dict[str, Any]:
        """Return the options with which it continues its experiment."""
        return {"token": token, "is_resumed": resume_step is not None}

    @classmethod
    def with_folder(cls, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options with the run's folder for offline files."""
        return options if _is_online(options) else {"offline_directory": str(folder / "comet"), **options}

    @on_main_process
    def start(self) -> None:
        """Start the experiment, or continue it."""
        options = dict(self._options)
        if options.get("experiment_config") is None:
            options["experiment_config"] = self.vendor.ExperimentConfig(
                offline_directory=self._folder, name=self._experiment_name, tags=self._tags, **_QUIET
            )
        self.writer: Any = self.vendor.start(project_name=self.run_name, **options)
        self.writer.log_other("Created from", "trainer_lib")

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the settings."""
        self.writer.log_parameters(flat(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics, and texts as other values."""
        if step is not None:
            self.writer.set_step(step)
        for name, value in flat(values).items():
            if isinstance(value, str):
                self.writer.log_other(name, value, **kwargs)
            else:
                self.writer.log_metric(name, value, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images. With an option that says how to read an array, arrays are passed as they are."""
        for name, images in images_by_name(values):
            for image in images:
                self.writer.log_image(image, name=name, step=step, **kwargs)

    @on_main_process
    def log_table(
        self, table_name: str, columns: list[str], data: list[list[Any]], step: int | None = None, **kwargs: Any
    ) -> None:
        """Log a table, as a CSV file."""
        file = f"{table_name}.csv" if step is None else f"{table_name}-{step}.csv"
        self.writer.log_table(file, tabular_data=data, headers=columns, **kwargs)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None, **kwargs: Any) -> None:
        """Log a file as an asset, or a folder as a model."""
        path = Path(local_path)
        if path.is_dir():
            self.writer.log_model(artifact_path or path.name, str(path), **kwargs)
        else:
            self.writer.log_asset(str(path), file_name=artifact_path or path.name, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Send the remaining values, and finish."""
        if self.outcome in ("failed", "interrupted"):
            self.writer.log_other("trainer_lib.status", self.outcome)
        self.writer.end()

    def _mode(self, is_resumed: bool) -> str:
        if _is_online(self._options):
            return "get_or_create"
        return "get" if is_resumed else "create"


def _is_online(options: Mapping[str, Any]) -> bool:
    if options.get("online") is not None:
        return bool(options["online"])
    setting = environment.variable("COMET_START_ONLINE")
    return setting is None or setting.lower() not in ("0", "false", "no")
