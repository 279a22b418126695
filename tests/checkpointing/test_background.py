"""Background saves: they write the values at the time of the call, and report every failure."""

import gc
import multiprocessing
import os
import re
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.faults.injuries import failing_disk, full_disk, unlimited
from tests.faults.trainings import sharded, train, trained
from tests.imports import SAVING, as_if_not_imported
from tests.launched import PYTHON_PATH
from tests.worlds import run_world
from trainer_lib import Accelerator, CheckpointError
from trainer_lib.checkpointing.format.snapshot import Snapshots
from trainer_lib.checkpointing.format.snapshot_memory import SnapshotMemory
from trainer_lib.checkpointing.load.find import open_state
from trainer_lib.checkpointing.save.background import BackgroundSaves
from trainer_lib.checkpointing.save.retention import automatic_states
from trainer_lib.checkpointing.save.writer import CheckpointWriter
from trainer_lib.filesystem import direct_files
from trainer_lib.launchers import run_forked
from trainer_lib.tensor_files.file_contents import Json, PickledTensors, Tensors

for module in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"):
    import_module(module)  # here, so that not each forked process imports it


def contents(folder: str | Path) -> dict[str, bytes]:
    """Return all that a state says, but for what says when and by whom."""
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file() and path.name != "manifest.json")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def spoil(accelerator: Accelerator) -> None:
    """Change all tensors of a training, in place."""
    with torch.no_grad():
        for model in accelerator._models:
            for value in model.state_dict().values():
                value.fill_(7)
        for optimizer in accelerator._optimizers:
            for values in optimizer.state.values():
                for value in values.values():
                    value.fill_(7)
    torch.rand(1)


# -- other processes -------------------------------------------------------------------------------------------------


def test_a_forked_process_does_not_wait_at_its_end_for_the_save_of_its_parent(tmp_path: Path) -> None:
    saves, written = BackgroundSaves(), threading.Event()
    saves.start(tmp_path / "checkpoint", written.wait)
    worker = multiprocessing.get_context("fork").Process(target=int)
    worker.start()
    worker.join(30)
    has_ended = worker.exitcode == 0
    worker.kill()
    written.set()
    saves.wait()
    assert has_ended


# -- the snapshot ----------------------------------------------------------------------------------------------------


def test_a_snapshot_is_of_values_not_of_tensors() -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "whole": whole,
        "again": whole,
        "turned": whole.T,
        "part": whole[1:3, ::2],
        "scalar": torch.tensor(3),
        "flags": torch.tensor([True, False]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "nothing": torch.empty(0, 4),
        "conjugate": torch.tensor([1 + 2j], dtype=torch.complex64).conj(),
        "parameter": nn.Parameter(torch.ones(2)),
    }
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    files = {"a": Tensors(tensors, {"said": "so"}), "b": PickledTensors({"whole": whole}), "c": Json([1])}
    taken: dict[str, Any] = Snapshots().take(files)
    for tensor in tensors.values():
        tensor.detach().fill_(9)
    assert {name: tensor.tolist() for name, tensor in taken["a"].tensors.items()} == {
        name: tensor.tolist() for name, tensor in expected.items()
    }
    assert all(tensor.is_contiguous() and not tensor.is_conj() for tensor in taken["a"].tensors.values())
    assert taken["a"].tensors["again"] is taken["a"].tensors["whole"]
    assert taken["a"].metadata == {"said": "so"}
    assert torch.equal(taken["b"].tensors["whole"], expected["whole"])
    assert taken["c"] is files["c"]


@pytest.mark.parametrize("threads", [1, 3])
def test_large_tensors_are_copied_in_pieces(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr("trainer_lib.checkpointing.format.snapshot._PIECE", 1000)
    tensors = {"long": torch.randn(1237), "short": torch.randn(3)}
    taken: Any = Snapshots().take({"a": Tensors(tensors)})["a"]
    assert all(torch.equal(taken.tensors[name], tensor) for name, tensor in tensors.items())


def test_memory_is_taken_once_and_more_only_where_a_state_has_grown() -> None:
    snapshots = Snapshots()
    places: list[int] = []
    for size in (100, 100, 60, 100, 200):
        taken: Any = snapshots.take({"a": Tensors({"x": torch.ones(size)})})["a"]
        assert taken.tensors["x"].tolist() == [1.0] * size
        places.append(taken.tensors["x"].untyped_storage().data_ptr())
    assert len(set(places[:4])) == 1
    assert taken.tensors["x"].untyped_storage().nbytes() < 900


def test_memory_allocated_ahead_is_that_of_the_snapshot() -> None:
    tensors = {"a": torch.ones(1000), "b": torch.ones(3), "c": torch.ones(40)}
    snapshots = Snapshots()
    snapshots.allocate([tensors["a"], tensors["b"]])
    size = snapshots.memory.size
    assert size == 4000 + 32 + 64  # each padded to 64 bytes
    first: Any = snapshots.take({"a": Tensors({"a": tensors["a"], "b": tensors["b"]})})["a"]
    assert snapshots.memory.size == size
    more: Any = snapshots.take({"a": Tensors(tensors)})["a"]  # what does not fit gets memory of its own
    assert snapshots.memory.size == size + 192
    assert more.tensors["a"].data_ptr() == first.tensors["a"].data_ptr()
    assert all(torch.equal(more.tensors[name], tensor) for name, tensor in tensors.items())


def test_a_snapshot_may_hold_no_value() -> None:
    assert [part.shape for part in SnapshotMemory().take([torch.empty(0, 3)])] == [(0, 3)]


def test_what_only_a_pickle_holds_is_copied_too() -> None:
    values = torch.ones(2, dtype=torch.complex128)
    taken: Any = Snapshots().take({"a": PickledTensors({"values": values})})["a"]
    values.zero_()
    assert taken.tensors["values"].tolist() == [1, 1]


def test_memory_that_is_needed_is_prepared_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_lib.checkpointing.format.snapshot_memory._PIECE", 4096)
    answers = iter([False, True])  # a third question would raise
    memory = SnapshotMemory()
    memory.allocate([torch.empty(5 * 4096, dtype=torch.uint8)], is_needed=lambda: next(answers))
    assert next(answers, None) is None
    assert memory.size == 5 * 4096


@pytest.mark.parametrize("ends", ["a save", "release"])
def test_a_save_does_not_wait_until_its_memory_is_prepared(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = BackgroundSaves()
    needed: list[tuple[bool, bool]] = []  # when it began, and when it ended
    has_begun = threading.Event()

    def allocate(_: Snapshots, tensors: Any, is_needed: Any) -> None:
        assert [tensor.numel() for tensor in tensors] == [6, 2]
        at_first = is_needed()
        has_begun.set()
        saves._is_needed.wait(5)
        needed.append((at_first, is_needed()))

    monkeypatch.setattr(Snapshots, "allocate", allocate)
    saves.overlapping = [torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1)]
    for _ in range(2):
        has_begun.clear()
        saves.allocate(whole=True)
        assert has_begun.wait(5)
        assert saves.snapshots if ends == "a save" else saves.release() is None
    assert needed == [(False, True)] * 2


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not show its pages")
def test_memory_asks_for_no_huge_pages() -> None:
    snapshots = Snapshots()
    snapshots.allocate([torch.ones(1 << 20)])
    taken: Any = snapshots.take({"a": Tensors({"x": torch.ones(1 << 20)})})["a"]
    address = taken.tensors["x"].data_ptr()
    ranges = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    (memory,) = (
        text for text in ranges[1:] if int(text.split("-")[0], 16) <= address < int(re.split("[- ]", text)[1], 16)
    )
    (flags,) = re.findall("^VmFlags: (.*)$", memory, re.MULTILINE)
    assert "hg" not in flags.split()


# -- one process -----------------------------------------------------------------------------------------------------


def test_a_background_save_writes_the_values_at_the_time_of_the_call(tmp_path: Path) -> None:
    accelerator, model, optimizer = trained(tmp_path, updates=2)
    for _ in range(3):  # in new memory, and in memory that is used again
        train(accelerator, model, optimizer)
        expected = contents(accelerator.save_state(tmp_path / "now"))
        folder = accelerator.save_state(tmp_path / "behind", background=True)
        spoil(accelerator)
        accelerator.wait_for_save()
        assert not accelerator.is_saving
        assert contents(folder) == expected
        accelerator.load_state(tmp_path / "now")


def held_up(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have the thread that writes wait until the event that is returned is set."""
    may_go, write = threading.Event(), CheckpointWriter.write

    def wait(self: CheckpointWriter, *arguments: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert may_go.wait(30)
        return write(self, *arguments)

    monkeypatch.setattr(CheckpointWriter, "write", wait)
    return may_go


class Collecting:
    """Notes for each module that is imported whether garbage collections are on."""

    def __init__(self) -> None:
        self.modules: dict[str, bool] = {}

    def find_spec(self, name: str, *_: Any) -> None:
        self.modules[name] = gc.isenabled()


def test_the_first_save_collects_no_garbage_while_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, _, _ = trained(tmp_path)
    as_if_not_imported(SAVING, monkeypatch)
    collecting = Collecting()
    monkeypatch.setattr(sys, "meta_path", [collecting, *sys.meta_path])
    accelerator.save_state(tmp_path / "state", background=True)
    accelerator.wait_for_save()
    assert collecting.modules[SAVING] is False
    assert gc.isenabled()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_the_thread_that_writes_yields_to_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, priorities = CheckpointWriter.write, []

    def look(self: CheckpointWriter, *arguments: Any) -> None:
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return write(self, *arguments)

    monkeypatch.setattr(CheckpointWriter, "write", look)
    accelerator, *_ = trained(tmp_path)
    accelerator.save_state(tmp_path / "behind", background=True)
    accelerator.save_state(tmp_path / "now")
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert priorities == [10, own]


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="the system has no direct writes")
@pytest.mark.parametrize(("safe_serialization", "weights"), [(True, "model"), (False, "pytorch_model")])
def test_only_a_background_save_bypasses_the_page_cache(
    safe_serialization: bool, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    class Watched(direct_files.DirectFile):
        def __init__(self, file: Any) -> None:
            opened.append(Path(file.name).stem)
            super().__init__(file)

    monkeypatch.setattr(direct_files, "DirectFile", Watched)
    accelerator, *_ = trained(tmp_path)
    accelerator.save_state(tmp_path / "now", safe_serialization=safe_serialization)
    assert not opened
    accelerator.save_state(tmp_path / "behind", safe_serialization=safe_serialization, background=True)
    accelerator.wait_for_save()
    assert {weights, "optimizer"} <= set(opened)


def test_training_continues_during_a_background_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model, optimizer = trained(tmp_path)
    may_go = held_up(monkeypatch)
    folder = Path(accelerator.save_state(tmp_path / "state", background=True))
    train(accelerator, model, optimizer)
    assert accelerator.is_saving
    assert not folder.exists()
    may_go.set()
    accelerator.wait_for_save()
    open_state(folder)


@pytest.mark.parametrize(
    "then", ["save_state", "save_state in the background", "load_state", "end_training", "free_memory"]
)
def test_what_comes_next_waits(then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, *_ = trained(tmp_path)
    may_go = held_up(monkeypatch)
    folder = Path(accelerator.save_state(tmp_path / "state", background=True))
    threading.Timer(0.1, may_go.set).start()
    if then.startswith("save_state"):
        accelerator.save_state(tmp_path / "next", background=then != "save_state")
    elif then == "load_state":
        accelerator.load_state(folder)
    else:
        getattr(accelerator, then)()
    assert may_go.is_set()
    open_state(folder)
    accelerator.wait_for_save()


def test_numbers_and_limits_under_automatic_naming(tmp_path: Path) -> None:
    accelerator, model, optimizer = trained(tmp_path, total_limit=2)
    folders = [
        accelerator.save_state(background=True) for _ in range(4) if train(accelerator, model, optimizer) is None
    ]
    accelerator.wait_for_save()
    assert [Path(folder).name for folder in folders] == [f"checkpoint_{number}" for number in range(4)]
    assert list(automatic_states(tmp_path / "checkpoints")) == [2, 3]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_2", "checkpoint_3"]


def test_a_state_that_cannot_be_saved_raises_at_the_call(tmp_path: Path) -> None:
    accelerator, *_ = trained(tmp_path)

    class Odd:
        def state_dict(self) -> Any:
            return {"odd": object()}

        def load_state_dict(self, state: Any) -> None: ...

    accelerator.register_for_checkpointing(Odd())
    with pytest.raises(CheckpointError, match="odd"):
        accelerator.save_state(tmp_path / "state", background=True)
    assert list(tmp_path.iterdir()) == []
    accelerator.wait_for_save()


# -- errors of the thread --------------------------------------------------------------------------------------------


def told_later(project: Path, spoil_disk: Any, rank: int, then: str) -> tuple[str, bool]:
    accelerator, model, optimizer = trained(project)
    accelerator.save_state(project / "state")
    before = [parameter.tolist() for parameter in model.parameters()]
    train(accelerator, model, optimizer)
    fsync = os.fsync
    if accelerator.process_index == rank:
        spoil_disk(project)
    accelerator.save_state(project / "state", background=True)
    train(accelerator, model, optimizer)
    folders = {"load_state": [project / "state"], "save_state": [project / "other"]}
    with pytest.raises(CheckpointError) as error:
        getattr(accelerator, then)(*folders.get(then, []))
    unlimited()
    os.fsync = fsync
    accelerator.wait_for_save()  # told once
    if then != "end_training":
        accelerator.save_state(project / "next", background=True)
        accelerator.load_state(project / "state")
        assert (project / "next").is_dir()
    return str(error.value), then == "end_training" or before == [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize("then", ["wait_for_save", "save_state", "load_state", "end_training"])
def test_the_next_call_raises_the_error_of_the_thread(then: str, tmp_path: Path) -> None:
    ((message, is_as_before),) = run_world(told_later, (tmp_path, full_disk, 0, then), 1, timeout=60)
    assert message.startswith(f"The checkpoint {tmp_path / 'state'} could not be saved in the background. ")
    assert re.search(r"could not be written: File too large", message)
    assert is_as_before
    assert "other" not in {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("then", ["wait_for_save", "save_state"])
def test_an_error_on_one_rank_raises_on_all_ranks(rank: int, then: str, tmp_path: Path) -> None:
    runs = run_world(told_later, (tmp_path, failing_disk, rank, then), timeout=60)
    for process, (message, is_as_before) in enumerate(runs):
        assert f"The checkpoint {tmp_path / 'state'} could not be saved in the background" in message
        assert "Input/output error" in message
        assert ("failed on rank" in message) == (process != rank)
        assert is_as_before


# -- several processes -----------------------------------------------------------------------------------------------


def test_processes_agree_while_they_train(tmp_path: Path) -> None:
    def body() -> bool:
        accelerator, model, optimizer = trained(tmp_path)
        is_same: list[bool] = []
        for number in range(4):
            expected = accelerator.save_state(tmp_path / f"now_{number}")
            folder = accelerator.save_state(tmp_path / f"behind_{number}", background=True)
            train(accelerator, model, optimizer, updates=5)  # with messages of its own
            accelerator.wait_for_save()
            is_same.append(contents(folder) == contents(expected))
        accelerator.end_training()
        return all(is_same)

    assert run_world(body, timeout=60) == [True, True]


def test_saves_of_two_kinds_at_once_are_named(tmp_path: Path) -> None:
    def body() -> str:
        accelerator, *_ = trained(tmp_path)
        with pytest.raises(CheckpointError) as error:
            accelerator.save_state(tmp_path / "state", background=accelerator.is_main_process)
        return str(error.value)

    assert "save_state(background=True)" in run_world(body, timeout=60)[0]


@pytest.mark.slow
def test_shards_are_of_the_moment_of_the_call(tmp_path: Path) -> None:
    def body() -> bool:
        accelerator, model, optimizer = sharded(tmp_path)
        expected = accelerator.save_state(tmp_path / "now")
        folder = accelerator.save_state(tmp_path / "behind", background=True)
        spoil(accelerator)
        accelerator.wait_for_save()
        train(accelerator, model, optimizer)
        return contents(folder) == contents(expected)

    assert run_world(body, timeout=60) == [True, True]


# -- the end of the process ------------------------------------------------------------------------------------------

SCRIPT = """
import sys, torch
from trainer_lib import Accelerator
from trainer_lib.checkpointing.save.writer import CheckpointWriter
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(4, 2))
write = CheckpointWriter.write
def slowly(self, files):
    import time
    time.sleep(0.3)
    if sys.argv[2] == "fails":
        raise OSError("no such luck")
    return write(self, files)
CheckpointWriter.write = slowly
accelerator.save_state(sys.argv[1], background=True)
if sys.argv[2] == "raises":
    raise ZeroDivisionError
"""


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.parametrize(
    ("how", "code", "processes"),
    [
        pytest.param("ends", 0, 0, id="by hand, ends"),
        pytest.param("raises", 1, 0, id="by hand, raises", marks=pytest.mark.slow),
        pytest.param("raises", 1, 2, id="launched, raises", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_ends_finishes_its_save_first(how: str, code: int, processes: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    launch = ["-m", "trainer_lib.commands.main", "launch", "--cpu", "--num_processes", str(processes)]
    command = [sys.executable, *(launch if processes else []), "script.py", "state", how]
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stderr
    open_state(tmp_path / "state")


@pytest.mark.slow
@pytest.mark.launch
def test_an_unraised_error_is_logged_at_the_end_of_the_process(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    command = [sys.executable, "script.py", "state", "fails"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert f"The checkpoint {tmp_path / 'state'} could not be saved in the background. no such luck" in done.stderr


def test_a_forked_process_that_ends_finishes_its_save_first(tmp_path: Path) -> None:
    def body() -> None:
        accelerator, *_ = trained(tmp_path)
        accelerator.save_state(tmp_path / "state", background=True)

    run_forked(body, timeout=60)
    open_state(tmp_path / "state")
