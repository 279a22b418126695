"""Accelerate's own scripts run with `trainer_lib` in their imports.

They are read from the installed package. What a script changes or leaves out, and why, is in the table.
"""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.accelerate_scripts.local_data import import_models, local_hub
from tests.accelerate_scripts.runner import ACCELERATE, leave_world, run_script
from tests.worlds import run_world

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
]
# What they check does not exist here, or not without a GPU.
LEFT_OUT = {
    "test_merge_weights.py": "the functions of the command, which is `trainer-lib checkpoint consolidate`",
    "external_deps/test_peak_memory_usage.py": "memory of a GPU",
    "external_deps/test_pippy.py": "pipelines",
    "external_deps/test_ds_alst_ulysses_sp.py": "DeepSpeed",
    "external_deps/test_ds_multiple_model.py": "DeepSpeed",
    "external_deps/test_zero3_integration.py": "DeepSpeed",
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


def test_every_script_is_run_or_left_out_with_a_reason() -> None:
    scripts = {str(path.relative_to(SCRIPTS)) for path in SCRIPTS.rglob("test_*.py")}
    assert {check.name for check in CHECKS} | set(LEFT_OUT) == scripts
