"""`notebook_launcher` and `debug_launcher`."""

import contextlib
import functools
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from trainer_lib import Interrupted, debug_launcher, notebook_launcher
from trainer_lib.events import Interruption
from trainer_lib.foundation.environment import clear_environment
from trainer_lib.foundation.errors import ConfigurationError, MissingPackageError, UnsupportedError, WorldError
from trainer_lib.launchers import ProcessFailedError, first_device_use, gpu_selection, notebook_processes
from trainer_lib.launchers.launch_plan import LOCALHOST
from trainer_lib.processes.ports import free_port
from trainer_lib.state import AcceleratorState, PartialState
from trainer_lib.testing import reset_states


def place() -> tuple[int, int]:
    state = PartialState()
    state.wait_for_everyone()
    return state.process_index, state.num_processes


def fail_on_the_last() -> None:
    state = PartialState()
    state.wait_for_everyone()
    if state.is_last_process:
        raise KeyError("only here")
    state.wait_for_everyone()


def taken_port() -> socket.socket:
    return socket.create_server(("", 0))


def test_closures_run_in_one_world_and_results_come_in_order_of_rank() -> None:
    template = "$HOME and ${local_rank}"

    def fill(text: str, values: list[int]) -> tuple[str, torch.Tensor]:
        state = PartialState()
        total = state.group.all_reduce(torch.tensor([float(state.process_index)]))
        return f"{template} {text} {values}", total

    results = notebook_launcher(fill, ("$$x", [1]), num_processes=2)
    assert results == [("$HOME and ${local_rank} $$x [1]", torch.tensor([1.0]))] * 2
    assert debug_launcher(place) == [(0, 2), (1, 2)]


@pytest.mark.parametrize("launcher", [notebook_launcher, debug_launcher])
def test_error_of_one_process_is_told_first_and_nobody_hangs(launcher: Any) -> None:
    with pytest.raises(ProcessFailedError, match=r"Process 1 of 2 failed with exit code 1\.\n") as caught:
        launcher(fail_on_the_last, num_processes=2)
    assert "KeyError: 'only here'" in str(caught.value)
    assert "in fail_on_the_last" in str(caught.value)


@pytest.mark.parametrize(
    "launch", [debug_launcher, functools.partial(notebook_launcher, max_restarts=2)], ids=["debug", "notebook"]
)
def test_an_interruption_is_no_failure(launch: Any, capfd: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        time.sleep(0.3 * place()[0])  # they need not end at once
        raise Interrupted(Interruption("a deadline", 75))

    with pytest.raises(SystemExit) as caught:
        launch(interrupted, num_processes=2)
    assert caught.value.code == 75
    assert "Starting all processes again" not in capfd.readouterr().out


def test_process_killed_by_a_signal_is_named() -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL if place()[0] else signal.SIGCONT)
        signal.pause()

    with pytest.raises(ProcessFailedError, match="Process 1 of 2 was killed by SIGKILL"):
        notebook_launcher(die, num_processes=2)


def test_restart_after_the_world_has_formed_ends_well(capfd: pytest.CaptureFixture[str]) -> None:
    def fail_at_first() -> tuple[str, int]:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            fail_on_the_last()
        return os.environ["TORCHELASTIC_RESTART_COUNT"], place()[0]

    assert notebook_launcher(fail_at_first, num_processes=2, max_restarts=1) == [("1", 0), ("1", 1)]
    output = capfd.readouterr().out
    assert "KeyError: 'only here'" in output
    assert output.endswith("Starting all processes again (restart 1 of 1).\n")


def test_one_process_runs_in_place_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []

    def look() -> str:
        seen.append(os.environ["ACCELERATE_MIXED_PRECISION"])
        return "done"

    assert notebook_launcher(look, mixed_precision="bf16") == ["done"]
    assert seen == ["bf16"]
    assert capsys.readouterr().out == "Running look in this process, on the CPU.\n"
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ


def test_precision_reaches_the_processes() -> None:
    def precision() -> str:
        return AcceleratorState().mixed_precision

    assert notebook_launcher(precision, num_processes=2, mixed_precision="BF16") == ["bf16", "bf16"]


def test_nccl_of_the_processes_does_not_copy_directly_where_the_driver_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook_processes, "count_accelerators", lambda: 2)
    monkeypatch.setattr(notebook_processes, "forks_are_poisoned", lambda: False)
    monkeypatch.setattr(gpu_selection, "check_cuda_p2p_ib_support", lambda: False)
    assert notebook_launcher(os.environ.get, ("NCCL_P2P_DISABLE",)) == ["1", "1"]
    assert "NCCL_P2P_DISABLE" not in os.environ


def test_handlers_of_the_notebook_come_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)]
    notebook_launcher(place, num_processes=2)
    after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)]
    assert after == before


def test_interrupt_ends_the_processes_and_reaches_the_notebook() -> None:
    parent = os.getpid()

    def interrupt() -> None:
        if place()[0] == 0:
            os.kill(parent, signal.SIGINT)
        while True:  # not pause(), which a signal that comes just before it does not end
            time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        notebook_launcher(interrupt, num_processes=2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_functions_that_return_after_an_interruption_end_at_once(number: signal.Signals) -> None:
    parent = os.getpid()
    ends: list[int] = []

    def end_soon(number: int, frame: Any) -> None:
        del frame
        ends.append(number)

    def save_and_return() -> str:
        signal.signal(number, end_soon)  # as a Trainer in a notebook, whose fit returns
        if place()[0] == 0:
            os.kill(parent, number)
        while not ends:
            time.sleep(0.01)
        signal.signal(number, signal.SIG_DFL)
        return "more than a pipe holds" * 10_000

    began = time.monotonic()
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        notebook_launcher(save_and_return, num_processes=2)
    assert time.monotonic() - began < 20  # after 30 seconds processes are killed


@pytest.mark.parametrize("launcher", [notebook_launcher, debug_launcher])
def test_a_function_that_exits_without_an_error_returns_nothing(launcher: Any) -> None:
    def end_early() -> int:
        rank = place()[0]
        if rank < 2:
            sys.exit(None if rank else 0)
        return rank

    assert launcher(end_early, num_processes=3) == [None, None, 2]


@pytest.mark.parametrize("launcher", [notebook_launcher, debug_launcher])
def test_exit_code_of_a_function_is_told(launcher: Any) -> None:
    with pytest.raises(ProcessFailedError, match=r"failed with exit code 3\."):
        launcher(lambda: sys.exit(3), num_processes=2)


@pytest.mark.parametrize("launcher", [notebook_launcher, debug_launcher])
def test_a_process_that_ends_before_its_function_returns_is_a_failure(launcher: Any) -> None:
    def end_silently() -> None:
        if place()[0]:
            os._exit(0)
        signal.pause()

    with pytest.raises(ProcessFailedError, match=r"Process 1 of 2 ended without a result"):
        launcher(end_silently, num_processes=2)


def test_lone_state_is_not_inherited_and_a_world_is_refused() -> None:
    reset_states()
    assert PartialState(cpu=True).num_processes == 1
    assert notebook_launcher(place, num_processes=2) == [(0, 2), (1, 2)]

    def launch_again() -> None:
        place()
        with clear_environment():  # as if a cell had formed the world itself
            notebook_launcher(place, num_processes=2)

    with pytest.raises(ProcessFailedError, match=r"torch.distributed is initialized in this process. Create the Acc"):
        debug_launcher(launch_again)
    with pytest.raises(
        ProcessFailedError, match=r"this already is rank 0 of 1, started by torchrun. Call the function"
    ):
        debug_launcher(notebook_launcher, (place,), num_processes=1)


def test_given_port_is_used_again_and_again() -> None:
    with taken_port() as listener:
        port = listener.getsockname()[1]
        with pytest.raises(WorldError, match=rf"Port {port} is in use by another program(.|\n)*Use another port"):
            notebook_launcher(place, num_processes=2, use_port=str(port))

    def meeting() -> str:
        place()
        return os.environ["MASTER_PORT"]

    for _ in range(2):
        assert notebook_launcher(meeting, num_processes=2, use_port=port) == [str(port)] * 2


def test_default_port_may_be_taken() -> None:
    try:
        listener = socket.create_server(("", 29500))
    except OSError:  # some other program keeps it: just as well
        assert notebook_launcher(place, num_processes=2) == [(0, 2), (1, 2)]
    else:
        with listener:
            assert notebook_launcher(place, num_processes=2) == [(0, 2), (1, 2)]


@pytest.mark.slow
@pytest.mark.launch
def test_used_accelerator_means_fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cloudpickle")
    monkeypatch.setattr(notebook_processes, "count_accelerators", lambda: 2)
    monkeypatch.setattr(notebook_processes, "forks_are_poisoned", lambda: True)
    parent = os.getpid()

    def closure(offset: int) -> tuple[int, int, bool]:
        state = PartialState()
        state.wait_for_everyone()
        return state.process_index + offset, state.num_processes, os.getppid() == parent

    assert notebook_launcher(closure, (10,)) == [(10, 2, True), (11, 2, True)]


def test_used_accelerator_without_cloudpickle_says_what_used_it_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook_processes, "count_accelerators", lambda: 2)
    monkeypatch.setattr(notebook_processes, "forks_are_poisoned", lambda: True)
    monkeypatch.setattr(notebook_processes, "is_package_available", lambda module: False)
    monkeypatch.setattr(first_device_use, "first_import", lambda packages: "bitsandbytes" if packages else None)
    message = r"`import bitsandbytes` initializes it\. Restart the kernel(.|\n)*pip install cloudpickle"
    with pytest.raises(MissingPackageError, match=message):
        notebook_launcher(place)
    monkeypatch.setattr(first_device_use, "first_import", lambda packages: None)
    monkeypatch.setattr(first_device_use, "_cells", lambda: [(1, "import torch"), (4, "\nmodel.to('cuda:1')  # here")])
    message = r"The first line that may have used it is line 2 of cell 4: `model.to\('cuda:1'\)  # here`\. Restart"
    with pytest.raises(MissingPackageError, match=message):
        notebook_launcher(place)


@pytest.mark.slow
@pytest.mark.launch
def test_the_first_import_that_uses_the_accelerator_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "harmless.py").touch()
    (tmp_path / "broken.py").write_text("raise ValueError")
    use = "from trainer_lib.launchers import device_count; device_count.forks_are_poisoned = lambda: True"
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").write_text(use)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    assert first_device_use.first_import(["harmless", "broken", "first", "second"]) == "first"
    assert first_device_use.first_import(["harmless", "broken"]) is None


def test_output_lines_get_a_prefix(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def speak() -> None:
        print(f"from {place()[0]}")

    notebook_launcher(speak, num_processes=2, log_line_prefix_template="<${role_name} ${rank}> ")
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("<")]
    assert sorted(lines) == ["<default 0> from 0", "<default 1> from 1"]
    assert list(tmp_path.glob("t*")) == [], "the files through which lines pass are gone"


@pytest.mark.parametrize("backend", ["static", pytest.param("c10d", marks=pytest.mark.slow)])
def test_two_nodes_form_one_world(backend: str, tmp_path: Path) -> None:
    port, elastic = free_port(), {"rdzv_backend": backend, "rdzv_conf": {"timeout": 60}, "monitor_interval": 0.05}
    if backend == "c10d":
        elastic |= {"rdzv_endpoint": f"{LOCALHOST}:{port}", "rdzv_id": "nodes"}

    def node(rank: int) -> list[Any]:
        return notebook_launcher(
            place, num_processes=1, num_nodes=2, node_rank=rank, use_port=port, **cast(Any, elastic)
        )

    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            (tmp_path / "result").write_text(repr(node(1)))
        os._exit(0)
    places = node(0)
    os.waitpid(pid, 0)
    assert sorted([repr(places), (tmp_path / "result").read_text()]) == ["[(0, 2)]", "[(1, 2)]"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"function": (0, 1)}, ConfigurationError, "function must be callable"),
        ({"args": 5}, ConfigurationError, r"For one argument: args=\(value,\)"),
        ({"num_processes": 0}, ConfigurationError, "num_processes must be a whole number of at least 1, got 0"),
        ({"mixed_precision": "bf61"}, ConfigurationError, "Did you mean 'bf16'"),
        ({"mixed_precision": "fp16-true"}, UnsupportedError, "fp16-true"),
        ({"use_port": "many"}, ConfigurationError, "use_port must be a number"),
        ({"use_port": 70000}, ConfigurationError, "main_process_port must be from 0 to 65535"),
        ({"rdzv_backend": "statik"}, ConfigurationError, "Did you mean 'static'"),
        (
            {"num_nodes": 2, "node_rank": 2},
            ConfigurationError,
            r"machine_rank must be less than num_machines=2 \(got 2\)",
        ),
        ({"max_restarts": -1}, ConfigurationError, "max_restarts must be a whole number of at least 0, got -1"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    settings: dict[str, Any] = {"function": place, "num_processes": 2, **arguments}
    with pytest.raises(error, match=message):
        notebook_launcher(**settings)


def test_nothing_is_left_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    notebook_launcher(place, num_processes=2)
    debug_launcher(place)
    assert list(tmp_path.glob("t*")) == []
