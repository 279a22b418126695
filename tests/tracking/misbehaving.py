"""A tracker that fails or hangs on request, and records what it received."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from trainer_lib.tracking.base import BuiltInTracker

HANG = 3600.0


class Misbehaving(BuiltInTracker):
    name = "misbehaving"

    def __init__(self, run_name: str, path: str, how: str = "", apart: bool = False, token: str = "") -> None:
        super().__init__()
        self.path, self.how, self.token, self.project = Path(path), how, token, run_name

    @classmethod
    def runs_apart(cls, **options: Any) -> bool:
        return bool(options.get("apart"))

    @classmethod
    def continuing(cls, token: str, resume_step: int | None) -> dict[str, Any]:
        return {"token": token}

    @property
    def tracker(self) -> Path:
        return self.path

    def start(self) -> None:
        self._do("start")
        self._write({"started": self.token, "project": self.project})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._write({"settings": values})

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._do("log")
        if "poison" in values:
            raise ValueError("poison is not taken")
        self._write({"step": step, **values, **kwargs})

    def log_images(self, values: dict[str, Any], step: int | None = None) -> None:
        self._write({"step": step, "shapes": {name: list(value.shape) for name, value in values.items()}})

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        self._write({"artifact": local_path, "as": artifact_path})

    def say(self, text: str, times: int = 1) -> None:
        self._write({"said": text * times})

    def finish(self) -> None:
        self._do("finish")
        self._write({"finished": self.outcome})

    def _do(self, where: str) -> None:
        if self.how == f"hang in {where}":
            time.sleep(HANG)
        if self.how == f"raise in {where}" or (self.how == "away" and self.path.with_name("away").exists()):
            raise ConnectionError("nobody is there")
        if self.how == f"exit in {where}":
            raise SystemExit("not logged in")
        if self.how == f"die in {where}" and not self.path.with_name("died").exists():
            self.path.with_name("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "slow":
            time.sleep(0.02)

    def _write(self, record: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def taken(path: Path) -> list[dict[str, Any]]:
    """Return what the tracker took."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps(path: Path) -> list[int]:
    """Return the steps that it took."""
    return [record["step"] for record in taken(path) if "step" in record]
