"""States that something was done to: each byte counts, what is damaged is named, and the one before it is loaded."""

import json
import logging
import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerator import toy
from tests.checkpointing.test_faults import full_disk, loaded, state_of, train, trained, unlimited
from tests.checkpointing.test_sharded import SHARDED, engine, run
from tests.strategies.sharded import Stack, stack
from tests.trainer.tasks import arguments, network, points, trainer
from tests.trainer.test_resume import Dies
from trainer_lib import CheckpointError, ProjectConfiguration, load_checkpoint_in_model
from trainer_lib.checkpointing.manifest import read_manifest, sealed
from trainer_lib.checkpointing.reader import open_state, verify_state
from trainer_lib.checkpointing.retention import automatic_states
from trainer_lib.checkpointing.verification import share
from trainer_lib.events import Run, Transformer
from trainer_lib.foundation.checksums import checksum_of, checksum_of_bytes
from trainer_lib.foundation.errors import DamagedError, UnwritableError
from trainer_lib.launchers import ProcessFailedError, run_forked


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a state of one process, one of two, and one in shards."""
    folder = tmp_path_factory.mktemp("states")

    def plain(name: str) -> None:
        accelerator, *_ = trained(folder)
        accelerator.save_state(folder / name)

    def shards() -> None:
        run(engine(SHARDED), 1, save={1: folder / "shards"})

    run_forked(plain, ("one",), 1, timeout=60)
    run_forked(plain, ("two",), 2, timeout=60)
    run_forked(shards, (), 2, timeout=60)
    return folder


KINDS = ["one", "two", "shards"]


@pytest.fixture
def state(states: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return Path(shutil.copytree(states / getattr(request, "param", "one"), tmp_path / "state"))


# -- what can happen to a file ---------------------------------------------------------------------------------------


def flip(path: Path, chance: random.Random, others: list[Path]) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def overwrite(path: Path, chance: random.Random, others: list[Path]) -> None:
    content = bytearray(path.read_bytes())
    at = chance.randrange(len(content))
    content[at] = (content[at] + chance.randrange(1, 256)) % 256
    path.write_bytes(content)


def truncate(path: Path, chance: random.Random, others: list[Path]) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def delete(path: Path, chance: random.Random, others: list[Path]) -> None:
    path.unlink()


def append(path: Path, chance: random.Random, others: list[Path]) -> None:
    with path.open("ab") as file:
        file.write(chance.choice([b"\0", b"\n", b" ", chance.randbytes(30)]))


def swap(path: Path, chance: random.Random, others: list[Path]) -> None:
    before = path.read_bytes()
    other = chance.choice([other for other in others if other.read_bytes() != before])
    path.write_bytes(other.read_bytes())
    other.write_bytes(before)


def zero(path: Path, chance: random.Random, others: list[Path]) -> None:
    path.write_bytes(bytes(path.stat().st_size))


DAMAGE = [flip, flip, flip, overwrite, truncate, delete, append, swap, zero]


def damages(folder: Path, count: int, seed: int) -> Iterator[str]:
    """Damage a state time and again, each time whole before, and yield what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    content = {path: path.read_bytes() for path in files}
    chance = random.Random(seed)
    for _ in range(count):
        path, harm = chance.choice(files), chance.choice(DAMAGE)
        harm(path, chance, files)
        yield f"{harm.__name__} {path.relative_to(folder).as_posix()}"
        for one in files:
            if not one.exists() or one.read_bytes() != content[one]:
                one.write_bytes(content[one])


@pytest.mark.parametrize("state", KINDS, indirect=True)
def test_all_damage_is_noticed_and_names_the_file(state: Path) -> None:
    verify_state(state)
    for done in damages(state, 500, seed=len(state.name)):
        with pytest.raises(DamagedError) as told:
            verify_state(state)
        assert done.startswith("swap") or done.split(" ")[1] in str(told.value), f"{done}: {told.value}"
    verify_state(state)


def test_every_byte_of_the_manifest_counts(state: Path) -> None:
    path = state / "manifest.json"
    content = path.read_bytes()
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :])
        with pytest.raises(DamagedError):
            open_state(state)


def test_what_is_damaged_is_not_loaded(state: Path, tmp_path: Path) -> None:
    accelerator, *_ = trained(tmp_path, updates=3)
    before = state_of(accelerator)
    for done in damages(state, 60, seed=1):
        with pytest.raises(CheckpointError):
            accelerator.load_state(state)
        assert state_of(accelerator) == before, done
    accelerator.load_state(state)
    assert state_of(accelerator) != before


def test_what_was_expected_and_found_is_told(state: Path) -> None:
    path = state / "model.safetensors"
    expected = checksum_of(path)
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(DamagedError) as told:
        verify_state(state)
    what = f"model.safetensors has the checksum {checksum_of(path)} instead of {expected}."
    assert str(told.value) == f"The state in {state} is damaged: {what}"


def test_weights_alone_are_checked_too(state: Path) -> None:
    load_checkpoint_in_model(toy.model(), state, strict=True)
    path = state / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(DamagedError, match=r"model.safetensors has the checksum"):
        load_checkpoint_in_model(toy.model(), state, strict=True)


def test_a_size_is_told_without_reading(state: Path) -> None:
    (state / "optimizer.json").chmod(0)
    with (state / "model.safetensors").open("ab") as file:
        file.write(b"!")
    with pytest.raises(DamagedError, match=r"model.safetensors has \d+ bytes instead of \d+"):
        open_state(state)


def test_a_file_that_would_be_read_and_was_not_written_is_refused(state: Path) -> None:
    (state / "tokenizer.json").write_text("{}")  # somebody's own, which nothing here reads
    verify_state(state)
    (state / "scheduler.json").write_text("{}")
    (state / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(DamagedError, match=r"model.safetensors.index.json was not written with it\."):
        open_state(state)


@pytest.mark.parametrize("state", ["shards"], indirect=True)
def test_one_more_file_of_shards_is_refused(state: Path) -> None:
    folder = state / "model.shards"
    shutil.copy(next(folder.iterdir()), folder / "shard-00009-model-00001-of-00001.safetensors")
    with pytest.raises(DamagedError, match=r"model.shards/shard-00009-\S+ was not written with it"):
        open_state(state)


def test_a_state_of_the_first_format_is_checked_by_sizes(state: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = state / "manifest.json"
    content = json.loads(path.read_text())
    del content["digest"]
    content["files"] = {name: {"size": facts["size"]} for name, facts in content["files"].items()}
    path.write_text(json.dumps({**content, "schema": 1}))
    accelerator, *_ = trained(state.parent)
    with caplog.at_level(logging.INFO):
        accelerator.load_state(state)
    assert caplog.text.count("has no checksums (it is of format 1): sizes alone were checked.") == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../secret", r"names '../secret', which leads out of"),
        ("/etc/passwd", r"names '/etc/passwd', which leads out of"),
        ("a/../../secret", r"which leads out of"),
        ("C:\\secret", r"which leads out of"),
        ("link", r"names 'link', a link out of"),
        ("folder/secret", r"names 'folder/secret', a link out of"),
        ("", r"names a file '', which is no name"),
        ("a\0b", r"which is no name"),
    ],
)
def test_no_name_leads_out_of_the_folder(state: Path, name: str, words: str) -> None:
    secret = state.parent / "secret"
    secret.write_text("secret")
    (state / "link").symlink_to(secret)
    (state / "folder").symlink_to(state.parent)
    path = state / "manifest.json"
    content = json.loads(path.read_text())
    content["files"][name] = {"size": 6, "xxh3_128": checksum_of_bytes(b"secret")}
    path.write_bytes(sealed(content))
    with pytest.raises(CheckpointError, match=words):
        open_state(state)


def test_processes_share_the_reading(states: Path) -> None:
    files = read_manifest(states / "two").files
    shares = [share(files, rank, 3) for rank in range(3)]
    assert sorted(name for names in shares for name in names) == sorted(files)
    loads = sorted(sum(files[name]["size"] for name in names) for names in shares)
    assert loads[-1] - loads[0] <= max(facts["size"] for facts in files.values())


# -- the one before it -----------------------------------------------------------------------------------------------


def saved_often(project: Path, **options: Any) -> tuple[Any, list[list[float]]]:
    """Save three states under automatic naming; return the engine, and what is in each."""
    accelerator, model, optimizer = trained(project, **options)
    found: list[list[float]] = []
    for _ in range(3):
        train(accelerator, model, optimizer)
        accelerator.save_state()
        found.append(state_of(accelerator))
    return accelerator, found


def spoil(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")


def test_the_newest_that_is_whole_is_loaded_and_the_others_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator, found = saved_often(tmp_path, total_limit=3)
    folder = tmp_path / "checkpoints"
    spoil(folder / "checkpoint_2" / "optimizer.safetensors")
    (folder / "checkpoint_1" / "manifest.json").unlink()
    accelerator.load_state("latest")
    assert state_of(accelerator) == found[0]
    (said,) = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert re.search(r"checkpoint_2 is damaged: optimizer.safetensors has .*now called checkpoint_2.damaged", said)
    assert re.search(r"checkpoint_1\S* is no manifest .*now called checkpoint_1.damaged. Going on from \S+_0\.", said)
    for _ in range(4):
        accelerator.save_state()
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["checkpoint_1.damaged", "checkpoint_2", "checkpoint_2.damaged", "checkpoint_3", "checkpoint_4"]


def test_where_none_is_whole_all_are_named(tmp_path: Path) -> None:
    accelerator, _ = saved_often(tmp_path)
    for number in range(3):
        spoil(tmp_path / "checkpoints" / f"checkpoint_{number}" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"checkpoint_2 is .*checkpoint_0 is damaged.* no state to load yet"):
        accelerator.load_state()


def test_two_processes_agree_on_what_is_damaged(tmp_path: Path) -> None:
    def body() -> tuple[bool, list[str]]:
        accelerator, found = saved_often(tmp_path)
        if accelerator.is_main_process:
            spoil(tmp_path / "checkpoints" / "checkpoint_2" / "random_states_1.safetensors")
        accelerator.wait_for_everyone()
        with pytest.raises(DamagedError, match=r"random_states_1.safetensors has the checksum"):
            accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_2")
        accelerator.load_state()
        return state_of(accelerator) == found[1], sorted(path.name for path in (tmp_path / "checkpoints").iterdir())

    names = ["checkpoint_0", "checkpoint_1", "checkpoint_2.damaged"]
    assert run_forked(body, (), 2, timeout=60) == [(True, names)] * 2


def test_accelerates_own_states_are_left_alone(tmp_path: Path) -> None:
    accelerator, found = saved_often(tmp_path)
    foreign = tmp_path / "checkpoints" / "checkpoint_7"
    foreign.mkdir()
    (foreign / "optimizer.bin").write_bytes(b"")
    accelerator.load_state()
    assert state_of(accelerator) == found[2]
    assert foreign.is_dir()


def one_run(folder: Path, dies_at: int | None = None, **options: Any) -> list[Any] | None:
    model = network(dropout=0.3)
    callbacks = [] if dies_at is None else [Dies(dies_at)]
    one = trainer(arguments(output_dir=folder, save_every=2, **options), model=model, callbacks=callbacks)
    try:
        one.fit()
    except InterruptedError:
        return None
    return [parameter.detach().tolist() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: spoil(folder / "model.safetensors"),
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "optimizer.json").unlink(),
    ],
)
def test_a_run_goes_on_from_the_checkpoint_before(
    harm: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = one_run(tmp_path / "whole")
    one_run(tmp_path / "parts", 7)
    (folder,) = (tmp_path / "parts").glob("*/checkpoints")
    harm(folder / "checkpoint-00000006")
    assert one_run(tmp_path / "parts", resume="auto") == whole
    assert caplog.text.count("It is now called checkpoint-00000006.damaged. Going on from ") == 1
    assert "Going on from " + str(folder / "checkpoint-00000004") in caplog.text
    assert (folder / "checkpoint-00000006.damaged").is_dir()


def test_a_run_without_any_whole_checkpoint_begins_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = one_run(tmp_path / "whole")
    one_run(tmp_path / "parts", 3)
    (folder,) = (tmp_path / "parts").glob("*/checkpoints/checkpoint-00000002")
    spoil(folder / "model.safetensors")
    assert one_run(tmp_path / "parts", resume="auto") == whole
    assert "Going on from the beginning." in caplog.text


def test_a_checkpoint_that_was_named_is_not_replaced_by_another(tmp_path: Path) -> None:
    one_run(tmp_path, 7)
    (folder,) = tmp_path.glob("*/checkpoints")
    spoil(folder / "checkpoint-00000006" / "model.safetensors")
    with pytest.raises(DamagedError, match=r"model.safetensors has the checksum \w+ instead of"):
        one_run(tmp_path, resume=str(folder / "checkpoint-00000006"))
    assert (folder / "checkpoint-00000006").is_dir()


# -- saves that are cut short, at any moment -------------------------------------------------------------------------


def test_killed_at_random_moments_of_saves_nothing_is_unloadable(tmp_path: Path) -> None:
    """Twelve processes in a row, each of which saves as often as it can and is killed some time."""
    chance = random.Random(0)
    accelerator, *_ = saved_often(tmp_path, total_limit=2)
    folder = tmp_path / "checkpoints"
    for _ in range(12):
        before = max(automatic_states(folder))
        child = os.fork()
        if child == 0:
            try:
                while True:
                    accelerator.save_state()
            finally:
                os._exit(1)
        while max(automatic_states(folder)) < before + 2:
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
        time.sleep(chance.random() * 0.03)
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        states = automatic_states(folder)
        assert max(states) >= before + 2
        for path in states.values():
            verify_state(path)
        accelerator.load_state()
    assert loaded(tmp_path) == state_of(accelerator)
    assert not [path for path in folder.iterdir() if path.name.endswith("damaged")]


def test_killed_at_random_moments_two_processes_leave_whole_shards(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    def saves_until_killed(seed: int) -> None:
        accelerator = engine(SHARDED)
        options: dict[str, Any] = {"automatic_checkpoint_naming": True, "total_limit": 2}
        accelerator.project_configuration = ProjectConfiguration(project_dir=tmp_path, **options)
        network = stack(Stack)
        accelerator.prepare(network, torch.optim.AdamW(network.parameters()))
        if seed:
            accelerator.load_state()
        accelerator.save_state()
        if accelerator.process_index == seed % 2:
            threading.Timer(random.Random(seed).random() * 0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        while True:
            accelerator.save_state()

    for seed in range(4):
        with pytest.raises(ProcessFailedError, match="SIGKILL"):
            run_forked(saves_until_killed, (seed,), 2, timeout=60)
        assert automatic_states(folder)
        for path in automatic_states(folder).values():
            verify_state(path)


class FullDisk(Transformer):
    """Fills the disk of one process before a save, and makes room after it."""

    def __init__(self, save: int, rank: int) -> None:
        self._save, self._rank = save, rank

    def on_save_begin(self, run: Run, folder: Path) -> None:
        unlimited()
        if run.state.step == self._save and run.accelerator.process_index == self._rank:
            full_disk(folder)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("in_background", [True, False])
def test_a_run_goes_on_when_the_disk_is_full(in_background: bool, rank: int, tmp_path: Path) -> None:
    def body() -> tuple[list[int], list[str]]:
        unlimited()
        args = arguments(output_dir=tmp_path, save_every=2, max_steps=8, save_in_background=in_background)
        one = trainer(args, train_dataset=points(64), callbacks=[FullDisk(4, rank)])
        with warned() as said:
            one.fit()
        return [entry["step"] for entry in one.state.checkpoints], said

    for process, (steps, said) in enumerate(run_forked(body, (), 2, timeout=60)):
        assert steps == [2, 6, 8]
        told = [line for line in said if "Training goes on" in line]
        assert len(told) == (process == 0), said
        assert all("could not be written" in line and "File too large" in line for line in told)
    (folder,) = tmp_path.glob("*/checkpoints")
    assert sorted(path.name for path in folder.iterdir()) == [f"checkpoint-0000000{step}" for step in (2, 6, 8)]
    for path in folder.iterdir():
        verify_state(path)


def test_a_full_disk_ends_a_run_that_says_so(tmp_path: Path) -> None:
    def body() -> int:
        args = arguments(output_dir=tmp_path, save_every=2, max_steps=8, on_save_error="raise")
        one = trainer(args, callbacks=[FullDisk(4, 0)])
        with pytest.raises(UnwritableError, match=r"could not be written: File too large"):
            one.fit()
        unlimited()
        return one.state.step

    assert run_forked(body, (), 1, timeout=60)[0] in (4, 5, 6)
    (folder,) = tmp_path.glob("*/checkpoints")
    assert [path.name for path in folder.iterdir()] == ["checkpoint-00000002"]


@contextmanager
def warned() -> Generator[list[str]]:
    """Collect what is warned of."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("trainer_lib").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("trainer_lib").removeHandler(handler)


def test_a_full_disk_leaves_the_state_before_and_no_debris(tmp_path: Path) -> None:
    def body() -> str:
        accelerator, model, optimizer = trained(tmp_path)
        train(accelerator, model, optimizer)
        accelerator.save_state()
        before = state_of(accelerator)
        train(accelerator, model, optimizer)
        full_disk(tmp_path)
        with pytest.raises(CheckpointError) as told:
            accelerator.save_state()
        unlimited()
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_0"]
        verify_state(tmp_path / "checkpoints" / "checkpoint_0")
        accelerator.save_state()
        verify_state(tmp_path / "checkpoints" / "checkpoint_1")
        accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_0")
        assert state_of(accelerator) == before
        return str(told.value)

    (said,) = run_forked(body, num_processes=1, timeout=60)
    assert re.search(r"checkpoint_1.partial/\S+ could not be written: File too large.* takes about .* are free", said)
