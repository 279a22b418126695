"""`trainer-lib config`: its questions on a real terminal, through a pipe, and what their answers make."""

import io
import os
import re
import select
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer_lib.commands.config.config import get_user_input
from trainer_lib.commands.main import main
from trainer_lib.launchers import device_count
from trainer_lib.launchers.settings.config_file import load_config_from_file, write_basic_config
from trainer_lib.launchers.settings.launch_options import SETTINGS
from trainer_lib.options.enums import DistributedType

LIMIT = 30  # seconds


@pytest.fixture(autouse=True)
def without_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the questions be those of a machine without accelerators."""
    monkeypatch.setattr(device_count, "count_accelerators", lambda: 0)
    monkeypatch.setattr(device_count, "get_current_device_type", lambda: ("cpu", "MULTI_CPU"))


class Form:
    """Fills in the questionnaire in this process, from a pipe."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: Path) -> None:
        self.file = file
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def fill(self, *answers: str, code: int = 0, place: str = "") -> str:
        """Give answers, in order, and return what was printed."""
        lines = "".join(f"{answer}\n" for answer in (place, *answers))
        self._monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        ended = main(["config", "--config_file", str(self.file)])
        captured = self._capsys.readouterr()
        assert ended == code, captured.err
        return captured.out + captured.err

    @property
    def values(self) -> dict[str, Any]:
        """What the file holds."""
        return yaml.safe_load(self.file.read_text())


@pytest.fixture
def form(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Form:
    """Return what fills in the questionnaire."""
    return Form(monkeypatch, capsys, tmp_path / "config.yaml")


# The questions when each is answered by its default, on a machine without accelerators.
SHORTEST = ["machines", "cpu", "debug", "dynamo", "fsdp", "deepspeed", "processes", "precision", "write"]


def answers(**given: str) -> list[str]:
    return [given.get(name, "") for name in SHORTEST]


def test_defaults_are_what_the_machine_has(form: Form) -> None:
    printed = form.fill(*answers())
    assert form.values["num_processes"] == 1
    assert (form.values["use_cpu"], form.values["distributed_type"], form.values["mixed_precision"]) == (
        True,
        "NO",
        "no",
    )
    assert printed.splitlines()[1:3] == [
        "Where do you train? (LOCAL_MACHINE, AMAZON_SAGEMAKER) [LOCAL_MACHINE]: ",
        "How many machines? [1]: ",
    ]
    assert f"Start a script with it: trainer-lib launch --config_file {form.file} SCRIPT\n" in printed
    assert not form.file.with_name("config.yaml.bak").exists()


def test_all_devices_are_the_default(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_count, "count_accelerators", lambda: 4)
    monkeypatch.setattr(device_count, "get_current_device_type", lambda: ("cuda", "MULTI_GPU"))
    printed = form.fill("", "", "", "", "", "", "5", "", "", "bf16", "", "")
    assert "Train on the CPU only? (4 cuda devices found) [no]" in printed
    assert "The answer must be at most 4: each process needs a device (got 5)." in printed
    assert (form.values["num_processes"], form.values["distributed_type"]) == (4, "MULTI_GPU")
    assert (form.values["gpu_ids"], form.values["mixed_precision"]) == ("all", "bf16")


def test_sharding_is_written_as_accelerate_writes_it(form: Form) -> None:
    form.fill(
        *("", "yes", "no", "no", "yes"), *("no", "TRANSFORMER_based_wrap", "BertLayer", "yes", "FULL_STATE_DICT"),
        *("no", "yes"), *("yes", "2", "2", "", "", ""), *("", "bf16", "yes"),
    )  # fmt: skip
    assert form.values["fsdp_config"] == {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "BertLayer",
        "fsdp_offload_params": True,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_activation_checkpointing": True,
    }
    assert form.values["parallelism_config"] == {
        "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_dp_shard_size": 2,
        "parallelism_config_tp_size": 1,
        "parallelism_config_cp_size": 1,
        "parallelism_config_sp_size": 1,
    }
    assert (form.values["num_processes"], form.values["distributed_type"]) == (4, "FSDP")
    accelerates = pytest.importorskip("accelerate.commands.config.config_args")
    assert accelerates.load_config_from_file(str(form.file)).fsdp_config == form.values["fsdp_config"]


def test_wrap_by_size_and_several_machines_are_asked_for(form: Form) -> None:
    form.fill(
        *("2", "1", "10.0.0.1", ""), *("", "yes", "", "no"),
        *("yes", "", "SIZE_BASED_WRAP", "1000", "", "", "", "", "no"),
        *("4", "", "yes"),
    )  # fmt: skip
    values = form.values
    assert (values["num_machines"], values["machine_rank"], values["main_process_ip"]) == (2, 1, "10.0.0.1")
    assert (values["main_process_port"], values["debug"], values["num_processes"]) == (29500, True, 4)
    assert values["fsdp_config"]["fsdp_min_num_params"] == 1000
    assert "fsdp_transformer_layer_cls_to_wrap" not in values["fsdp_config"]


def test_compilation_is_asked_for_only_with_a_backend(form: Form) -> None:
    printed = form.fill("", "", "", "EAGER", "max-autotune", "default", "yes", "no", "no", "", "", "", "", "")
    assert "max-autotune" in printed
    assert "needs the backend 'inductor'" in printed, "a contradiction is named at once"
    assert form.values["dynamo_config"]["dynamo_backend"] == "eager"
    assert form.values["dynamo_config"]["dynamo_use_fullgraph"] is True


def test_deepspeed_is_written(form: Form) -> None:
    printed = form.fill(
        "", "no", "", "", "", "deepspeed", "", "3", "cpu", "none", "2", "1.5", "yes", "no", "", "", "", "", "", ""
    )
    assert "a launch with this file is refused" not in printed
    assert form.values["distributed_type"] == "DEEPSPEED"
    assert form.values["deepspeed_config"] == {
        "zero_stage": 3,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "none",
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.5,
        "zero3_init_flag": True,
        "zero3_save_16bit_model": False,
    }


def read_by_accelerate(form: Form) -> dict[str, Any]:
    """Return what Accelerate reads from the file, without what is not set."""
    accelerates = pytest.importorskip("accelerate.commands.config.config_args")
    values = accelerates.load_config_from_file(str(form.file)).to_dict()
    return {name: value for name, value in values.items() if name in form.values}


def test_all_sizes_of_parallelism_are_asked_for(form: Form) -> None:
    form.fill(
        *("", "yes", "no", "no", "yes"), *[""] * 7, *("yes", "1", "2", "2", "2", "alltoall", "2", "4096", ""),
        *("8", "16", "", "yes"),
    )  # fmt: skip
    assert form.values["parallelism_config"] == {
        "parallelism_config_dp_replicate_size": 1,
        "parallelism_config_dp_shard_size": 2,
        "parallelism_config_tp_size": 2,
        "parallelism_config_cp_size": 2,
        "parallelism_config_cp_comm_strategy": "alltoall",
        "parallelism_config_sp_size": 2,
        "parallelism_config_sp_seq_length": "4096",
        "parallelism_config_sp_attn_implementation": "sdpa",
        "parallelism_config_sp_seq_length_is_variable": False,
    }
    assert form.values["num_processes"] == 16, "the product; 8 was refused"
    assert read_by_accelerate(form) == form.values


def test_megatron_lm_and_fp8_are_written(form: Form) -> None:
    printed = form.fill(
        *("", "no", "", "", "", "megatron_lm"), *("4", "no", "2", "8", "", "", "0.5"),
        *("8", "all", "fp8", "te", "yes", "2", "", "E4M3", "16", "", "no,no,yes", "", ""),
    )  # fmt: skip
    assert "This version cannot run" not in printed
    assert (form.values["distributed_type"], form.values["mixed_precision"]) == ("MEGATRON_LM", "fp8")
    assert form.values["megatron_lm_config"] == {
        "megatron_lm_tp_degree": 4,
        "megatron_lm_sequence_parallelism": False,
        "megatron_lm_pp_degree": 2,
        "megatron_lm_num_micro_batches": 8,
        "megatron_lm_recompute_activations": True,
        "megatron_lm_use_distributed_optimizer": True,
        "megatron_lm_gradient_clipping": 0.5,
    }
    assert form.values["fp8_config"] == {
        "fp8_backend": "te",
        "fp8_use_autocast_during_eval": True,
        "fp8_margin": 2,
        "fp8_interval": 1,
        "fp8_format": "E4M3",
        "fp8_amax_history_len": 16,
        "fp8_amax_compute_algo": "most_recent",
        "fp8_override_linear_precision": [False, False, True],
    }
    assert read_by_accelerate(form) == form.values
    before = form.values
    printed = form.fill(*[""] * 28)
    assert "Compute which products in higher precision? [no,no,yes]: " in printed
    assert form.values == before, "the answers in the file are the defaults"


def test_a_hostfile_of_mpi_is_asked_for_with_several_machines(form: Form) -> None:
    printed = form.fill("2", "0", "host", "", "yes", "", "~/hosts", "", "", "", "4", "", "")
    assert "This version cannot run a launch by MPI" in printed or SETTINGS["mpirun_hostfile"].missing is None
    assert form.values["mpirun_config"] == {"mpirun_hostfile": "~/hosts"}
    assert read_by_accelerate(form) == form.values


def test_sagemaker_is_written_as_accelerate_writes_it(form: Form) -> None:
    form.fill(
        *("training", "eu-west-1", "role", "", "inputs.tsv", ""), *("DATA_PARALLEL", "ml.p3.2xlarge", "", "2", "yes"),
        *("bf16", "inductor", "", "", "", "", ""), place="AMAZON_SAGEMAKER",
    )  # fmt: skip
    values = form.values
    assert (values["compute_environment"], values["distributed_type"]) == ("AMAZON_SAGEMAKER", "DATA_PARALLEL")
    assert (values["profile"], values["region"], values["iam_role_name"]) == ("training", "eu-west-1", "role")
    assert (values["ec2_instance_type"], values["num_machines"]) == ("ml.p3.16xlarge", 2), "the other has one GPU"
    assert (values["sagemaker_inputs_file"], "sagemaker_metrics_file" in values) == ("inputs.tsv", False)
    assert values["dynamo_config"]["dynamo_backend"] == "inductor"
    assert read_by_accelerate(form) == values
    form.fill(*[""] * 17)
    assert form.values == values, "the answers in the file are the defaults"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"machines": "none"}, "The answer must be a whole number of at least 1 (got 'none')."),
        ({"cpu": "perhaps"}, "The answer must be yes or no (got 'perhaps')."),
        ({"dynamo": "inducter"}, "got 'inducter'). Did you mean 'inductor'?"),
        ({"precision": "bf61"}, "Did you mean 'bf16'?"),
    ],
)
def test_a_wrong_answer_is_asked_for_again(form: Form, wrong: dict[str, str], message: str) -> None:
    (name,) = wrong
    lines = answers(**wrong)
    lines.insert(SHORTEST.index(name) + 1, "")
    assert message in form.fill(*lines)
    assert form.values["num_processes"] == 1


def test_back_goes_back_as_often_as_asked_and_keeps_answers_as_defaults(form: Form) -> None:
    printed = form.fill("2", "back", "3", "1", "back", "2", "back", "back", "1", *answers()[1:], place="back\n")
    assert printed.count("This is the first question.") == 1
    assert "How many machines? [2]: 3" in printed
    assert "Which of them is this, from 0? [1]: 2" in printed
    assert (form.values["num_machines"], form.values["machine_rank"]) == (1, 0)
    assert "main_process_ip" not in form.values


def test_back_passes_over_questions_that_were_not_asked(form: Form) -> None:
    printed = form.fill("", "back", "2", "0", "host", "", "", "", *answers(processes="2")[2:])
    assert printed.count("How many machines? [1]: ") == 2
    assert (form.values["num_machines"], form.values["num_processes"]) == (2, 2)


def test_a_question_mark_explains(form: Form) -> None:
    printed = form.fill("?", *answers())
    assert "  You run the launcher on each of them. Allowed: a whole number of at least 1; `back` goes" in printed


def test_the_file_that_is_there_gives_the_defaults_and_is_kept(form: Form) -> None:
    form.file.write_text("num_processes: 3\nuse_cpu: true\nmixed_precision: bf16\ngpu_ids: 0,1\n")
    printed = form.fill(*answers())
    assert f"The defaults are those in {form.file}." in printed
    assert (form.values["num_processes"], form.values["mixed_precision"]) == (3, "bf16")
    assert form.values["distributed_type"] == "MULTI_CPU"
    assert "num_processes: 3\nuse_cpu" in form.file.with_name("config.yaml.bak").read_text()


def test_a_file_that_cannot_be_read_is_named(form: Form) -> None:
    form.file.write_text("num_processes: x")
    assert "line 1: `num_processes` must be" in form.fill(*answers())
    assert form.values["num_processes"] == 1


@pytest.mark.parametrize(
    ("place", "reason"),
    [("folder", "Is a directory"), ("file.txt/config.yaml", "is a file"), ("locked/c.yaml", "denied")],
)
def test_a_target_that_cannot_be_written_is_named_before_the_first_question(
    form: Form, place: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = form.file.parent
    (folder / "folder").mkdir()
    (folder / "locked").mkdir()
    (folder / "file.txt").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "locked")  # root may write anywhere
    form.file = folder / place
    printed = form.fill(code=2)
    assert f"{form.file} cannot be written: " in printed
    assert f"{reason}. Name another place." in printed
    assert "?" not in printed


def test_nothing_is_written_without_the_last_yes(form: Form) -> None:
    assert form.fill(*answers(write="no")).endswith("Nothing was written.\n")
    printed = form.fill(*answers()[:3], code=2)
    assert "The input ended at the question for dynamo_backend" in printed
    assert "or use `trainer-lib config default`" in printed
    assert not form.file.exists()


@pytest.mark.launch
@pytest.mark.slow
def test_answers_come_through_a_real_pipe(settings_home: Path) -> None:
    command = [sys.executable, "-m", "trainer_lib", "config"]
    lines = "\n".join(["", "", "yes", *answers(processes="2")[2:]]) + "\n"
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=LIMIT, check=True)
    file = settings_home / "trainer_lib" / "default_config.yaml"
    assert f"The configuration is in {file}." in done.stdout
    assert load_config_from_file(None).num_processes == 2  # pyright: ignore[reportAttributeAccessIssue]


def test_a_closed_input_writes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    command = [
        "bash",
        "-c",
        '"$@" <&-',
        "bash",
        sys.executable,
        "-m",
        "trainer_lib",
        "config",
        "--config_file",
        str(file),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (done.returncode, file.exists()) == (2, False)
    assert "The input ended at the question for compute_environment: " in done.stderr


# Ctrl-C reaches the command only when the terminal is the one that controls its session.
ON_A_TERMINAL = """
import fcntl, sys, termios
from trainer_lib.commands.main import main
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.exit(main(["config", "--config_file", sys.argv[1]]))
"""


class Terminal:
    """A pseudo-terminal on which the command runs."""

    def __init__(self, file: Path) -> None:
        self._terminal, inner = os.openpty()
        command = [sys.executable, "-c", ON_A_TERMINAL, str(file)]
        without_devices = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            command, stdin=inner, stdout=inner, stderr=inner, env=without_devices, start_new_session=True
        )
        os.close(inner)
        self._read = ""

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)

    def wait_for(self, text: str) -> None:
        """Read until a text appears."""
        end = time.monotonic() + LIMIT
        while text not in self._read:
            assert select.select([self._terminal], [], [], end - time.monotonic())[0], (
                f"{text!r} is not in {self._read}"
            )
            self._read += os.read(self._terminal, 4096).decode()
        self._read = self._read.partition(text)[2]

    def type(self, text: str) -> None:
        """Type a text."""
        os.write(self._terminal, text.encode())

    def code(self, key: str = "") -> int:
        """Wait for the end, and return the exit code; press a key until then.

        Python shows a question before it waits for input: Ctrl-C in between is only noticed with the next key.
        """
        for _ in range(LIMIT // 5):
            self.type(key)
            # Once more only after seconds: a second Ctrl-C would end Python's own exit.
            with suppress(subprocess.TimeoutExpired):
                return self._process.wait(timeout=5)
        raise AssertionError("the command does not end")


@pytest.mark.launch
@pytest.mark.slow
def test_answers_are_typed_on_a_terminal(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with Terminal(file) as terminal:
        terminal.wait_for("Where do you train?")
        terminal.type("\n")
        terminal.wait_for("How many machines? [1]: ")
        terminal.type("1\x1b[D5\x1b[C\x7f\n")  # 1, left, 5, right, backspace
        terminal.wait_for("from 0? [0]: ")
        terminal.type("back\n")
        terminal.wait_for("How many machines? [5]: ")
        terminal.type("12\x7f\n")  # the erase key takes back the 2
        terminal.wait_for("Train on the CPU only?")
        for _ in range(5):
            terminal.type("\n")
        terminal.wait_for("How many processes")
        terminal.type("2\n")
        terminal.wait_for("Which precision")
        terminal.type("bf16\n\n")
        terminal.wait_for(f"The configuration is in {file}.")
        assert terminal.code() == 0
    config = load_config_from_file(file)
    assert (config.mixed_precision, config.distributed_type) == ("bf16", DistributedType.MULTI_CPU)


@pytest.mark.launch
@pytest.mark.slow
@pytest.mark.parametrize(("key", "code"), [("\x03", 130), ("\x04", 2)])
def test_ctrl_c_and_ctrl_d_write_nothing(tmp_path: Path, key: str, code: int) -> None:
    with Terminal(tmp_path / "config.yaml") as terminal:
        terminal.wait_for("Where do you train? (LOCAL_MACHINE, AMAZON_SAGEMAKER) [LOCAL_MACHINE]: ")
        assert terminal.code(key) == code
    assert list(tmp_path.iterdir()) == []


def test_a_basic_configuration_is_written_without_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    command = ["config", "default", "--config_file", str(file), "--mixed_precision", "bf16"]
    assert main(command) == 0
    assert load_config_from_file(file).mixed_precision == "bf16"
    file.write_text(before := file.read_text() + "# mine\n")
    assert main(command) == main(command[:-2]) == 0, "as of Accelerate, so that a script can say it each time"
    kept = f"There is a configuration in {file} already, which stays as it is"
    assert capsys.readouterr().out.count(f"{kept}.\n") == 2
    assert main([*command[:-1], "fp16"]) == 2
    assert f"{kept}, with the precision 'bf16' instead of 'fp16'." in capsys.readouterr().err
    assert file.read_text() == before


def test_update_rewrites_old_keys_and_keeps_the_file_as_it_was(
    settings_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = settings_home / "huggingface" / "accelerate" / "default_config.yaml"
    file.parent.mkdir(parents=True)
    before = "fp16: true\ndistributed_type: FSDP\nfsdp_config: {fsdp_backward_prefetch_policy: BACKWARD_PRE}\n"
    file.write_text(before)
    assert main(["config", "update"]) == 0
    values = yaml.safe_load(file.read_text())
    assert values["mixed_precision"] == "fp16"
    assert "fp16" not in values
    assert values["fsdp_config"] == {"fsdp_backward_prefetch": "BACKWARD_PRE"}
    backup = file.with_name("default_config.yaml.bak")
    assert backup.read_text() == before
    assert str(backup) in capsys.readouterr().out
    assert main(["config", "update", "--config_file", str(file.with_name("gone.yaml"))]) == 2


def test_a_configuration_for_another_program_comes_from_a_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n" * (len(SHORTEST) + 1)))
    assert get_user_input(tmp_path / "config.yaml").to_dict()["num_processes"] == 1
    assert not (tmp_path / "config.yaml").exists()
    file = write_basic_config(save_location=tmp_path / "basic.yaml")
    assert re.search(r"num_processes: 1\n", Path(str(file)).read_text())
