"""Every `--fsdp_` option of a launch, by what it does to a model that the script prepares, on two processes."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerator import toy
from tests.launched import PYTHON_PATH, run_as_script
from tests.strategies.sharded import stack
from tests.worlds import run_world
from trainer_lib import Accelerator
from trainer_lib.commands.launch.launch_environment import script_variables
from trainer_lib.commands.launch.launch_parser import parse
from trainer_lib.commands.launch.launch_values import LaunchValues
from trainer_lib.commands.main import main

ROOT = Path(__file__).parent.parent.parent
BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


def _prefetches(counts: dict[str, int]) -> Any:
    """Return a patch that counts the blocks gathered before they are needed, by direction."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    original: Any = FSDPParamGroup._prefetch_unshard

    def counted(group: Any, direction: str) -> None:
        counts[direction] += not group.is_unsharded
        original(group, direction)

    patch = pytest.MonkeyPatch.context()
    patch.__enter__().setattr(FSDPParamGroup, "_prefetch_unshard", staticmethod(counted))
    return patch


def _effects(folder: Path) -> dict[str, Any]:
    """Train two steps as a script without a plugin does, and return what the launcher's options did."""
    from torch.distributed.fsdp import FSDPModule
    from transformers.integrations import is_fsdp_enabled

    accelerator = Accelerator(cpu=True)
    network: Any = stack()
    if accelerator.process_index:
        with torch.no_grad():
            network.first.weight.fill_(1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer_lib.modules.activation_offload._SMALLEST", 0)
        network, optimizer = accelerator.prepare(network, torch.optim.AdamW(network.parameters(), lr=0.1))
    own = accelerator.get_state_dict(network) if accelerator.is_fsdp2 else {}
    started_equal = bool(own) and torch.equal(own["first.weight"][5:], stack().get_parameter("first.weight")[5:])
    forwards, moved, prefetched = [0], [0], {"forward": 0, "backward": 0}
    network.blocks[1].inner.register_forward_hook(lambda *call: forwards.__setitem__(0, forwards[0] + 1))

    def counted(self: Any, tensor: torch.Tensor) -> torch.Tensor:
        del self
        moved[0] += 1
        return tensor

    kept_whole: list[str] = []
    inputs, targets, _ = toy.data()
    for step in range(2):
        last = step == 1  # FSDP knows the order of blocks after the first step
        with contextlib.ExitStack() as patches:
            if last:
                patches.push(_prefetches(prefetched).__exit__)
                patch = patches.enter_context(pytest.MonkeyPatch.context())
                patch.setattr("trainer_lib.modules.activation_offload.HostMemory.to_host", counted)
                forwards[0] = 0
            loss = toy.losses(network, inputs[:8], targets[:8]).mean()
            kept_whole = [name for name, p in network.named_parameters() if not hasattr(p, "placements")]
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(folder)
    return {
        "type": accelerator.distributed_type.value,
        "placements": {str(p.placements) for p in network.parameters() if hasattr(p, "placements")},
        "wrapped": [name for name, module in network.named_modules() if name and isinstance(module, FSDPModule)],
        "whole": sorted(name for name, p in network.named_parameters() if not hasattr(p, "placements")),
        "whole after a forward": {name.rsplit(".", 2)[0] for name in kept_whole if name.startswith("blocks.0")},
        "files": sorted(path.name for path in folder.iterdir() if path.name.startswith("model")),
        "forwards": forwards[0],
        "inputs on the CPU": moved[0],
        "forward prefetches": prefetched["forward"],
        "backward prefetches": prefetched["backward"],
        "starts from rank 0": started_equal,
        "offloads": type(network._get_fsdp_state()._fsdp_param_groups[0].offload_policy).__name__,
        "loads on rank 0 only": is_fsdp_enabled(),
        "notes": list(accelerator.state.fsdp_notes),
    }


def _launched(folder: Path, *options: str) -> dict[str, Any]:
    variables: dict[str, Any] = script_variables(LaunchValues(parse(["--use_fsdp", *options, "script.py"])[0]))
    return run_world(_effects, (folder,), **variables)[0]


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `--use_fsdp` alone does."""
    return _launched(tmp_path_factory.mktemp("usual"))


def test_use_fsdp_alone_starts_fsdp2(usual: dict[str, Any]) -> None:
    assert usual == {
        "type": "FSDP",
        "placements": {"(Shard(dim=0),)"},
        "wrapped": BLOCKS,
        "whole": ["scale"],
        "whole after a forward": set(),
        "files": usual["files"],
        "forwards": 1,
        "inputs on the CPU": 0,
        "forward prefetches": 0,
        "backward prefetches": 3,
        "starts from rank 0": True,
        "offloads": "OffloadPolicy",
        "loads on rank 0 only": True,
        "notes": [],
    }
    assert "model.safetensors" not in usual["files"]
    assert usual["files"], "shards"


# Weights that stay gathered until the backward need no prefetch.
KEPT = {"whole after a forward": {"blocks.0"}, "backward prefetches": 0}
UNWRAPPED = {**KEPT, "wrapped": []}
WHOLE_LAST = ["last.bias", "last.weight", "scale"]
# Each line is a launch: options whose effects are not the same share one. The first two say what is so without them.
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    (
        "--fsdp_version 1 --fsdp_sharding_strategy 1 --fsdp-backward-prefetch BACKWARD_PRE"
        " --fsdp_min_num_params 80",  # of another policy
        {},
    ),
    ("--fsdp_version 2 --fsdp-reshard-after-forward=true --fsdp_state_dict_type SHARDED_STATE_DICT", {}),
    (
        "--fsdp_auto_wrap_policy SIZE_BASED_WRAP --fsdp_min_num_params 150",
        {"wrapped": BLOCKS},
    ),
    ("--fsdp-auto-wrap-policy size_based_wrap", UNWRAPPED),  # from 100,000,000 parameters on
    ("--fsdp_auto_wrap_policy NO_WRAP", UNWRAPPED),
    (
        "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp-transformer-layer-cls-to-wrap LayerNorm",
        {"wrapped": [f"{name}.norm" for name in BLOCKS], "whole after a forward": {"blocks.0"}},
    ),
    ("--fsdp_reshard_after_forward false", KEPT),
    (
        "--fsdp_sharding_strategy SHARD_GRAD_OP",
        {**KEPT, "notes": ["sharding_strategy='SHARD_GRAD_OP' is reshard_after_forward=False"]},
    ),
    ("--fsdp_state_dict_type FULL_STATE_DICT", {"files": ["model.safetensors"]}),
    (
        "--fsdp_backward_prefetch_policy NO_PREFETCH"  # its older name
        " --fsdp_cpu_ram_efficient_loading false",
        {"backward prefetches": 0, "loads on rank 0 only": False},
    ),
    (
        "--fsdp_forward_prefetch true --fsdp_offload_params true",
        {"forward prefetches": 3, "offloads": "CPUOffloadPolicy"},
    ),
    (
        "--fsdp-state-dict-type LOCAL_STATE_DICT --fsdp_use_orig_params false",
        {
            "notes": [
                "use_orig_params=False is use_orig_params=True (FSDP2 always keeps the model's own parameters)",
                "state_dict_type='LOCAL_STATE_DICT' is state_dict_type='SHARDED_STATE_DICT'",
            ]
        },
    ),
    ("--fsdp_activation_checkpointing true", {"forwards": 2}),
    (
        "--fsdp_activation_checkpointing true --fsdp_activation_checkpointing_offload true",
        {"forwards": 2, "inputs on the CPU": 3},
    ),
    ("--fsdp_ignored_modules last", {"whole": WHOLE_LAST}),
    (
        "--fsdp-sync-module-states false --fsdp-cpu-ram-efficient-loading false",
        {"starts from rank 0": False, "loads on rank 0 only": False},
    ),
]


QUICK = ("--fsdp_reshard_after_forward false", "--fsdp_state_dict_type FULL_STATE_DICT", "--fsdp_ignored_modules last")


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        pytest.param(options, changes, id=options, marks=() if options in QUICK else pytest.mark.slow)
        for options, changes in OPTIONS
    ],
)
def test_an_option_does_what_it_says(
    options: str, changes: dict[str, Any], usual: dict[str, Any], tmp_path: Path
) -> None:
    assert _launched(tmp_path, *options.split()) == {**usual, **changes}


# A file that `accelerate config` writes, in its older form.
CONFIG = """\
compute_environment: LOCAL_MACHINE
deepspeed_config: {}
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_offload_params: false
  fsdp_sharding_strategy: 1
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: Block
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
use_cpu: true
"""


@pytest.mark.slow
@pytest.mark.launch
def test_a_configuration_file_of_accelerate_starts_fsdp2(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, figures = tmp_path / "config.yaml", tmp_path / "figures.json"
    file.write_text(CONFIG)
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)
    monkeypatch.chdir(ROOT)
    script = ["tests/loops/fsdp.py", "--figures", str(figures), "--output_dir", str(tmp_path), "--epochs", "1"]
    assert main(["launch", "--config_file", str(file), *script]) == 0, capfd.readouterr().err
    sharded = json.loads(figures.read_text())
    run_world(run_as_script, (script,), 1)
    alone = json.loads(figures.read_text())
    assert (sharded["distributed_type"], alone["distributed_type"]) == ("FSDP", "MULTI_CPU")
    assert sharded["held"] < 0.6 * alone["held"], "half of the weights"
    assert sharded["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert sharded["norms"] == pytest.approx(alone["norms"], rel=1e-5)
    assert (tmp_path / "epoch_0" / "model.safetensors").is_file(), "FULL_STATE_DICT"
