"""A tracker of your own: it writes each run into a table of SQLite, which the end of the script queries.

    python examples/by_feature/custom_tracker.py
    trainer-lib launch --cpu --num_processes 2 examples/by_feature/custom_tracker.py

Its methods run on a thread of the tracker, so a slow database does not slow training, and an error in it is a warning.
"""

import argparse
import json
import sqlite3
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from trainer_lib import Trainer, TrainingArguments
from trainer_lib.callbacks import TrackerCallback
from trainer_lib.tracking import GeneralTracker


class SQLiteTracker(GeneralTracker):
    """Writes what a run logs into the tables `runs` and `metrics` of a database."""

    name = "sqlite"
    requires_logging_directory = False

    def __init__(self, file: Path, run: str) -> None:
        super().__init__()
        self._file, self._run = file, run

    def start(self) -> None:
        """Open the database: on the thread that uses it."""
        self._database = sqlite3.connect(self._file)
        self._database.execute("create table if not exists runs (run text primary key, arguments text)")
        self._database.execute("create table if not exists metrics (run text, step integer, name text, value real)")

    @property
    def tracker(self) -> Any:
        """The connection."""
        return self._database

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the run's arguments."""
        row = (self._run, json.dumps(values, default=str))
        self._database.execute("insert or replace into runs values (?, ?)", row)
        self._database.commit()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep what is logged at a step."""
        rows = [(self._run, step, name, value) for name, value in values.items() if isinstance(value, (int, float))]
        self._database.executemany("insert into metrics values (?, ?, ?, ?)", rows)
        self._database.commit()

    def finish(self) -> None:
        """Close the database."""
        self._database.close()


def main() -> None:
    options = parse_options()
    pixels, labels = load_digits(return_X_y=True)
    images, digits = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    file = Path(options.output_dir) / "runs.sqlite"
    file.parent.mkdir(parents=True, exist_ok=True)
    for learning_rate in (1e-4, 1e-3, 1e-2):
        torch.manual_seed(0)
        trainer = Trainer(
            nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
            TrainingArguments(
                output_dir=options.output_dir,
                num_train_epochs=options.num_train_epochs,
                per_device_train_batch_size=32,
                learning_rate=learning_rate,
                progress_bar=False,
            ),
            train_dataset=(images[:1200], digits[:1200]),
            eval_dataset=(images[1200:], digits[1200:]),
            loss_fn=cross_entropy,
            metrics=["accuracy"],
            callbacks=[TrackerCallback(SQLiteTracker(file, f"learning rate {learning_rate}"))],
        )
        trainer.fit()
    if trainer.accelerator.is_main_process:
        print_best(file)
    trainer.accelerator.end_training()


def print_best(file: Path) -> None:
    """Print the best accuracy of each run, the best run first."""
    query = "select run, max(value) from metrics where name = 'eval_accuracy' group by run order by 2 desc"
    database = sqlite3.connect(file)
    print("\n" + "\n".join(f"{run:<24}{accuracy:7.2%}" for run, accuracy in database.execute(query)))
    database.close()


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Track three runs in a database.")
    parser.add_argument("--output_dir", default="runs", help="where runs and the database are kept")
    parser.add_argument("--num_train_epochs", type=float, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
