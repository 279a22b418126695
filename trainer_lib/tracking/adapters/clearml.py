"""ClearML tracker."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from trainer_lib.foundation import environment
from trainer_lib.tracking.adapters.vendor import VendorTracker, images_by_name
from trainer_lib.tracking.base import on_main_process
from trainer_lib.tracking.table import table_of

_SERIES = ("eval", "test", "train")
_DEFAULTS = {"auto_connect_frameworks": False, "auto_connect_arg_parser": False, "auto_resource_monitoring": False}


class ClearMLTracker(VendorTracker):
    """Reports to ClearML. Each program creates a new task, also when it resumes a run.

    Args:
        run_name: The project.
        **kwargs: Arguments of `clearml.Task.init`.
    """

    name: ClassVar[str] = "clearml"
    module: ClassVar[str] = "clearml"
    extra: ClassVar[str] = "clearml"
    options_of: ClassVar[tuple[str, str] | None] = ("clearml.task", "Task.init")
    object_name: ClassVar[str] = "task"
    name_option: ClassVar[str] = "task_name"
    takes_token: ClassVar[bool] = False
    key_variable: ClassVar[str] = "CLEARML_API_ACCESS_KEY"
    without_key: ClassVar[str] = (
        "The tracker clearml is not configured. Run `clearml-init`, set CLEARML_API_ACCESS_KEY and "
        "CLEARML_API_SECRET_KEY, or set CLEARML_OFFLINE_MODE=1 to write files."
    )

    @on_main_process
    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(run_name, **{"project_name": run_name, "task_name": run_name, **_DEFAULTS, **kwargs})

    @classmethod
    def is_online(cls, options: Mapping[str, Any]) -> bool:
        """Whether `CLEARML_OFFLINE_MODE` is not set."""
        return (environment.variable("CLEARML_OFFLINE_MODE") or "0").lower() not in ("1", "true", "yes")

    @classmethod
    def has_login(cls) -> bool:
        """Whether there is a configuration file."""
        return Path(environment.variable("CLEARML_CONFIG_FILE") or "~/clearml.conf").expanduser().is_file()

    @on_main_process
    def start(self) -> None:
        """Start the task."""
        self.task: Any = self.vendor.Task.init(**self._options)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the settings."""
        self.task.connect_configuration(values, name="settings")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, with training and evaluation as series of one plot, and texts to the task's console."""
        logger = self.task.get_logger()
        for name, value in values.items():
            title, series = _title_and_series(name)
            if isinstance(value, str):
                logger.report_text(f"{name}: {value}", print_console=False)
            elif step is None:
                logger.report_single_value(name, value, **kwargs)
            else:
                logger.report_scalar(title, series, value, iteration=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images, with the channels last."""
        for name, images in images_by_name(values):
            title, series = _title_and_series(name)
            for image in images:
                self.task.get_logger().report_image(title, series, iteration=step, image=image, **kwargs)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table: rows with column names, or a data frame."""
        columns, data = table_of(columns, data, dataframe)
        title, series = _title_and_series(table_name)
        self.task.get_logger().report_table(title, series, iteration=step, table_plot=[columns, *data], **kwargs)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None, **kwargs: Any) -> None:
        """Upload a file or a folder."""
        self.task.upload_artifact(artifact_path or Path(local_path).name, local_path, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Send the remaining values, and finish."""
        if self.outcome in ("failed", "interrupted"):
            self.task.mark_failed(status_reason=self.outcome)
        self.task.close()


def _title_and_series(name: str) -> tuple[str, str]:
    for series in _SERIES:
        if name.startswith(f"{series}_"):
            return name.removeprefix(f"{series}_"), series
    return name, "train"
