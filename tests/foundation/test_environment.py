"""The variables of launchers, and the settings that are read from them."""

import os
import subprocess
import unittest
from pathlib import Path
from typing import Any, ClassVar

import pytest

from trainer_lib import ConfigurationError, UnsupportedError
from trainer_lib.foundation import environment
from trainer_lib.foundation.environment import (
    clear_environment,
    get_int_from_env,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    purge_accelerate_environment,
    read_world,
    str_to_bool,
)
from trainer_lib.foundation.launcher_variables import World, first_slurm_node

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
MASTER = {"MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
SLURM = {
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}


def world(**variables: str) -> World | None:
    """Read the world in an environment of nothing but `variables`."""
    with clear_environment(), patch_environment(**variables):
        return read_world()


def test_without_a_launcher_there_is_no_world() -> None:
    assert world() is None
    assert world(LOCAL_RANK="-1") is None


def test_torchrun() -> None:
    assert world(**TORCHRUN, **MASTER) == World(
        rank=5, size=8, local_rank=1, local_size=4, launcher="torchrun", master_addr="node0", master_port=1234
    )


def test_torchrun_without_local_variables_means_one_machine() -> None:
    environment = world(RANK="2", WORLD_SIZE="4")
    assert environment == World(rank=2, size=4, local_rank=2, local_size=4, launcher="torchrun")
    assert world(RANK="0", WORLD_SIZE="1") is not None, "one process under torchrun is a world too"


def test_srun() -> None:
    assert world(**SLURM) == World(
        rank=3, size=4, local_rank=1, local_size=2, launcher="srun", master_addr="gpu07", master_port=15042
    )
    named = world(**SLURM, **MASTER)
    assert named is not None
    assert (named.master_addr, named.master_port) == ("node0", 1234)


@pytest.mark.parametrize(
    ("variables", "local_size"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "4,2", "SLURM_NODEID": "1"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "4,2", "SLURM_NODEID": "0"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "2"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "3"}, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "3"}, 3),
    ],
)
def test_srun_says_how_many_processes_are_on_this_node(variables: dict[str, str], local_size: int) -> None:
    environment = world(**{**SLURM, **variables})
    assert environment is not None
    assert environment.local_size == local_size


def test_without_a_list_of_nodes_all_tasks_are_here() -> None:
    environment = world(**{name: value for name, value in SLURM.items() if name != "SLURM_STEP_TASKS_PER_NODE"})
    assert environment is not None
    assert environment.local_size == 4


@pytest.mark.parametrize(
    "step",
    [
        pytest.param({"SLURM_STEP_ID": "4294967291"}, id="batch script"),
        pytest.param({"SLURM_STEP_ID": "4294967290"}, id="interactive shell"),
        pytest.param({"SLURM_STEP_ID": "4294967292"}, id="extern step"),
        pytest.param({"SLURM_STEP_ID": ""}, id="allocation"),
        pytest.param({"SLURM_STEP_NUM_TASKS": "1"}, id="one task"),
    ],
)
def test_slurm_outside_of_a_real_step_means_alone(step: dict[str, str]) -> None:
    assert world(**{**SLURM, **step}) is None


@pytest.mark.parametrize(
    ("task", "is_alone"),
    [
        (["bash", "--norc", "-i"], True),
        (["sh", "-c", "read word; true"], False),
        (["bash", "script.sh"], False),
        (["cat"], False),
    ],
    ids=["interactive shell", "command", "script", "program"],
)
def test_the_shell_of_srun_pty_means_alone(tmp_path: Path, task: list[str], is_alone: bool) -> None:
    """`srun -n4 --pty bash` starts four shells, three of which end at once."""
    (tmp_path / "script.sh").write_text("read word; true")
    with subprocess.Popen(task, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=tmp_path) as process:
        arguments = Path(f"/proc/{process.pid}/cmdline")
        while not arguments.read_bytes():  # a moment after its start, the kernel has not written them yet
            assert process.poll() is None
        variables = {**SLURM, "SLURM_TASK_PID": str(process.pid)}
        assert (world(**variables, SLURM_PTY_PORT="4242") is None) == is_alone
        assert world(**variables) is not None
        process.communicate(b"exit\n")
    assert world(**variables, SLURM_PTY_PORT="4242") is not None  # there is no such process
    assert world(**SLURM, SLURM_PTY_PORT="4242") is not None


def test_mpirun() -> None:
    environment = world(**MPI)
    assert environment == World(rank=1, size=2, local_rank=0, local_size=1, launcher="mpirun")
    assert world(PMI_RANK="1", PMI_SIZE="2", MPI_LOCALRANKID="1", MPI_LOCALNRANKS="2") == World(
        rank=1, size=2, local_rank=1, local_size=2, launcher="mpirun"
    )
    assert world(PMI_RANK="0", PMI_SIZE="1") is None


def test_torchrun_beats_slurm_beats_mpi() -> None:
    assert [
        environment and environment.launcher
        for environment in (world(**MPI, **SLURM, **TORCHRUN), world(**MPI, **SLURM), world(**MPI))
    ] == ["torchrun", "srun", "mpirun"]


def test_a_local_rank_that_was_set_for_deepspeed_is_no_launchers() -> None:
    with clear_environment():
        with environment.local_rank_set(0):
            assert os.environ["LOCAL_RANK"] == "0"
            assert read_world() is None
        assert not os.environ


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is missing while RANK is set. Set both"),
        ({"WORLD_SIZE": "2"}, "RANK is missing while WORLD_SIZE is set. Set both"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK=0 is set but RANK and WORLD_SIZE are not. Start with torchrun"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one' is not a whole number."),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE='' is not a whole number."),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "x"}, "MASTER_PORT='x' is not a whole number."),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "Rank 2 does not fit a world of 2 (torchrun)."),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "Rank -1 does not fit a world of 2 (torchrun)."),
        ({**SLURM, "SLURM_PROCID": "4"}, "Rank 4 does not fit a world of 4 (srun)."),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS='many' is not a whole number."),
        ({**SLURM, "SLURM_NODEID": "2"}, "SLURM_NODEID=2 is not among the nodes of SLURM_STEP_TASKS_PER_NODE='2(x2)'."),
        ({**SLURM, "SLURM_JOB_ID": "?"}, "SLURM_JOB_ID='?' is not a whole number."),
        ({**MPI, "OMPI_COMM_WORLD_RANK": "?"}, "OMPI_COMM_WORLD_RANK='?' is not a whole number."),
    ],
)
def test_an_incomplete_world_raises(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        world(**variables)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("login1", "login1"),
        ("login1,gpu[3-4]", "login1"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("gpu[12]", "gpu12"),
        ("node-a,node-b[1-2]", "node-a"),
        ("gpu[1,3]-ib", "gpu1-ib"),
        ("rack[2-3]node[04-05]", "rack2node04"),
        ("", ""),
    ],
)
def test_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_slurm_node(nodes) == first


@pytest.mark.parametrize("text", ["y", "yes", "t", "TRUE", "on", "1"])
def test_ways_to_say_yes(text: str) -> None:
    assert str_to_bool(text) == 1
    assert str_to_bool(text, to_bool=True) is True


@pytest.mark.parametrize("text", ["n", "no", "f", "False", "off", "0"])
def test_ways_to_say_no(text: str) -> None:
    assert str_to_bool(text) == 0
    assert str_to_bool(text, to_bool=True) is False


def test_neither_yes_nor_no() -> None:
    with pytest.raises(ConfigurationError, match=r"'maybe' is neither yes nor no. Known: 0, 1, f, false"):
        str_to_bool("maybe")
    with patch_environment(flag="2"), pytest.raises(ConfigurationError, match=r"^FLAG='2' is neither yes nor no\."):
        parse_flag_from_env("FLAG")


def test_values_in_variables() -> None:
    with patch_environment(first="", second="7", third="-1", flag="yes", empty="", choice="bf16"):
        assert get_int_from_env(["MISSING", "THIRD", "SECOND"], 3) == 7
        assert get_int_from_env(["MISSING", "THIRD"], 3) == 3
        assert get_int_from_env(["FIRST"], 3) == 3
        assert parse_flag_from_env("FLAG") is True
        assert parse_flag_from_env("EMPTY") is False
        assert parse_flag_from_env("MISSING", default=True) is True
        assert parse_choice_from_env("CHOICE") == "bf16"
        assert parse_choice_from_env("MISSING") == "no"
        with pytest.raises(ConfigurationError, match="CHOICE='bf16' is not a whole number"):
            get_int_from_env(["CHOICE"], 1)


def test_settings_of_the_launcher() -> None:
    assert environment.debug_mode() is False
    assert environment.cpu_requested() is False
    assert environment.device_requested() is None
    assert environment.mixed_precision_requested() == "no"
    assert environment.accumulation_steps_requested() == 1
    assert environment.expected_world_size() is None
    assert environment.launched_by_fork() is False
    assert environment.log_level_requested() is None
    assert environment.elastic_attempt() is None
    assert environment.store_file() is None
    with patch_environment(
        accelerate_debug_mode="true",
        accelerate_use_cpu="1",
        accelerate_torch_device="cpu",
        accelerate_mixed_precision="BF16",
        accelerate_gradient_accumulation_steps="4",
        trainer_lib_world_size="2",
        fork_launched="1",
        accelerate_log_level="info",
        torchelastic_use_agent_store="True",
        torchelastic_restart_count="3",
        trainer_lib_store_file="/somewhere",
    ):
        assert environment.debug_mode() is True
        assert environment.cpu_requested() is True
        assert environment.device_requested() == "cpu"
        assert environment.mixed_precision_requested() == "bf16"
        assert environment.accumulation_steps_requested() == 4
        assert environment.expected_world_size() == 2
        assert environment.launched_by_fork() is True
        assert environment.log_level_requested() == "info"
        assert environment.elastic_attempt() == "3"
        assert environment.store_file() == "/somewhere"


def test_an_older_variable_of_tensor_parallelism_names_the_new_ones() -> None:
    with (
        patch_environment(ACCELERATE_USE_TP="true"),
        pytest.raises(UnsupportedError, match=r"ACCELERATE_USE_TP .* Unset it, and set .*PARALLELISM_CONFIG_TP_SIZE"),
    ):
        environment.refuse_unsupported_engines()


def test_what_the_launcher_says_about_compilation() -> None:
    assert environment.dynamo_setting("BACKEND") is None
    assert environment.dynamo_flag("USE_DYNAMIC") is None
    with patch_environment(accelerate_dynamo_backend="INDUCTOR", accelerate_dynamo_use_dynamic="False"):
        assert environment.dynamo_setting("BACKEND") == "INDUCTOR"
        assert environment.dynamo_flag("USE_DYNAMIC") is False


def test_patched_environment_comes_back_after_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "before")

    def fail_inside() -> None:
        with patch_environment(kept=1, new="x"):
            assert (os.environ["KEPT"], os.environ["NEW"]) == ("1", "x")
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert os.environ["KEPT"] == "before"
    assert "NEW" not in os.environ


def test_cleared_environment_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "before")
    with clear_environment():
        assert not os.environ
        os.environ["NEW"] = "x"
    assert os.environ["KEPT"] == "before"
    assert "NEW" not in os.environ


def test_purging_takes_back_what_a_function_or_test_class_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_KEPT", "before")

    def change() -> str:
        os.environ["ACCELERATE_KEPT"] = "changed"
        os.environ["ACCELERATE_NEW"] = "x"
        return "done"

    class Tests:
        named: ClassVar[list[str]] = []

        def __init_subclass__(cls, name: str, **options: Any) -> None:
            super().__init_subclass__(**options)
            cls.named.append(name)

        def test_something(self) -> str:
            return change()

    purge_accelerate_environment(Tests)

    class More(Tests, name="more"):
        def test_more(self) -> str:
            return change()

    for changing in (purge_accelerate_environment(change), Tests().test_something, More().test_more):
        assert changing() == "done"
        assert os.environ["ACCELERATE_KEPT"] == "before"
        assert "ACCELERATE_NEW" not in os.environ
    assert Tests.named == ["more"]


def test_subclasses_of_purged_tests_are_set_up_by_unittest() -> None:
    class Tests(unittest.TestCase):
        pass

    class More(purge_accelerate_environment(Tests)):
        pass

    More.addClassCleanup(print)
    assert not Tests._class_cleanups  # type: ignore[attr-defined]


def test_cublas_choice_made_already_stays() -> None:
    with clear_environment():
        environment.make_cublas_deterministic()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    with clear_environment(), patch_environment(cublas_workspace_config=":16:8"):
        environment.make_cublas_deterministic()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_variables_can_be_set_for_good() -> None:
    with clear_environment():
        settings: dict[str, Any] = {"ACCELERATE_USE_CPU": "1"}
        environment.set_variables(settings)
        assert environment.cpu_requested()


def test_variables_as_lines() -> None:
    variables = {"KEY": "value", "EMPTY": "", "TWO": "a b", "LINE": "a\nb", "ARROW>": "x"}
    assert environment.convert_dict_to_env_variables(variables) == ["KEY=value\n"]


def test_a_path_is_added_to_a_variable() -> None:
    with patch_environment(some_path="/a::/b"):
        assert environment.env_var_path_add("SOME_PATH", "/c") == "/a:/b:/c"
        assert os.environ["SOME_PATH"] == "/a::/b"
    assert environment.env_var_path_add("SOME_PATH", "/c") == "/c"
