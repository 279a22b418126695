"""`launch --use_deepspeed`: its values reach the plugin, and scripts train with the numbers of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.launched import PYTHON_PATH, run_launched
from tests.strategies.test_deepspeed import needs_deepspeed
from trainer_lib import Accelerator, ConfigurationError, DeepSpeedPlugin, MissingPackageError
from trainer_lib.foundation.environment import patch_environment
from trainer_lib.foundation.imports import is_deepspeed_available

ASKED = {"ACCELERATE_USE_DEEPSPEED": "true"}
SCRIPT = """
import json, sys, torch
from torch import nn
from trainer_lib import Accelerator, Trainer, TrainingArguments

torch.manual_seed(0)
model = nn.Linear(3, 2)
inputs, targets = torch.randn(16, 3), torch.randint(0, 2, (16,))
samples = torch.utils.data.TensorDataset(inputs, targets)
if sys.argv[1] == "trainer":
    args = TrainingArguments(max_steps=4, per_device_train_batch_size=4, use_cpu=True, progress_bar=False,
                             optimizer="sgd", learning_rate=0.5, lr_scheduler="constant", max_grad_norm=0.05, seed=1)
    trainer = Trainer(model, args, train_dataset=samples, loss_fn=nn.CrossEntropyLoss())
    trainer.fit()
    accelerator, plugin = trainer.accelerator, trainer.accelerator.deepspeed_plugin
else:
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = torch.utils.data.DataLoader(samples, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(batch), labels))
            optimizer.step()
            optimizer.zero_grad()
    plugin = accelerator.deepspeed_plugin
weights = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    with open("told.json", "w") as file:
        json.dump([plugin and plugin.zero_stage, accelerator.num_processes, weights["weight"].tolist()], file)
accelerator.end_training()
accelerator.free_memory()
"""
CONFIG = """
distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 3
  gradient_clipping: 0.05
  gradient_accumulation_steps: 2
num_processes: 2
"""


def by_hand() -> Any:
    """Return the weights after a step with all samples and clipped gradients, in one process."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    inputs, targets = torch.randn(16, 3), torch.randint(0, 2, (16,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    nn.functional.cross_entropy(model(inputs), targets).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    return model.weight


def test_a_plugin_has_the_launchers_values_where_the_script_gives_none(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": "auto"}, "gradient_clipping": "auto"}))
    asked = {
        **ASKED, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file), "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu", "ACCELERATE_GRADIENT_CLIPPING": "0.5",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false", "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "A, B",
    }  # fmt: skip
    with patch_environment(**asked):
        plugin = DeepSpeedPlugin()
        with pytest.raises(ConfigurationError, match=r"zero_optimization.stage is 2 in the DeepSpeed config and 3"):
            DeepSpeedPlugin({"zero_optimization": {"stage": 2}})
        assert DeepSpeedPlugin(zero_stage=3, gradient_clipping=2.0).gradient_clipping == 2.0
    assert (plugin.zero_stage, plugin.offload_param_device, plugin.gradient_clipping) == (3, "cpu", 0.5)
    assert (plugin.zero3_init_flag, plugin.transformer_moe_cls_names) == (False, ["A", "B"])
    assert plugin.filled == {"zero_optimization.stage": 3, "gradient_clipping": 0.5}
    with patch_environment(**{**asked, "ACCELERATE_USE_DEEPSPEED": "false"}):
        assert DeepSpeedPlugin().zero_stage == 2
    with (
        patch_environment(**{**ASKED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "two"}),
        pytest.raises(ConfigurationError, match="ACCELERATE_DEEPSPEED_ZERO_STAGE=two cannot be read"),
    ):
        DeepSpeedPlugin()


def test_an_accelerator_without_a_plugin_asks_the_launcher() -> None:
    with patch_environment(**ASKED, ACCELERATE_DEEPSPEED_ZERO_STAGE="0", ACCELERATE_GRADIENT_ACCUMULATION_STEPS="3"):
        accelerator = Accelerator(cpu=True)
        assert accelerator.deepspeed_plugin is not None
        assert (accelerator.deepspeed_plugin.zero_stage, accelerator.gradient_accumulation_steps) == (0, 3)


@pytest.mark.skipif(is_deepspeed_available(), reason="DeepSpeed is installed")
def test_an_accelerator_without_the_package_says_which_extra_it_needs() -> None:
    with (
        patch_environment(**ASKED),
        pytest.raises(MissingPackageError, match=r'pip install "trainer_lib\[deepspeed\]"'),
    ):
        Accelerator(cpu=True)


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.launch
def test_a_loop_is_launched_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    told = launched(tmp_path, "loop", "--config_file", str(tmp_path / "config.yaml"))
    assert told[:2] == [3, 2]
    torch.testing.assert_close(torch.tensor(told[2]), by_hand(), rtol=1e-5, atol=1e-6)


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.launch
def test_a_script_without_a_launcher_trains_on_one_process(tmp_path: Path) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    variables = {name: value for name, value in os.environ.items() if name not in names}
    variables |= {**ASKED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "DS_BUILD_OPS": "0"}
    variables |= {"PYTHONPATH": os.pathsep.join(filter(None, [PYTHON_PATH, os.environ.get("PYTHONPATH")]))}
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", "trainer"]
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "told.json").read_text())[:2] == [3, 1]


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.launch
def test_a_trainer_is_launched_by_options(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--soak"):
        pytest.skip("a launch from a file is the sample: --soak")
    told = launched(tmp_path, "trainer", "--use_deepspeed", "--zero_stage", "2", "--gradient_clipping", "auto")
    expected = launched(tmp_path, "trainer")
    assert [told[:2], expected[:2]] == [[2, 2], [None, 2]], "without DeepSpeed: DDP"
    torch.testing.assert_close(torch.tensor(told[2]), torch.tensor(expected[2]), rtol=1e-5, atol=1e-6)


def launched(folder: Path, kind: str, *options: str) -> Any:
    """Return what the main process of a launched script has written."""
    variables = {"DS_BUILD_OPS": "0", "PWD": str(folder)}
    script = f"import os; os.chdir({str(folder)!r})\n{SCRIPT}"
    done = run_launched(script, folder, kind, options=options, variables=variables)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "told.json").read_text())
