"""What every test starts with: no world, no settings, no launcher's variables, one thread."""

import gc
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch

from tests.faults.ledger import Ledger
from tests.launched import INTERPRETERS
from tests.leftovers import watch_leftovers
from tests.worlds import forget_world, run_world, watch_patches
from trainer_lib import logging as library_logging
from trainer_lib.launchers.settings.config_file import find_config_file
from trainer_lib.processes.exit_codes import REQUESTS
from trainer_lib.state import PartialState

LAUNCHER_PREFIXES = ("ACCELERATE_", "SLURM_", "OMPI_", "PMI_", "MPI_", "MV2_", "TORCHELASTIC_", "TRAINER_LIB_")
LAUNCHER_VARIABLES = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "FORK_LAUNCHED",
    "MIXED_PRECISION",
    "LOG_LEVEL",
}

_SIGNALS = [getattr(signal, name) for name in REQUESTS]
_WORLDS = ("run_world", "run_forked")
_NO_FOLDER = "/nonexistent"  # no configuration of launches is there
_OF_RANKS = ("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor")
_OF_MODELS = ("torch.distributed.pipelining", "transformers.models.gpt2.modeling_gpt2")  # a second in each process
_MANY = 30  # tests that import these sooner or later

torch.set_num_threads(1)  # tests with several processes share few cores
os.environ.pop("PYTHONUNBUFFERED", None)  # with it, the end of a line is a write of its own: lines of two ranks mix


def pytest_addoption(parser: pytest.Parser) -> None:
    """Know `--soak`."""
    parser.addoption("--soak", action="store_true", help="inject faults by the hundred, and write down what came out")


def pytest_configure(config: pytest.Config) -> None:
    """Watch what the session leaves behind, hide GPUs, and let tests be interrupted.

    Its folders are in memory, but not in the long run of faults, where processes are killed while they wait for a disk.
    """
    wants_gpus = {"gpu", "gpus"} & set(str(config.getoption("markexpr")).split())
    if torch.cuda.device_count() and not wants_gpus:  # most tests fork; a fork of what has used a GPU cannot train
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for number in _SIGNALS:
        if signal.getsignal(number) is signal.SIG_IGN:  # as in the background, and under nohup or perf
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    paths = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(INTERPRETERS)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
    watch_leftovers(config, in_memory=not config.getoption("--soak"))


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """Have one worker more than there are cores: while a test waits for processes or a timeout, another one runs."""
    return (yield) + 1


def pytest_collectreport() -> None:
    """Keep what a file imports out of the garbage collections that the imports of the next ones cause."""
    gc.freeze()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Import once what every rank of a world would import by itself, and keep all of it out of garbage collections."""
    tests = [item for item in session.items if isinstance(item, pytest.Function)]
    if any(hasattr(item.module, name) for item in tests for name in _WORLDS):
        for module in (*_OF_RANKS, *(_OF_MODELS if len(tests) > _MANY else ())):
            import_module(module)
    if len(tests) > _MANY:
        # For each message of its log, torch reads the source of all frames: a tenth of a second in this process.
        rendezvous = import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
        rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name  # type: ignore[attr-defined]
    _freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    """Keep what the tests of a file import out of the garbage collections of the next file's."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        _freeze()
    return result


def _freeze() -> None:
    # A collection of everything that 250 files import takes half a second, and many tests collect.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin and end each test as a process that was just started by hand."""
    for name in list(os.environ):
        if name in LAUNCHER_VARIABLES or name.startswith(LAUNCHER_PREFIXES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TRAINER_LIB_HOME", _NO_FOLDER)
    if find_config_file():  # of Accelerate, for this machine
        monkeypatch.setenv("HF_HOME", _NO_FOLDER)
    watch_patches(monkeypatch)
    forget_world()
    library_logging._said_once.clear()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    yield
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler and handler is not None:
            signal.signal(number, handler)
    forget_world()


@pytest.fixture(scope="session")
def ledger(request: pytest.FixtureRequest) -> Iterator[Ledger]:
    """Return where outcomes are counted; those of a long run without a failure are written down."""
    counted = Ledger()
    yield counted
    if request.config.getoption("--soak") and not request.session.testsfailed:
        counted.write()


@pytest.fixture(autouse=True)
def counted(request: pytest.FixtureRequest, ledger: Ledger) -> Iterator[None]:
    """Count tests of faults that say which they are: `@pytest.mark.fault("a NaN loss")`."""
    yield
    marker = request.node.get_closest_marker("fault")
    if marker is not None and marker.args:
        ledger.note("guards", marker.args[0], injected=1, kept=1)


Body = Callable[[int, int], Any]


@pytest.fixture(params=[0, 1, 2, 4], ids=["alone", "group of 1", "group of 2", "group of 4"])
def everywhere(request: pytest.FixtureRequest) -> Callable[[Body], list[Any]]:
    """Return what runs `body(rank, size)` on each process of a world, and returns what each returned.

    A world of one is there twice: as the test's own process, and as a real group.
    """
    size: int = request.param

    def run(body: Body) -> list[Any]:
        def with_place() -> Any:
            state = PartialState(cpu=True)
            assert state.num_processes == max(size, 1)
            return body(state.process_index, state.num_processes)

        return run_world(with_place, num_processes=size, timeout=60) if size else [with_place()]

    return run
