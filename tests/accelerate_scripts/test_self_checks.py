"""Accelerate's own scripts run with `trainer_lib` in their imports.

They are read from the installed package. What a script changes or leaves out, and why, is in the table.
"""

import os
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.accelerate_scripts.local_data import import_models, local_hub, write_deepspeed_config
from tests.accelerate_scripts.runner import ACCELERATE, leave_world, run_script
from tests.strategies.test_deepspeed import needs_deepspeed, package
from tests.worlds import run_world
from trainer_lib.launchers import run_forked

__all__ = ["package"]  # a fixture

SCRIPTS = ACCELERATE / "test_utils" / "scripts"


class Check(NamedTuple):
    """A script, how it is started, and what is replaced in it."""

    name: str
    processes: tuple[int, ...] = (1, 2)
    arguments: tuple[str, ...] = ()
    replaced: dict[str, str] = {}  # noqa: RUF012 - never changed
    variables: dict[str, str] = {}  # noqa: RUF012 - never changed
    takes_hub: bool = False
    quick: bool = False


_TINY = "dict(num_hidden_layers=2, hidden_size=16, num_attention_heads=2, intermediate_size=32)"
_TINY_GPT2 = "dict(n_layer=2, n_embd=16, n_head=2)"
# It counts the memory of accelerators alone, and reads what it did not count.
_NO_MEMORY_COUNTED = {
    "    def __enter__(self):\n": "    def __enter__(self):\n        self.begin = self.end = self.peak = 0\n"
}
_EACH_PROCESS = "Accelerator(scheduler_steps_per_process=True, "
_WITH_HUB: dict[str, Any] = {"takes_hub": True}
CHECKS = [
    Check("test_cli.py", (1,)),
    Check("test_ops.py", quick=True),
    # Its reference is a DDP model on GPUs.
    Check(
        "test_ddp_comm_hook.py",
        (2,),
        replaced={
            "        device_ids=[accelerator.local_process_index],\n": "",
            "        output_device=accelerator.local_process_index,\n": "",
        },
    ),
    Check(
        "test_sync.py",
        quick=True,
        replaced={
            # It expects one step of a schedule per process, as the named switch gives.
            "Accelerator(\n        dataloader_config": _EACH_PROCESS + "dataloader_config",
            # It expects a window cut short to be divided by the full number of micro-batches: whole windows only.
            "    dset = RegressionDataset(length=80)": "    dset = RegressionDataset(length=128)",
        },
    ),
    Check("test_script.py"),
    Check(
        "test_distributed_data_loop.py",
        (2,),
        replaced={
            # They expect warnings that `join_uneven_inputs` does nothing for iterables and on CPUs: here it works.
            "    test_join_raises_warning_for_iterable_when_overriding_even_batches()\n\n": "",
            "    accelerator.state.distributed_type = DistributedType.FSDP\n": "",
            "    test_join_raises_warning_for_non_ddp_distributed(accelerator)\n": "",
            "    accelerator.state.distributed_type = original_state\n": "",
            # Each rank has a folder of its own for its part of a checkpoint: here all ranks share one.
            "        with tempfile.TemporaryDirectory() as tmpdir:": '        for tmpdir in [f"state_{iterable}"]:',
            # An Accelerator holds a process group and threads, which cannot be pickled.
            "    test_pickle_accelerator()\n": "",
        },
    ),
    Check(
        "test_notebook.py",
        (1,),
        variables={"ACCELERATE_NUM_PROCESSES": "2"},
        # The launcher's error is this library's.
        replaced={
            "from torch.distributed.elastic.multiprocessing.errors import ChildFailedError\n": "",
            "raises(ChildFailedError": "raises(__import__('trainer_lib').launchers.ProcessFailedError",
            # It expects that bitsandbytes cannot be imported before a launch, where it has used no accelerator yet.
            "        test_problematic_imports()\n": "        pass\n",
            # Both processes may see the last entry of the queue, and one of them gets it. The other one fails here
            # after a while, and is restarted, instead of waiting without end.
            "    trial = queue.get()\n": "    trial = queue.get(timeout=10)\n",
        },
    ),
    Check(
        "test_merge_weights.py",
        (2,),
        # The weights of FSDP2 are DTensors.
        replaced={"zip(state_1.values()": "zip([weight.full_tensor() for weight in state_1.values()]"},
    ),
    Check("external_deps/test_metrics.py"),
    Check(
        "external_deps/test_performance.py",
        arguments=("--num_epochs", "2"),
        replaced={"Accelerator(**": _EACH_PROCESS + "**"},  # as in test_sync.py
        **_WITH_HUB,
    ),
    Check("external_deps/test_checkpointing.py", arguments=("--num_epochs", "1"), **_WITH_HUB),
    Check(
        "external_deps/test_pippy.py",
        (2,),
        replaced={
            "    config_args = {}": f"    config_args = {_TINY} | {_TINY_GPT2}",
            # It runs on GPUs alone.
            "[DistributedType.MULTI_GPU, ": "[DistributedType.MULTI_CPU, ",
        },
        **_WITH_HUB,
    ),
    _PEAK_MEMORY := Check("external_deps/test_peak_memory_usage.py", replaced=_NO_MEMORY_COUNTED, **_WITH_HUB),
]
# Run where DeepSpeed is installed, with these configs: a ZeRO stage, with an optimizer and a schedule or without.
DEEPSPEED_CHECKS = [
    (_PEAK_MEMORY, ("zero2", "zero3")),
    (Check("external_deps/test_performance.py", arguments=("--num_epochs", "2"), **_WITH_HUB), ("zero2", "zero3")),
    (Check("external_deps/test_checkpointing.py", arguments=("--num_epochs", "1"), **_WITH_HUB), ("zero2", "zero3")),
    (
        Check(
            "external_deps/test_ds_multiple_model.py",
            arguments=("--num_epochs", "2"),
            replaced={
                'f"{test_file_dir_str}/tests/deepspeed/ds_config_zero2_model_only.json"': '"zero2_model_only.json"',
                'f"{test_file_dir_str}/tests/deepspeed/ds_config_zero3_model_only.json"': '"zero3_model_only.json"',
                # The engine is inside the prepared model.
                "    assert zero2_accelerator.deepspeed_engine_wrapped.engine is zero2_model\n": "",
                "    assert zero3_accelerator.deepspeed_engine_wrapped.engine is zero3_model\n": "",
                # A tiny model with random weights does not learn in two epochs.
                "assert best_performance > ": "assert best_performance >= ",
                "assert best_performance_a > ": "assert best_performance_a >= ",
                "assert best_performance_b > ": "assert best_performance_b >= ",
            },
            **_WITH_HUB,
        ),
        ("",),
    ),
    (
        Check(
            "external_deps/test_ds_alst_ulysses_sp.py",
            replaced={
                "AutoTokenizer.from_pretrained(model_name)": "None",
                "AutoModelForCausalLM.from_pretrained(model_name)": (
                    "AutoModelForCausalLM.from_config("
                    f"__import__('transformers').LlamaConfig(vocab_size=512, num_key_value_heads=2, **{_TINY}))"
                ),
                # The group is the mesh's: sequence parallelism runs without DeepSpeed.
                "groups._get_sequence_parallel_group()": "accelerator.torch_device_mesh['sp'].get_group()",
            },
        ),
        ("zero3_model_only",),
    ),
]
# What they check is not Accelerate's.
LEFT_OUT = {
    "external_deps/test_zero3_integration.py": "transformers reads a DeepSpeed config, and Accelerate does nothing"
}


def _run(check: Check, *arguments: str) -> None:
    with local_hub() if check.takes_hub else nullcontext():
        run_script(SCRIPTS / check.name, "trainer_lib", [*check.arguments, *arguments], check.replaced)


CASES = [
    pytest.param(
        check, processes, id=f"{Path(check.name).stem}-{processes}", marks=[] if check.quick else [pytest.mark.slow]
    )
    for check in CHECKS
    for processes in check.processes
]


@pytest.mark.parametrize(("check", "processes"), CASES)
def test_accelerates_own_scripts_pass(check: Check, processes: int, tmp_path: Path) -> None:
    if check.takes_hub:
        import_models()

    def body() -> None:
        os.chdir(tmp_path)
        os.environ.update(check.variables)
        if processes == 1:
            leave_world()
        _run(check)
        if "checkpointing" in check.name:
            _run(check, "--resume_from_checkpoint", "epoch_0")

    run_world(body, num_processes=processes, timeout=100)


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("check", "config"),
    [
        pytest.param(check, config, id=f"{Path(check.name).stem}-{config}")
        for check, configs in DEEPSPEED_CHECKS
        for config in configs
    ],
)
def test_accelerates_own_scripts_pass_with_deepspeed(check: Check, config: str, tmp_path: Path) -> None:
    import_models()
    import_module("transformers.models.llama.modeling_llama")
    for stage in (2, 3):
        write_deepspeed_config(tmp_path / f"zero{stage}.json", stage)
        write_deepspeed_config(tmp_path / f"zero{stage}_model_only.json", stage, model_only=True)
    file = str(tmp_path / f"{config}.json")
    variables = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": file} if config else {}

    def body() -> None:
        os.chdir(tmp_path)
        _run(check)
        if "checkpointing" in check.name:
            _run(check, "--resume_from_checkpoint", "epoch_0")

    run_forked(body, num_processes=2, timeout=200, **variables)


def test_every_script_is_run_or_left_out_with_a_reason() -> None:
    scripts = {str(path.relative_to(SCRIPTS)) for path in SCRIPTS.rglob("test_*.py")}
    run = {check.name for check in CHECKS} | {check.name for check, _ in DEEPSPEED_CHECKS}
    assert not run & set(LEFT_OUT)
    assert run | set(LEFT_OUT) == scripts
