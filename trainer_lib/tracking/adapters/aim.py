"""Aim tracker: a repository in a folder, or a server."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from trainer_lib.filesystem.atomic_files import replace_file
from trainer_lib.foundation.imports import require
from trainer_lib.tracking.adapters.vendor import images_by_name
from trainer_lib.tracking.base import BuiltInTracker, on_main_process
from trainer_lib.tracking.delivery.plain_values import flat

_HASHES = "trainer_lib"  # a folder in Aim's, with a file for each run: the hash that Aim gave it


class AimTracker(BuiltInTracker):
    """Writes to Aim's repository in a folder, which `aim up --repo FOLDER` shows, or to a server of Aim's.

    Args:
        run_name: The experiment, and the name of the run unless `name` is given.
        logging_dir: The folder of the repository.
        name: The name of the run.
        token: The identifier of the run across resumes; a server begins a new run.
        repo: Another folder, or the address of a server: "aim://host:53800".
        **kwargs: Arguments of `aim.Run`; the terminal and the use of the machine are recorded only if they ask for it.
    """

    name: ClassVar[str] = "aim"
    requires_logging_directory: ClassVar[bool] = True
    module: ClassVar[str] = "aim"
    extra: ClassVar[str] = "aim"
    channels_last: ClassVar[bool] = True
    options_of: ClassVar[tuple[str, str] | None] = ("aim.sdk.run", "Run.__init__")

    @on_main_process
    def __init__(
        self,
        run_name: str,
        logging_dir: str | Path = ".",
        name: str | None = None,
        token: str | None = None,
        repo: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.run_name: str = name or run_name
        self.logging_dir: str = str(repo or logging_dir)
        self._token = token
        own = {"experiment": run_name, "system_tracking_interval": None, "capture_terminal_logs": False}
        self._options: dict[str, Any] = own | kwargs
        self.writer: Any = None

    @classmethod
    def runs_apart(cls, **options: Any) -> bool:
        """Always: it takes a lock, and its database is code that can end the process."""
        return True

    @classmethod
    def named(cls, run_name: str) -> dict[str, Any]:
        """Return the options that set the run's name."""
        return {"name": run_name}

    @classmethod
    def continuing(cls, token: str, resume_step: int | None) -> dict[str, Any]:
        """Return the options with which it finds its run."""
        return {"token": token}

    @property
    def tracker(self) -> Any:
        """The `aim.Run`."""
        return self.writer

    @property
    def vendor(self) -> Any:
        """The package of Aim."""
        return require(self.module, self.extra)

    @on_main_process
    def start(self) -> None:
        """Start the run, or continue it."""
        if "://" in self.logging_dir:
            self.writer = self.vendor.Run(repo=self.logging_dir, **self._options)
        else:
            folder = Path(self.logging_dir).expanduser()
            # A program that was killed while it made the repository left a part of it, without this file.
            is_new = not (folder / ".aim" / "VERSION").exists()
            repository = self.vendor.Repo.from_path(str(folder), init=is_new)
            self.writer = self._find_or_create_run(repository, folder / ".aim" / _HASHES)
        self.writer.name = self.run_name

    def _find_or_create_run(self, repository: Any, hashes: Path) -> Any:
        """Continue the run of the token: Aim gives new runs a hash of its own, which a file keeps."""
        if self._token is None or "run_hash" in self._options:
            return self.vendor.Run(repo=repository, **self._options)
        file = hashes / self._token
        try:
            # The program that wrote the run before may have been killed with Aim's lock.
            known = {"run_hash": file.read_text(encoding="utf-8"), "force_resume": True}
            return self.vendor.Run(repo=repository, **(known | self._options))
        except (FileNotFoundError, self.vendor.sdk.errors.MissingRunError):
            run = self.vendor.Run(repo=repository, **self._options)
            hashes.mkdir(exist_ok=True)
            replace_file(file, lambda part: part.write_text(run.hash, encoding="utf-8"))
            return run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings as the run's parameters "hparams"."""
        self.writer["hparams"] = values

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, and texts as texts of Aim."""
        for name, value in flat(values).items():
            logged = self.vendor.Text(value) if isinstance(value, str) else value
            self.writer.track(logged, name=name, step=step, **kwargs)

    @on_main_process
    def log_images(
        self,
        values: dict[str, Any],
        step: int | None = None,
        kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log images by name, with the channels last.

        Args:
            values: The images.
            step: The step.
            kwargs: Arguments of `aim.Image` as "aim_image", and of `aim.Run.track` as "track".
        """
        of_image, of_track = (dict((kwargs or {}).get(key, {})) for key in ("aim_image", "track"))
        for name, images in images_by_name(values):
            drawn = [self.vendor.Image(image, **of_image) for image in images]
            self.writer.track(drawn if len(drawn) > 1 else drawn[0], name=name, step=step, **of_track)

    @on_main_process
    def finish(self) -> None:
        """Write what is left, and close the run."""
        self.writer.close()
