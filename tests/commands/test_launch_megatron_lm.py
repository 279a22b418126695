"""`launch --use_megatron_lm`: its values reach loops and Trainers, which train with the numbers of one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.launched import run_as_script
from tests.trainer.tasks import arguments, trainer
from tests.worlds import run_world
from trainer_lib.commands.launch.launch_environment import script_variables
from trainer_lib.commands.launch.launch_parser import parse
from trainer_lib.commands.launch.launch_values import LaunchValues
from trainer_lib.foundation.environment import patch_environment
from trainer_lib.foundation.errors import ConfigurationError

SCRIPT = """
import json, sys, torch
from torch import nn
from trainer_lib import Accelerator, Trainer, TrainingArguments

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
samples = torch.utils.data.TensorDataset(torch.randn(32, 3), torch.randint(0, 2, (32,)))
if sys.argv[1] == "trainer":
    args = TrainingArguments(max_steps=4, per_device_train_batch_size=4, use_cpu=True, progress_bar=False, seed=1,
                             optimizer="sgd", learning_rate=0.5, lr_scheduler="constant", max_grad_norm=0.05)
    trainer = Trainer(model, args, train_dataset=samples, loss_fn=nn.CrossEntropyLoss())
    trainer.fit()
    accelerator = trainer.accelerator
else:
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = torch.utils.data.DataLoader(samples, batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(batch), labels))
            optimizer.step()
            optimizer.zero_grad()
plugin, weights = accelerator.state.megatron_lm_plugin, accelerator.get_state_dict(model)
if accelerator.is_main_process:
    with open("told.json", "w") as file:
        mesh = None if plugin is None else accelerator.parallelism_config.sizes
        json.dump([mesh, weights["0.weight"].tolist(), weights["2.weight"].tolist()], file)
"""
CONFIG = """
distributed_type: MEGATRON_LM
megatron_lm_config:
  megatron_lm_tp_degree: 1
  megatron_lm_pp_degree: 2
  megatron_lm_num_micro_batches: 2
  megatron_lm_gradient_clipping: 0.05
  megatron_lm_recompute_activations: false
  megatron_lm_eod_mask_loss: false
num_processes: 2
"""


def launched(folder: Path, kind: str, *options: str) -> Any:
    """Run the script as ranks of a launch with these options, and return the mesh and the weights that it wrote."""
    file = folder / "script.py"
    file.write_text(f"import os; os.chdir({str(folder)!r})\n{SCRIPT}")
    values = LaunchValues(parse([*options, str(file), kind])[0])
    variables: dict[str, Any] = {"ACCELERATE_USE_CPU": "1", **script_variables(values)}
    run_world(run_as_script, ([str(file), kind],), values["num_processes"], **variables)
    return told(folder)


def told(folder: Path) -> Any:
    """Return the mesh and the weights that the script wrote."""
    mesh, *weights = json.loads((folder / "told.json").read_text())
    return mesh, [torch.tensor(weight) for weight in weights]


def by_hand() -> list[torch.Tensor]:
    """Return the weights after two steps of sixteen samples with clipped gradients, in one process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    inputs, targets = torch.randn(32, 3), torch.randint(0, 2, (32,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for rows in (slice(0, 16), slice(16, 32)):
        nn.functional.cross_entropy(model(inputs[rows]), targets[rows]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return [weight.detach() for name, weight in model.named_parameters() if name.endswith("weight")]


def test_a_loop_is_launched_from_a_file_of_accelerate(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    mesh, weights = launched(tmp_path, "loop", "--config_file", str(tmp_path / "config.yaml"))
    assert mesh["pp"] == 2
    torch.testing.assert_close(weights, by_hand(), rtol=1e-5, atol=1e-6)


def test_a_trainer_is_launched_by_options(tmp_path: Path) -> None:
    mesh, weights = launched(
        tmp_path,
        "trainer",
        *("--num_processes", "2", "--use_megatron_lm", "--megatron_lm_use_distributed_optimizer", "true"),
    )
    run_world(run_as_script, ([str(tmp_path / "script.py"), "trainer"],), 2)
    plain, expected = told(tmp_path)
    assert (mesh["dp_shard"], plain) == (2, None), "without the option: DDP"
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("setting", "options", "message"),
    [
        ("NUM_MICRO_BATCHES", {"gradient_accumulation_steps": 2}, r"num_micro_batches=4, .*accumulation_steps=2\)"),
        ("GRADIENT_CLIPPING", {"max_grad_norm": 0.5}, r"gradient_clipping=4\.0, .*max_grad_norm=0\.5\)"),
    ],
)
def test_a_trainer_that_contradicts_the_launcher_is_told(setting: str, options: Any, message: str) -> None:
    asked = {"ACCELERATE_USE_MEGATRON_LM": "true", f"MEGATRON_LM_{setting}": "4"}
    with patch_environment(**asked), pytest.raises(ConfigurationError, match=f"The launcher says {message}"):
        trainer(arguments(**options))
