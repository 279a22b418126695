"""A training script under Hydra: its settings, its output folder, a stateful loader of its own, checkpoints by step."""

import math
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from tqdm.auto import tqdm

from tests.accelerate_docs.training import loss_function
from tests.accelerator import toy
from trainer_lib import Accelerator
from trainer_lib.launchers import run_forked
from trainer_lib.logging import get_logger
from trainer_lib.utils import DataLoaderConfiguration, set_seed

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's call

logger = get_logger(__name__)


@dataclass
class OptimizerConfig:
    learning_rate: float = 0.05
    adam_beta1: float = 0.9
    adam_weight_decay: float = 0.01


@dataclass
class TrainingConfig:
    """The settings of the script."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    batch_size: int = 4
    num_workers: int = 0
    project_name: str = "project"
    num_epochs: int = 2
    seed: int = 42
    gradient_accumulation_steps: int = 2
    mixed_precision: str = "no"
    cpu: bool = True
    resume_from_checkpoint: str | None = None
    checkpoint_steps: int = 3
    max_grad_norm: float | None = 1.0
    clip_value: float | None = 0.5
    report_to: str | None = "jsonl"


class CheckpointTracker:
    """Remembers the epoch and the step at hand."""

    def __init__(self) -> None:
        self.epoch, self.step = 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.step = state["epoch"], state["step"]


def train(cfg: Any, output: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Train, and return the losses by step with what became of the weights."""
    dataloader_config = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(
        cpu=cfg.cpu,
        log_with=cfg.report_to or None,
        mixed_precision=cfg.mixed_precision,
        gradient_accumulation_steps=cfg.gradient_accumulation_steps,
        dataloader_config=dataloader_config,
        project_dir=output,
    )
    tracker = CheckpointTracker()
    accelerator.register_for_checkpointing(tracker)
    logger.info(accelerator.state, main_process_only=False)
    set_seed(cfg.seed)
    model = toy.model()
    inputs, targets, _ = toy.data()
    sampler = DistributedSampler(
        data := TensorDataset(inputs, targets),
        num_replicas=accelerator.num_processes,
        rank=accelerator.process_index,
        shuffle=True,
        drop_last=True,
    )
    train_dataloader = StatefulDataLoader(
        data, batch_size=cfg.batch_size, sampler=sampler, num_workers=cfg.num_workers, drop_last=True
    )
    num_training_steps = math.ceil(len(train_dataloader) / cfg.gradient_accumulation_steps) * cfg.num_epochs
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=cfg.optimizer.learning_rate,
        betas=(cfg.optimizer.adam_beta1, 0.999),
        weight_decay=cfg.optimizer.adam_weight_decay,
    )
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, num_training_steps)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    if cfg.resume_from_checkpoint:
        accelerator.load_state(cfg.resume_from_checkpoint)
        sampler.set_epoch(tracker.epoch)
        train_dataloader.load_state_dict(torch.load(Path(cfg.resume_from_checkpoint) / "loader_state.pt"))
    if cfg.report_to:
        accelerator.init_trackers(
            project_name=cfg.project_name, config=settings, init_kwargs={"wandb": {"name": "experiment"}}
        )
    total_progress = tqdm(range(num_training_steps), disable=not accelerator.is_local_main_process)
    losses: dict[int, float] = {}
    for epoch in range(tracker.epoch if cfg.resume_from_checkpoint else 1, cfg.num_epochs + 1):
        model.train()
        if epoch != tracker.epoch or not cfg.resume_from_checkpoint:
            sampler.set_epoch(epoch)
        for batch in train_dataloader:
            tracker.epoch, tracker.step = epoch, tracker.step + 1
            with accelerator.accumulate(model):
                loss_mean = loss_function(model(batch[0].to(accelerator.device)), batch[1].to(accelerator.device))
                accelerator.backward(loss_mean)
                grad_norm = None
                if accelerator.sync_gradients:
                    if cfg.clip_value is not None:
                        accelerator.clip_grad_value_(model.parameters(), cfg.clip_value)
                    if cfg.max_grad_norm is not None:
                        grad_norm = accelerator.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad(set_to_none=True)
            losses[tracker.step] = accelerator.gather(loss_mean).mean().detach().item()
            if accelerator.sync_gradients:
                log_metrics = {"loss": losses[tracker.step], "learning_rate": scheduler.get_last_lr()[0]}
                if grad_norm is not None:
                    log_metrics["grad_norm"] = accelerator.gather(grad_norm).mean().detach().item()
                if cfg.report_to:
                    accelerator.log(log_metrics, step=tracker.step)
                total_progress.update(1)
            if tracker.step % cfg.checkpoint_steps == 0:
                output_dir = output / f"step_{tracker.step}"
                accelerator.save_state(output_dir)
                if accelerator.is_main_process:
                    torch.save(train_dataloader.state_dict(), output_dir / "loader_state.pt")
    accelerator.wait_for_everyone()
    total_progress.close()
    accelerator.save_model(model, output)
    accelerator.end_training()
    weights = toy.parameters(accelerator.unwrap_model(model))
    return {"losses": losses, "weights": weights, "output": str(output), "folder": str(Path.cwd())}


def under_hydra(options: dict[str, Any]) -> dict[str, Any]:
    """Start the script as Hydra does on a command line with these options."""
    hydra: Any = import_module("hydra")
    store: Any = import_module("hydra.core.config_store").ConfigStore.instance()
    hydra_config: Any = import_module("hydra.core.hydra_config").HydraConfig
    omega: Any = import_module("omegaconf").OmegaConf
    store.store(name="training_config", node=TrainingConfig)
    results: list[dict[str, Any]] = []

    def main(cfg: TrainingConfig) -> None:
        container = omega.to_container(cfg, throw_on_missing=True)
        results.append(train(cfg, Path(hydra_config.get().runtime.output_dir), container))

    given = [f"{name}={value}" for name, value in options.items()]
    # Ranks start at different times, so the folders that Hydra names after the time differ.
    folder = f"hydra.run.dir=outputs/{os.environ.get('RANK')}-{os.getpid()}"
    sys.argv = ["script.py", folder, "hydra.job.chdir=true", *given]
    hydra.main(version_base=None, config_path=None, config_name="training_config")(main)()
    return results[0]


def as_hydra_does(options: dict[str, Any]) -> dict[str, Any]:
    """Start the script in an output folder named by each process, as Hydra does, without Hydra."""
    cfg = TrainingConfig(**options)
    output = Path("outputs").absolute() / f"{os.environ.get('RANK')}-{os.getpid()}"
    output.mkdir(parents=True)
    os.chdir(output)
    return train(cfg, output, asdict(cfg))


_SLOW = [(as_hydra_does, 2), (under_hydra, 1), (under_hydra, 2)]


def _started(entry: Callable[[dict[str, Any]], Any], processes: int, **options: Any) -> list[dict[str, Any]]:
    if entry is under_hydra:
        pytest.importorskip("hydra")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run_forked(entry, (options,), processes)


@pytest.mark.parametrize(
    ("entry", "processes"),
    [(as_hydra_does, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in _SLOW)],
)
def test_the_script_writes_into_its_output_folder_and_resumes_exactly(
    entry: Callable[[dict[str, Any]], Any], processes: int, tmp_path: Path
) -> None:
    middle = 24 // processes // 2 + 3  # in the middle of the second epoch, and of a window
    ranks = _started(entry, processes, checkpoint_steps=middle)
    whole, output = ranks[0], Path(ranks[0]["output"])
    for rank in ranks[1:]:
        toy.assert_same(rank["weights"], whole["weights"], rtol=0)
        assert rank["losses"] == whole["losses"]
    assert output.is_relative_to(tmp_path)
    assert Path(whole["folder"]) == output
    saved = load_file(output / "model.safetensors")
    toy.assert_same([saved[name] for name in toy.model().state_dict()], whole["weights"], rtol=0)
    steps = sorted(whole["losses"])
    assert steps == list(range(1, 24 // processes + 1))
    checkpoint = output / f"step_{middle}"
    resumed = _started(entry, processes, resume_from_checkpoint=str(checkpoint))
    assert resumed[0]["losses"] == {step: whole["losses"][step] for step in steps if step > middle}
    toy.assert_same(resumed[0]["weights"], whole["weights"], rtol=0)
