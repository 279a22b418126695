"""DVCLive tracker."""

from pathlib import Path
from typing import Any, ClassVar

from trainer_lib.foundation.imports import require
from trainer_lib.tracking.base import BuiltInTracker, on_main_process
from trainer_lib.tracking.delivery.plain_values import flat


class DVCLiveTracker(BuiltInTracker):
    """Writes DVCLive's files.

    Args:
        run_name: Ignored, since one folder is one run; `exp_name` names a DVC experiment.
        live: An existing `Live` object.
        **kwargs: Arguments of `dvclive.Live`.
    """

    run_name: str | None

    name: ClassVar[str] = "dvclive"
    module: ClassVar[str] = "dvclive"
    extra: ClassVar[str] = "dvclive"
    options_of: ClassVar[tuple[str, str] | None] = ("dvclive.live", "Live.__init__")

    @on_main_process
    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name, self.live, self._options = run_name, live, kwargs

    @classmethod
    def runs_apart(cls, **options: Any) -> bool:
        """True unless a `Live` object is given: it calls git, and may send to DVC Studio."""
        return options.get("live") is None

    @classmethod
    def continuing(cls, token: str, resume_step: int | None) -> dict[str, Any]:
        """Return the options with which it continues its files."""
        return {} if resume_step is None else {"resume": True}

    @classmethod
    def with_folder(cls, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options with the run's folder."""
        return options if options.get("live") is not None else {"dir": str(folder / "dvclive"), **options}

    @property
    def tracker(self) -> Any:
        """The `Live` object."""
        return self.live

    @on_main_process
    def start(self) -> None:
        """Prepare the folder."""
        if self.live is None:
            self.live: Any = require(self.module, self.extra).Live(**self._options)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the settings."""
        self.live.log_params(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write numbers."""
        if step is not None:
            self.live.step = step
        for name, value in flat(values).items():
            self.live.log_metric(name, value, **kwargs)
        self.live.next_step()

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None, **kwargs: Any) -> None:
        """Track a file or a folder with DVC."""
        self.live.log_artifact(local_path, name=artifact_path, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Finish."""
        self.live.end()
