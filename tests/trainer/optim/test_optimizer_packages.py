"""Optimizers of other packages by name: which class, and that runs resume bit by bit."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from trainer_lib import Trainer, TrainingArguments
from trainer_lib.foundation.errors import MissingPackageError
from trainer_lib.trainer.optim import optimizer_packages
from trainer_lib.trainer.optim.optimizer_packages import PATHS
from trainer_lib.trainer.optim.optimizers import build_optimizer

pytestmark = pytest.mark.filterwarnings("ignore")  # the packages' own, as they are imported and on a CPU

RESUMED = [
    "adamw_8bit",
    "paged_lion_8bit",
    "ademamix_8bit",
    "rmsprop_bnb_32bit",
    "schedule_free_adamw",
    "muon",
    "galore_adamw",
    "apollo_adamw",
]


@pytest.mark.parametrize("name", PATHS)
def test_a_name_is_the_class_of_its_path(name: str) -> None:
    package, _, kind = PATHS[name].rpartition(".")
    pytest.importorskip(package.partition(".")[0])
    weights = nn.Linear(64, 128).parameters()
    optimizer = build_optimizer(name.upper(), weights, learning_rate=0.25, weight_decay=0.0)
    assert (type(optimizer).__name__, type(optimizer).__module__.partition(".")[0]) == (kind, package.partition(".")[0])
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_packages, "is_package_available", lambda package: package != "bitsandbytes")
    message = (
        "optimizer='adamw_8bit' is bitsandbytes.optim.AdamW8bit, and bitsandbytes is not installed. Install it with "
        "`pip install bitsandbytes`."
    )
    with pytest.raises(MissingPackageError, match=f"^{message}$"):
        build_optimizer("adamw_8bit", nn.Linear(2, 2).parameters(), learning_rate=0.1)


def fitted(folder: Path, name: str, steps: int, resume: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 2))
    inputs = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    schedule = "constant" if "free" in name else "linear"
    args = TrainingArguments(
        output_dir=folder, max_steps=steps, schedule_steps=8, save_every="2 steps", per_device_train_batch_size=8,
        use_cpu=True, progress_bar=False, resume=resume, optimizer=name, learning_rate=1e-2, lr_scheduler=schedule,
    )  # fmt: skip
    data = (inputs, (inputs[:, 0] > 0).long())
    Trainer(model, args, train_dataset=data, loss_fn=nn.functional.cross_entropy).fit()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(name: str, tmp_path: Path) -> None:
    pytest.importorskip(PATHS[name].partition(".")[0])
    expected = fitted(tmp_path / "whole", name, 8, "never")
    assert not torch.equal(fitted(tmp_path / "parts", name, 4, "never")[0], expected[0])
    for weight, other in zip(fitted(tmp_path / "parts", name, 8, "extend"), expected, strict=True):
        assert torch.equal(weight, other)
