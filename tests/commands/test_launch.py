"""`trainer-lib launch`: real processes, started by the command itself.

Most launches run in this process or in a fork of it, and their scripts import torch only where a world has to form.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest
import torch

from trainer_lib.commands.main import main
from trainer_lib.launchers import gpu_selection
from trainer_lib.processes.nvidia_driver import Gpu
from trainer_lib.processes.ports import free_port

pytestmark = pytest.mark.launch

COMMAND = [sys.executable, "-m", "trainer_lib.commands.main", "launch"]
LIMIT = 60
TELL = "import json, os, sys; print(json.dumps([sys.argv, dict(os.environ)]), flush=True)"
JOIN = "from trainer_lib import PartialState; state = PartialState(); state.wait_for_everyone()"


class Ended(NamedTuple):
    """A launch that has ended."""

    code: int
    out: str
    err: str

    @property
    def reports(self) -> list[tuple[list[str], dict[str, str]]]:
        """Arguments and environment that each rank printed, in order of rank."""
        reports = [json.loads(line) for line in self.out.splitlines()]
        return sorted(reports, key=lambda each: int(each[1].get("RANK", 0)))


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., str]:
    """Write lines of Python into a file."""

    def write(*lines: str) -> str:
        path = tmp_path / "a $HOME `script`; it's ${local_rank}.py"
        path.write_text("\n".join(lines))
        return str(path)

    return write


@pytest.fixture(params=["local", "agent"])
def way(request: pytest.FixtureRequest) -> list[str]:
    """Return options of a launch on this machine alone, and of one under torch's agent."""
    return [] if request.param == "local" else ["--rdzv_endpoint", f"127.0.0.1:{free_port()}"]


@pytest.fixture
def launch(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Launch from within this process, which saves importing torch once more."""

    def launched(*arguments: str) -> Ended:
        code = main(["launch", *arguments])
        captured = capfd.readouterr()
        return Ended(code, captured.out, captured.err)

    return launched


class Running(NamedTuple):
    """A launch in a fork of this process."""

    pid: int
    stdin: IO[str]
    stdout: IO[str]
    stderr: IO[str]

    def code(self) -> int:
        """Wait for the end of the launch and return its exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@contextlib.contextmanager
def forked(*arguments: str) -> Generator[Running]:
    """Launch from a fork of this process, which can be sent signals and has imported torch already.

    The caller has to wait for its end by `code()`.
    """
    with contextlib.ExitStack() as files:
        pipes = [os.pipe() for _ in range(3)]
        pid = os.fork()
        if pid == 0:
            _become_a_launch(pipes, arguments)
        (read_in, write_in), *outputs = pipes
        os.close(read_in)
        for _, write in outputs:
            os.close(write)
        stdin = files.enter_context(open(write_in, "w"))  # noqa: PTH123
        stdout, stderr = (files.enter_context(open(read)) for read, _ in outputs)  # noqa: PTH123
        yield Running(pid, stdin, stdout, stderr)


def _become_a_launch(pipes: list[tuple[int, int]], arguments: tuple[str, ...]) -> None:
    code = 1
    try:
        os.setsid()  # a signal to the group ends the launch alone
        for descriptor, (read, write) in enumerate(pipes):
            os.dup2(read if descriptor == 0 else write, descriptor)
            os.close(read)
            os.close(write)
        sys.stdout, sys.stderr = (open(descriptor, "w", closefd=False) for descriptor in (1, 2))  # noqa: SIM115
        # As of a program that a terminal starts: a shell has its background jobs ignore SIGINT.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        code = main(["launch", *arguments])
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def test_arguments_of_the_script_arrive_as_they_were_given(launch: Any, script: Any, way: list[str]) -> None:
    path = script(TELL)
    arguments = [
        "a b",
        "it's",
        '"quoted"',
        "$HOME ${local_rank} $$",
        "`id`; echo",
        "",
        "--num_processes",
        "7",
        "--",
        "-m",
        "*",
    ]
    ended = launch("--cpu", "--num-processes=2", *way, path, *arguments)
    assert ended.code == 0
    assert [argv for argv, _ in ended.reports] == [[path, *arguments]] * 2


def test_processes_are_told_their_place_and_what_was_asked_for(launch: Any, script: Any) -> None:
    ended = launch(
        "--num_processes", "2", "--cpu", "--mixed_precision", "bf16", "--gradient_accumulation_steps", "4", "--debug",
        "--num_cpu_threads_per_process", "3", "--dynamo_backend", "inductor", "--dynamo_mode", "max-autotune",
        "--dynamo_use_fullgraph", "--dynamo_use_dynamic", "--dynamo_use_regional_compilation", script(TELL),
    )  # fmt: skip
    environments = [environment for _, environment in ended.reports]
    assert [(each["RANK"], each["LOCAL_RANK"], each["WORLD_SIZE"]) for each in environments] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
    ]
    expected = {
        "ACCELERATE_USE_CPU": "True",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_DEBUG_MODE": "true",
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_DYNAMO_MODE": "max-autotune",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "True",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "True",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "True",
        "OMP_NUM_THREADS": "3",
        "TRAINER_LIB_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }
    assert all(expected.items() <= each.items() for each in environments)
    assert not any(name in os.environ for name in ("ACCELERATE_DEBUG_MODE", "TRAINER_LIB_WORLD_SIZE"))


def test_one_process_is_started_by_default_and_is_told_nothing_that_was_not_asked(launch: Any, script: Any) -> None:
    ((_, environment),) = launch(script(TELL)).reports
    assert (environment["RANK"], environment["WORLD_SIZE"]) == ("0", "1")
    assert not any(name.startswith("ACCELERATE_") for name in environment)
    assert int(environment["OMP_NUM_THREADS"]) >= 1


def test_module_runs_as_with_python_m(launch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "script.py").write_text(
        f"assert __name__ == '__main__' and __package__ == 'package'; {TELL}"
    )
    monkeypatch.chdir(tmp_path)
    ended = launch("-m", "package.script", "--flag", "a b")
    assert ended.code == 0, ended.err
    assert ended.reports[0][0][1:] == ["--flag", "a b"]


def test_script_sees_itself_as_under_plain_python(launch: Any, script: Any, tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("value = 3")
    path = script(
        "import multiprocessing, pickle, sys, neighbour, __main__",
        "class Here: pass",
        "def double(x): return 2 * x",
        "if __name__ == '__main__':",
        "    assert __file__ == sys.argv[0] and sys.path[0] == sys.argv[1] and 'torch' not in sys.modules",
        "    assert pickle.loads(pickle.dumps(Here())).__class__ is Here is __main__.Here",
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:",
        "        assert pool.map(double, [neighbour.value]) == [6]",
    )
    assert launch(path, str(tmp_path)).code == 0


def test_program_other_than_python(launch: Any) -> None:
    ended = launch("--no_python", "--num_processes", "2", "echo", "a  b")
    assert (ended.code, ended.out) == (0, "a  b\na  b\n")


def test_a_program_that_cannot_be_started_is_named(launch: Any, tmp_path: Path) -> None:
    program = tmp_path / "no-first-line"
    program.write_text("echo 1")
    program.chmod(0o755)
    ended = launch("--cpu", "--no_python", str(program))
    assert ended.code == 1
    assert ended.err == (
        f"trainer-lib launch: error: {str(program)!r} could not be started: Exec format error. A script needs a first "
        "line such as #!/bin/sh.\n"
    )


@pytest.mark.parametrize(("lines", "code"), [("", 0), ("raise ValueError('wrong')", 1), ("raise SystemExit(3)", 3)])
def test_processes_without_standard_output_and_errors_end_as_others_do(script: Any, lines: str, code: int) -> None:
    words = [*COMMAND, "--cpu", "--num_processes", "2", script(lines)]
    done = subprocess.run(["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *words], check=False, timeout=LIMIT)
    assert done.returncode == code


def test_restarts_continue_when_nobody_reads_the_reports(script: Any, tmp_path: Path) -> None:
    path = script("import os, sys", "open(sys.argv[1], 'a').write('x')", "os._exit(3)")
    reader, writer = os.pipe()
    os.close(reader)
    words = [*COMMAND, "--cpu", "--max_restarts", "2", path, str(tmp_path / "starts")]
    done = subprocess.run(words, stderr=writer, check=False, timeout=LIMIT)
    os.close(writer)
    assert (done.returncode, (tmp_path / "starts").read_text()) == (3, "xxx")


def test_processes_form_a_world(launch: Any, script: Any) -> None:
    path = script(
        "import torch",
        JOIN,
        "total = state.group.all_reduce(torch.tensor([1.0 + state.process_index])).item()",
        "print(state.num_processes, total, state.device, state.distributed_type)",
    )
    ended = launch("--num_processes", "2", path)
    assert (ended.code, ended.out) == (0, "2 3.0 cpu MULTI_CPU\n" * 2), ended.err


def test_failure_of_one_process_ends_all_and_is_told_last(
    launch: Any, script: Any, way: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("elastic", "local.local_processes"):
        monkeypatch.setattr(f"trainer_lib.launchers.{module}.GRACE_AFTER_DEATH", 1)  # second, then SIGKILL
    path = script(
        "import os, signal, sys",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as one blocked in a collective",
        "if os.environ['RANK'] == '0': signal.pause()",
        "def train(): raise ValueError('only here')",
        "train()",
    )
    ended = launch("--num_processes", "2", *way, path)
    assert ended.code == 1
    report = ended.err[ended.err.index("trainer-lib launch: ") :]
    assert report.startswith("trainer-lib launch: Process 1 of 2 failed with exit code 1.\nValueError: only here\n")
    assert ended.err.count("def train(): raise ValueError('only here')") == 1
    assert "bootstrap.py" not in ended.err
    assert "torchelastic" not in ended.err


def test_the_same_error_of_all_processes_is_printed_once(launch: Any, script: Any) -> None:
    ended = launch("--num_processes", "3", script("def train(): raise ValueError('everywhere')", "train()"))
    assert ended.code == 1
    assert ended.err.count("Traceback (most recent call last):") == 1
    assert ended.err.count("in train") == 1
    report = ended.err[ended.err.index("trainer-lib launch: ") :]
    assert report.splitlines()[-1] == "ValueError: everywhere"


def test_the_traceback_of_the_first_failure_comes_last_and_alone(launch: Any, script: Any) -> None:
    path = script(
        "import os, signal",
        "def lose(*_): raise RuntimeError('rank 1 is gone')",
        "def train(): raise ValueError('the cause')",
        "signal.signal(signal.SIGTERM, lose)",
        "if os.environ['RANK'] == '0': open(__file__ + '.ready', 'w').close(); signal.pause()",
        "while not os.path.exists(__file__ + '.ready'): pass",
        "train()",
    )
    ended = launch("--num_processes", "2", path)
    assert ended.code == 1
    printed, report = ended.err.split("trainer-lib launch: ")
    assert "RuntimeError: rank 1 is gone" in printed
    first, after, *traceback = report.splitlines()
    assert first == "Process 1 of 2 failed with exit code 1."
    assert after == "After that, process 0 raised RuntimeError: rank 1 is gone."
    assert traceback[0] == "Traceback (most recent call last):"
    assert traceback[-1] == "ValueError: the cause"
    assert report.count("Traceback") == 1


def test_a_script_that_cannot_be_read_is_told_with_its_error(launch: Any, script: Any) -> None:
    ended = launch("--num_processes", "2", script("x ="))
    assert "SyntaxError: invalid syntax" in ended.err[ended.err.index("trainer-lib launch: ") :]
    assert "raised ." not in ended.err


@pytest.mark.slow
def test_process_that_fails_ends_though_nobody_answers_its_collective(launch: Any, script: Any) -> None:
    path = script(
        "import signal, torch",
        JOIN,
        "if state.is_main_process: signal.pause()",
        "pending = torch.distributed.all_reduce(torch.ones(1), async_op=True)",
        "raise ValueError('nobody answers')",
    )
    ended = launch("--num_processes", "2", path)
    assert ended.code == 1
    assert "Process 1 of 2 failed with exit code 1." in ended.err
    assert ended.err.endswith("ValueError: nobody answers\n")


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        ("sys.exit(3)", 3, "failed with exit code 3"),
        ("os._exit(4)", 4, "failed with exit code 4."),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL (by hand, or for want of memory)."),
        ("sys.exit('no data')", 1, "SystemExit: no data"),
        ("sys.exit()", 0, ""),
    ],
)
def test_exit_code_of_the_script_is_that_of_the_launch(
    launch: Any, script: Any, end: str, code: int, message: str
) -> None:
    ended = launch(script(f"import os, signal, sys; {end}"))
    assert ended.code == code
    assert message in ended.err


def test_quiet_leaves_the_report_to_the_script(launch: Any, script: Any) -> None:
    ended = launch("--quiet", script("raise ValueError('loud')"))
    assert ended.code == 1
    assert "loud" in ended.err
    assert "trainer-lib" not in ended.err


@pytest.mark.slow
def test_restart_after_the_world_has_formed_ends_well(launch: Any, script: Any, way: list[str]) -> None:
    path = script(
        "import os, torch",
        JOIN,
        "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']",
        "if attempt == '0' and state.is_last_process: raise ValueError('the first time')",
        "print(attempt, state.group.all_reduce(torch.ones(1)).item())",
    )
    ended = launch("--num_processes", "2", "--max_restarts", "1", *way, path)
    assert (ended.code, ended.out) == (0, "1 2.0\n" * 2), ended.err
    assert "Process 1 of 2 failed" in ended.err
    assert "Starting all processes again (restart 1 of 1).\n" in ended.err


def test_last_restart_that_fails_ends_it(launch: Any, script: Any) -> None:
    path = script("import os; raise ValueError('attempt ' + os.environ['TORCHELASTIC_RESTART_COUNT'])")
    ended = launch("--max_restarts", "1", path)
    assert ended.code == 1
    assert ended.err.endswith("ValueError: attempt 1\n")


def test_two_launches_at_once_meet_at_different_ports(script: Any) -> None:
    path = script("import sys; print(flush=True); sys.stdin.readline()", TELL)
    ports: set[str] = set()
    with forked(path) as first, forked(path) as second:
        for running in (first, second):  # both are there
            assert running.stdout.readline() == "\n"
        for running in (first, second):
            running.stdin.write("go\n")
            running.stdin.flush()
            ports.add(Ended(0, running.stdout.read(), "").reports[0][1]["MASTER_PORT"])
            assert running.code() == 0
    assert len(ports) == 2


def test_given_port_is_used_and_a_taken_one_is_named(launch: Any, script: Any) -> None:
    with socket.create_server(("", 0)) as listener:
        port = str(listener.getsockname()[1])
        ended = launch("--main_process_port", port, script(TELL))
        assert ended.code == 1
        assert f"trainer-lib launch: error: Port {port} is in use by another program" in ended.err
    ((_, environment),) = launch("--main_process_port", port, script(TELL)).reports
    assert environment["MASTER_PORT"] == port


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--rdzv_backend", "static"],
        ["--rdzv_backend", "c10d", "--rdzv_id", "job", "--rdzv_conf", "timeout=60", "--monitor_interval", "0.05"],
    ],
    ids=["static", "c10d"],
)
def test_two_machines_form_one_world(script: Any, options: list[str]) -> None:
    path = script(JOIN, "print(state.process_index, state.local_process_index, state.num_processes)")
    with socket.create_server(("", 0)) as listener:
        port = str(listener.getsockname()[1])
    shared = ["--num_machines", "2", "--num_processes", "2", *options]
    shared += ["--main_process_ip", "127.0.0.1", "--main_process_port", port]
    with (
        forked(*shared, "--machine_rank", "0", path) as first,
        forked(*shared, "--machine_rank", "1", path) as second,
    ):
        assert sorted(machine.stdout.read() for machine in (first, second)) == ["0 0 2\n", "1 0 2\n"]
        assert [machine.code() for machine in (first, second)] == [0, 0]


@pytest.mark.slow
def test_a_machine_starts_again_with_another_whose_processes_wait(script: Any, tmp_path: Path) -> None:
    path = script(
        "import datetime, os, time",
        "from trainer_lib import PartialState",
        "state = PartialState(timeout=datetime.timedelta(seconds=120))",
        f"began = {str(tmp_path)!r} + '/' + os.environ['RANK']",
        "port = os.environ['MASTER_PORT']",
        "if not os.path.exists(began):",
        "    open(began, 'w').write(port)",
        "    assert state.process_index == 0, 'it dies once'",
        "    time.sleep(300)",
        "is_new = port != open(began).read()",
        "print(os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT'], is_new)",
    )
    with socket.create_server(("", 0)) as listener:
        port = str(listener.getsockname()[1])
    shared = ["--num_machines", "2", "--num_processes", "2", "--rdzv_backend", "c10d", "--rdzv_id", "job"]
    shared += ["--max_restarts", "1", "--main_process_ip", "127.0.0.1", "--main_process_port", port]
    with (
        forked(*shared, "--machine_rank", "0", path) as first,
        forked(*shared, "--machine_rank", "1", path) as second,
    ):
        assert sorted(machine.stdout.read() for machine in (first, second)) == ["0 1 True\n", "1 1 True\n"]
        assert [machine.code() for machine in (first, second)] == [0, 0]


ENDS_IN_ITS_OWN_WAY = (
    "import os, signal, sys, time",
    "def save(number, frame): time.sleep(0.3); print('saved at', number, flush=True); sys.exit(0)",
    "for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, save)",
    "os.write(1, b'ready\\n')",  # in a print, the handler could not print
    "signal.pause()",
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_reaches_the_processes_which_may_end_in_their_own_way(
    script: Any, way: list[str], number: signal.Signals
) -> None:
    with forked("--num_processes", "2", *way, script(*ENDS_IN_ITS_OWN_WAY)) as running:
        assert [running.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        for _ in range(2):  # as `timeout` does, to a process and to its group
            os.kill(running.pid, number)
            time.sleep(0.05)
        out, err = running.stdout.read(), running.stderr.read()
        assert running.code() == 128 + number
    assert out == f"saved at {int(number)}\n" * 2
    assert err.endswith(f"trainer-lib launch: Ended by {number.name}, and all processes with it.\n")


@pytest.mark.slow
def test_processes_do_not_outlive_a_killed_launcher(script: Any, tmp_path: Path) -> None:
    path = script("import signal; print('ready', flush=True); signal.pause()")
    start = [*COMMAND, "--num_processes", "2", path]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # where it leaves its folder
    with subprocess.Popen(start, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        begun = [process.stdout.readline() for _ in range(2)]
        process.kill()
        assert process.stdout.read() == ""  # it ends when the last process does
    assert begun == ["ready\n"] * 2


def test_output_is_teed_into_the_log_folder(script: Any, tmp_path: Path) -> None:
    path = script(
        "import os, sys",
        "print('out', os.environ['RANK'])",
        "sys.exit('rank 1 fails' if os.environ['RANK'] == '1' else 0)",
    )
    options = ["--num_processes", "2", "--tee", "3", "--log_dir", str(tmp_path / "logs"), "--role", "job"]
    with forked(*options, path) as running:
        out, err = running.stdout.read(), running.stderr.read()
        assert running.code() == 1
    assert "[job1]:out 1" in out
    (log,) = tmp_path.glob("logs/*/attempt_0/1/stderr.log")
    assert log.read_text() == "rank 1 fails\n"
    assert f"The output of process 1 is in {log}." in err


def test_nothing_is_left_in_the_temporary_folder(
    launch: Any, script: Any, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    assert launch(script("raise ValueError")).code == 1
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num_procceses", "2"], "Unknown option '--num_procceses'. Did you mean '--num_processes'?"),
        (["--mps"], "Unknown option '--mps'. MPS is used where it is available: leave it out."),
        (["--include", "0,1"], "Unknown option '--include'. Give --gpu_ids 0,1."),
        (
            ["--nproc-per-node=many"],
            "--nproc-per-node must be a whole number of at least 1, auto, gpu or cpu (got 'many')",
        ),
        (
            ["--nproc_per_node", "2", "--num_processes", "2"],
            "--num_processes and --nproc_per_node contradict each other",
        ),
        (["--num_processes", "two"], "--num_processes must be a whole number of at least 1 (got 'two')."),
        (["--num_processes", "0"], "must be a whole number of at least 1 (got '0')"),
        (["--num_processes"], "--num_processes needs a value: a whole number of at least 1."),
        (["--log_dir", "--cpu", "ok.py"], "(got the option --cpu; --log_dir=--cpu gives it as a value)."),
        (["--role", "--num-processes=2", "ok.py"], "--role needs a value"),
        (["--config_file", "-m", "module"], "--config_file needs a value"),
        (["--cpu=perhaps"], "--cpu must be yes or no (got 'perhaps')."),
        (["--standalone", "--nnodes", "2"], "--standalone is one machine, and --num_machines 2 was given."),
        (
            ["--rdzv_endpoint", "host:port"],
            "The port of --rdzv_endpoint must be a whole number of at least 0 (got 'port')",
        ),
        (
            ["--mixed_precision", "bf61"],
            "Unknown mixed_precision 'bf61'. Known: bf16, bf16-true, fp16, fp8, no. Did you mean 'bf16'?",
        ),
        (["--mixed_precision", "fp16-true"], "mixed_precision='fp16-true' is not supported"),
        (["--fp8_margin", "1"], "--fp8_margin has no effect without --mixed_precision fp8. Add it, or leave"),
        (["--dynamo_backend", "inducter"], "Unknown dynamo backend 'inducter'"),
        (["--dynamo_backend", "nvprims_nvfuser"], "torch removed nvFuser"),
        (["--dynamo_mode", "max"], "Unknown mode 'max'. Known: default, max-autotune"),
        (["--dynamo_backend", "eager", "--dynamo_mode", "max-autotune"], "needs the backend 'inductor'"),
        (
            ["--fsdp-sharding-strategy", "1"],
            "--fsdp_sharding_strategy has no effect without --use_fsdp. Add --use_fsdp",
        ),
        (["--use_fsdp", "--fsdp_state_dict_type", "WHOLE"], "--fsdp_state_dict_type must be one of FULL_STATE_DICT, "),
        (["--use_fsdp", "--fsdp_sharding_strategy", "SOME"], "SOME"),
        (["--use_parallelism_config", "--parallelism_config_dp_shard_size", "2"], "takes 2 processes, and there are 1"),
        (
            ["--use_parallelism_config", "--parallelism_config_cp_size", "2"],
            "takes 2 processes, and there are 1",
        ),
        (
            ["--use_parallelism_config", "--parallelism_config_tp_size", "2"],
            "tp_size=2) takes 2 processes, and there are 1. Start 2 processes, or",
        ),
        (["--zero_stage", "2"], "--zero_stage has no effect without --use_deepspeed. Add --use_deepspeed, or leave"),
        (
            ["--use_deepspeed", "--deepspeed_multinode_launcher", "pdsh"],
            "deepspeed_multinode_launcher=pdsh needs --deepspeed_hostfile, a file",
        ),
        (
            ["--use_fsdp", "--use_deepspeed"],
            "use_fsdp (--use_fsdp) and use_deepspeed (--use_deepspeed) both say how mod",
        ),
        (["--megatron_lm_tp_degree", "2"], "--megatron_lm_tp_degree has no effect without --use_megatron_lm."),
        (
            ["--use_megatron_lm", "--megatron_lm_optimizer_cpu_offload", "true"],
            "optimizer_cpu_offload=True needs use_distributed_optimizer=True or use_custom_fsdp=True (got neither).",
        ),
        (["--tpu", "--num_processes", "2"], "torch_xla cannot be imported beside torch "),
        (["--tpu_cluster"], "--tpu_cluster needs Accelerate's launcher for pods, which this version does not have."),
        (["--config_file", "x.yaml"], "There is no configuration file x.yaml (No such file or directory)."),
        (["--multi_gpu", "--cpu"], "--multi_gpu and --cpu contradict each other. Leave out one of them."),
        (["--multi_gpu"], "--multi_gpu needs two accelerators or more, and there are none to train on here."),
        (["--num_machines", "2", "--num_processes", "3"], "3 does not divide evenly by 2 machines"),
        (["--num_machines", "2"], "--num_machines 2 needs --main_process_ip"),
        (["--machine_rank", "1"], "machine_rank must be less than num_machines=1 (got 1)"),
        (["--main_process_port", "70000"], "main_process_port must be from 0 to 65535 (got 70000)"),
        (["--rdzv_conf", "timeout"], "--rdzv_conf must be like timeout=900,join_timeout=60, got 'timeout'"),
        (["--rdzv_backend", "c01d"], "Did you mean 'c10d'?"),
        (["--monitor_interval", "0"], "monitor_interval must be a finite number above 0"),
        (["--tee", "9"], "tee must be 0, 1 (output), 2 (errors) or 3 (both)"),
        (
            ["--tee", "5:1", "--cpu", "--num_processes", "2"],
            "'5:1' names process 5, and the last one on this machine is 1",
        ),
        (["--log_dir", __file__], "log_dir must be a folder"),
        (["--no_python", "-m"], "--no_python and --module contradict each other"),
    ],
)
def test_wrong_options_are_told_before_the_start(
    launch: Any, script: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/process/is/to/be/started")
    ended = launch(*arguments, *([] if arguments[-1] == "--num_processes" else [script("")]))
    assert ended.code == 2
    assert ended.err.startswith("trainer-lib launch: error: ")
    assert message in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ([], "No script was given"),
        (["no such.py"], "The script 'no such.py' is not there"),
        (["."], "The script '.' is a folder"),
        (["--no_python", "no-such-program"], "There is no program 'no-such-program'"),
    ],
)
def test_missing_script_is_told(launch: Any, command: list[str], message: str) -> None:
    ended = launch(*command)
    assert ended.code == 2
    assert message in ended.err


def test_missing_module_is_told(launch: Any) -> None:
    ended = launch("-m", "no_such_module")
    assert ended.code == 1
    assert ended.err.rstrip().endswith("No module named no_such_module")


class FakeAccelerators:
    """Two devices that nothing can be computed on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
        )
        monkeypatch.setattr(torch.accelerator, "device_count", self.device_count)

    def device_count(self) -> int:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return 2 if visible is None else len(visible.split(","))


def test_accelerators_set_the_default_and_the_limit(launch: Any, script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeAccelerators(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    path = script(TELL)
    assert [environment["WORLD_SIZE"] for _, environment in launch(path).reports] == ["2", "2"]
    too_many = launch("--num_processes", "3", path)
    assert too_many.code == 2
    assert "3 processes on this machine were requested, and it has 2 cuda devices" in too_many.err
    assert len(launch("--cpu", "--num_processes", "3", path).reports) == 3
    ((_, environment),) = launch("--gpu_ids", "1", path).reports
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert "has 1 cuda device:" in launch("--gpu_ids", "1", "--num_processes", "2", path).err


def test_fewer_processes_than_accelerators_take_the_free_ones(
    launch: Any, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeAccelerators(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    busy_and_free = [Gpu("RTX 4090", 100, 10, "GPU-a"), Gpu("RTX 4090", 100, 90, "GPU-b")]
    monkeypatch.setattr(gpu_selection, "read_gpus", lambda: ("535.1", busy_and_free))
    monkeypatch.setattr(gpu_selection, "check_cuda_p2p_ib_support", lambda: False)
    ended = launch("--num_processes", "1", script(TELL))
    assert ended.reports[0][1]["CUDA_VISIBLE_DEVICES"] == "GPU-b"
    assert ended.err == "trainer-lib launch: CUDA_VISIBLE_DEVICES=GPU-b (the GPUs with the most free memory)\n"
    ended = launch(script(TELL))
    assert [environment["NCCL_P2P_DISABLE"] for _, environment in ended.reports] == ["1", "1"]
    assert "NCCL_P2P_DISABLE=1 NCCL_IB_DISABLE=1 (these GPUs cannot copy to each other directly)" in ended.err
    ((_, environment),) = launch("--quiet", "--gpu_ids", "0", script(TELL)).reports
    assert environment["CUDA_VISIBLE_DEVICES"] == "0"


def test_ids_of_accelerators_that_are_not_there_are_refused(launch: Any, script: Any) -> None:
    ended = launch("--gpu_ids", "0,1", script(TELL))
    assert ended.code == 2
    assert "this machine has no accelerator" in ended.err


def test_hangup_that_was_ignored_stays_so(launch: Any, script: Any) -> None:
    path = script("import os, signal; os.kill(os.getppid(), signal.SIGHUP); print('still here')")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        ended = launch(path)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (ended.code, ended.out) == (0, "still here\n")


def test_a_report_is_readable_in_a_terminal_without_unicode(script: Callable[..., str]) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [*COMMAND, "--cpu", script("raise SystemExit(3)")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT)
    assert done.returncode == 3
    assert f"{'-' * 80}\ntrainer-lib launch: " in done.stderr
