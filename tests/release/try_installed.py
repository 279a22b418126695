"""What an installed release must do: `PYTHON tests/release/try_installed.py`, with the Python that has it.

It uses the standard library alone, works in an empty folder, and never sees the checkout.
"""

import importlib.metadata
import os
import subprocess
import sys
import tempfile
from pathlib import Path

USERS_CALLBACKS = """
from trainer_lib import Callback

class Told(Callback):
    def on_fit_end(self, run):
        print("the user's callback saw", run.state.step, "steps")
"""
USERS_SCRIPT = """
import torch
from torch.utils.data import TensorDataset

import callbacks
import trainer_lib
from trainer_lib import Trainer, TrainingArguments
from trainer_lib.callbacks import EarlyStopping

torch.manual_seed(0)
inputs = torch.randn(64, 4)
rows = TensorDataset(inputs, inputs.sum(1, keepdim=True))
args = TrainingArguments(output_dir="runs", max_steps=8, learning_rate=0.1, eval_every="4 steps", keep_best=1,
                         metric_for_best="eval_loss", progress_bar=False)
trainer = Trainer(
    torch.nn.Linear(4, 1),
    args,
    train_dataset=rows,
    eval_dataset=rows,
    loss_fn=torch.nn.functional.mse_loss,
    callbacks=[callbacks.Told(), EarlyStopping(patience=9)],
)
trainer.fit()
print(callbacks.__file__)
print(trainer_lib.__file__)
print("steps", trainer.state.step)
"""
COUNT_NAMES = "import {0} as module; print(sum(1 for name in module.__all__ if getattr(module, name)))"


def main() -> None:
    """Try the release, and end with an error at the first thing that fails."""
    version = importlib.metadata.version("trainer_lib")
    torch = importlib.metadata.version("torch")
    print(f"trainer_lib {version}, torch {torch}, Python {sys.version.split()[0]}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        try_imports(folder)
        try_script(folder)
        try_commands(folder)
    print("all well", flush=True)


def try_imports(folder: Path) -> None:
    """The package and its callbacks come from where packages are installed, without warnings, and with types."""
    where = run(folder, sys.executable, "-W", "error", "-c", "import trainer_lib; print(trainer_lib.__file__)")
    package = Path(where.strip()).parent
    expect("site-packages" in package.parts, f"trainer_lib is imported from {package}")
    expect((package / "py.typed").is_file(), "py.typed is missing")
    expect((package / "callbacks" / "__init__.pyi").is_file(), "the stub of the callbacks is missing")
    count = run(folder, sys.executable, "-c", COUNT_NAMES.format("trainer_lib.callbacks"))
    expect(int(count) > 40, f"only {count} callbacks")
    names = run(folder, sys.executable, "-c", COUNT_NAMES.format("trainer_lib"))
    print(f"imports: {names.strip()} names, {count.strip()} callbacks, py.typed", flush=True)


def try_script(folder: Path) -> None:
    """A user's own `callbacks.py` beside the script is `callbacks`; the library's are `trainer_lib.callbacks`."""
    (folder / "callbacks.py").write_text(USERS_CALLBACKS, encoding="utf-8")
    (folder / "train.py").write_text(USERS_SCRIPT, encoding="utf-8")
    lines = run(folder, sys.executable, "train.py").splitlines()
    expect(str(folder / "callbacks.py") in lines, f"`import callbacks` is not the user's file: {lines}")
    expect("the user's callback saw 8 steps" in lines and "steps 8" in lines, f"the run did not train: {lines}")
    launched = run(folder, program(), "launch", "--cpu", "--num_processes", "2", "train.py")
    expect(launched.count("the user's callback saw 8 steps") >= 1, f"the launched run did not train: {launched}")
    print("script: trains alone and on two processes, with the user's callbacks.py", flush=True)


def try_commands(folder: Path) -> None:
    """The entry point answers: help, versions, a configuration, a check of the world, the list of runs."""
    expect("launch" in run(folder, program(), "--help"), "--help names no command")
    expect("trainer_lib" in run(folder, program(), "env"), "env does not name the version")
    configuration = folder / "configuration.yaml"
    run(folder, program(), "config", "default", "--config_file", str(configuration))
    expect(configuration.is_file(), "config default wrote no file")
    run(folder, program(), "test", "--config_file", str(configuration))
    expect("8" in run(folder, program(), "runs", "runs"), "runs does not list the run of 8 steps")
    run(folder, program(), "report", "runs")
    expect("launch" in run(folder, sys.executable, "-m", "trainer_lib", "--help"), "python -m trainer_lib fails")
    print("commands: --help, env, config, test, launch, runs, report", flush=True)


def program() -> str:
    """Return the path of `trainer-lib` beside the Python that runs this."""
    return str(Path(sys.executable).parent / "trainer-lib")


def run(folder: Path, *command: str) -> str:
    """Run a command in a folder and return what it printed; end with its errors if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HOME": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    expect(done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def expect(holds: bool, message: str) -> None:
    """End with a message unless something holds."""
    if not holds:
        raise SystemExit(message)


if __name__ == "__main__":
    main()
