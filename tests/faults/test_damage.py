"""Damaged checkpoints: every byte counts, the damage is named, and the previous checkpoint is loaded."""

import json
import logging
import os
import re
import resource
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from xxhash import xxh3_128_hexdigest

from tests.accelerator import toy
from tests.faults.conftest import Trials
from tests.faults.injuries import damages, spoil
from tests.faults.ledger import Ledger
from tests.faults.trainings import digest, one_run, saved_often, sharded, state_of, trained
from tests.worlds import run_world
from trainer_lib import CheckpointError, load_checkpoint_in_model
from trainer_lib.checkpointing.format.manifest import read_manifest
from trainer_lib.checkpointing.load.find import open_state, verify_state
from trainer_lib.checkpointing.load.verification import check_bytes, check_sizes, share
from trainer_lib.filesystem.checksums import checksum_of
from trainer_lib.foundation.errors import DamagedError


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a state of one process, one of two, and one in shards; and a checkpoint of a Trainer."""
    folder = tmp_path_factory.mktemp("states")

    def plain(name: str) -> None:
        accelerator, *_ = trained(folder)
        accelerator.save_state(folder / name)

    def shards() -> None:
        accelerator, *_ = sharded(folder)
        accelerator.save_state(folder / "shards")

    def of_a_run() -> None:
        one_run(folder / "runs", max_steps=2)
        next(folder.glob("runs/*/checkpoints/checkpoint-00000002")).rename(folder / "run")

    run_world(plain, ("one",), 1, timeout=60)
    run_world(of_a_run, (), 1, timeout=60)
    run_world(plain, ("two",), 2, timeout=60)
    run_world(shards, (), 2, timeout=60)
    return folder


KINDS = ["one", "two", "shards", "run"]


@pytest.fixture
def state(states: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return Path(shutil.copytree(states / getattr(request, "param", "one"), tmp_path / "state"))


@pytest.mark.parametrize(("state", "seed"), [(kind, number) for number, kind in enumerate(KINDS)], indirect=["state"])
def test_all_damage_is_noticed_and_names_the_file(state: Path, seed: int, trials: Trials, ledger: Ledger) -> None:
    verify_state(state)
    for kind, file in damages(state, trials(60, 2500), seed):
        with pytest.raises(DamagedError) as error:
            verify_state(state)
        assert file in str(error.value) or kind == "files swapped", f"{kind}, {file}: {error.value}"
        ledger.note("damage", kind, injected=1, noticed=1, named=int(file in str(error.value)))
    verify_state(state)


def test_every_byte_of_the_manifest_counts(state: Path, trials: Trials, ledger: Ledger) -> None:
    path = state / "manifest.json"
    content = path.read_bytes()
    for at in range(len(content)):
        for bit in range(at % 8, 8, trials(8, 1)):
            path.write_bytes(content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :])
            with pytest.raises(DamagedError, match=r"manifest\.json"):
                open_state(state)
            ledger.note("damage", "a bit of each byte of a manifest", injected=1, noticed=1, named=1)


def test_a_pipe_in_place_of_the_manifest_is_refused(state: Path) -> None:
    (state / "manifest.json").unlink()
    os.mkfifo(state / "manifest.json")
    for read in (read_manifest, open_state, verify_state):
        with pytest.raises(DamagedError, match="it is not a regular file"):
            read(state)


def test_a_damaged_checkpoint_is_not_loaded(state: Path, tmp_path: Path, trials: Trials, ledger: Ledger) -> None:
    accelerator, *_ = trained(tmp_path, updates=3)
    before = digest(accelerator)
    for kind, file in damages(state, trials(60, 500), seed=1):
        with pytest.raises(CheckpointError):
            accelerator.load_state(state)
        assert digest(accelerator) == before, f"{kind}, {file}"
        ledger.note("damage", "any of these, and then load_state", injected=1, noticed=1, named=1)
    accelerator.load_state(state)
    assert digest(accelerator) != before


def test_errors_name_the_expected_and_the_actual_value(state: Path) -> None:
    path = state / "model.safetensors"
    expected = checksum_of(path)
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(DamagedError) as error:
        verify_state(state)
    message = f"model.safetensors has the checksum {checksum_of(path)} instead of {expected}."
    assert str(error.value) == f"The checkpoint {state} is damaged: {message}"


def test_weights_alone_are_checked_too(state: Path) -> None:
    load_checkpoint_in_model(toy.model(), state, strict=True)
    path = state / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(DamagedError, match=r"model.safetensors has the checksum"):
        load_checkpoint_in_model(toy.model(), state, strict=True)


def test_a_wrong_size_is_reported_without_reading_the_file(state: Path) -> None:
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
    with pytest.raises(DamagedError, match=r"model.safetensors.index.json is not in its manifest\."):
        open_state(state)


def test_a_link_to_itself_is_a_missing_file(state: Path) -> None:
    (state / "model.safetensors").unlink()
    (state / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(DamagedError, match=r"model\.safetensors is missing"):
        verify_state(state)


def test_a_checkpoint_is_not_damaged_because_no_more_files_can_be_opened(state: Path) -> None:
    manifest = read_manifest(state)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    readers = [read_manifest, partial(check_sizes, manifest=manifest), partial(check_bytes, manifest=manifest)]
    for read in readers:
        os.close(lowest := os.open(os.devnull, os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))  # all numbers below are in use
        try:
            with pytest.raises(CheckpointError, match="cannot be read: Too many open files") as error:
                read(state)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert not isinstance(error.value, DamagedError), 'which `resume="auto"` would rename'


@pytest.mark.parametrize("state", ["shards"], indirect=True)
def test_one_more_file_of_shards_is_refused(state: Path) -> None:
    folder = state / "model.shards"
    shutil.copy(next(folder.iterdir()), folder / "shard-00009-model-00001-of-00001.safetensors")
    with pytest.raises(DamagedError, match=r"model.shards/shard-00009-\S+ is not in its manifest"):
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
    assert caplog.text.count("has no checksums (format 1): only the sizes of its files were checked.") == 1


def test_the_digest_is_that_of_the_text_with_zeros_in_its_place(state: Path) -> None:
    """Checkpoints of earlier versions are checked by the same rule, and `xxhsum -H2` can do it."""
    text = (state / "manifest.json").read_bytes()
    own = json.loads(text)["digest"].encode()
    assert xxh3_128_hexdigest(text.replace(own, b"0" * 32)).encode() == own


def test_processes_share_the_reading(states: Path) -> None:
    files = read_manifest(states / "two").files
    shares = [share(files, rank, 3) for rank in range(3)]
    assert sorted(name for names in shares for name in names) == sorted(files)
    loads = sorted(sum(files[name]["size"] for name in names) for names in shares)
    assert loads[-1] - loads[0] <= max(facts["size"] for facts in files.values())


# -- the one before it -----------------------------------------------------------------------------------------------


def test_the_newest_intact_checkpoint_is_loaded_and_the_others_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator, losses = saved_often(tmp_path, total_limit=3)
    folder = tmp_path / "checkpoints"
    spoil(folder / "checkpoint_2" / "optimizer.safetensors")
    (folder / "checkpoint_1" / "manifest.json").unlink()
    accelerator.load_state("latest")
    assert state_of(accelerator) == losses[0]
    (message,) = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert re.search(r"checkpoint_2 is damaged: optimizer.safetensors has .*now called checkpoint_2.damaged", message)
    assert re.search(
        r"checkpoint_1\S* is not the manifest .*now called checkpoint_1.damaged. Loading \S+_0 instead\.", message
    )
    for _ in range(4):
        accelerator.save_state()
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["checkpoint_1.damaged", "checkpoint_2", "checkpoint_2.damaged", "checkpoint_3", "checkpoint_4"]


def test_an_error_names_all_checkpoints_if_none_is_intact(tmp_path: Path) -> None:
    accelerator, _ = saved_often(tmp_path)
    for number in range(3):
        spoil(tmp_path / "checkpoints" / f"checkpoint_{number}" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"checkpoint_2 is .*checkpoint_0 is damaged.* no checkpoint to load yet"):
        accelerator.load_state()


def test_two_ranks_agree_on_the_damage(tmp_path: Path) -> None:
    def body() -> tuple[bool, list[str]]:
        accelerator, losses = saved_often(tmp_path)
        if accelerator.is_main_process:
            spoil(tmp_path / "checkpoints" / "checkpoint_2" / "random_states_1.safetensors")
        accelerator.wait_for_everyone()
        with pytest.raises(DamagedError, match=r"random_states_1.safetensors has the checksum"):
            accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_2")
        accelerator.load_state()
        return state_of(accelerator) == losses[1], sorted(path.name for path in (tmp_path / "checkpoints").iterdir())

    names = ["checkpoint_0", "checkpoint_1", "checkpoint_2.damaged"]
    assert run_world(body, (), 2, timeout=60) == [(True, names)] * 2


def test_a_damaged_state_of_accelerate_is_named_and_left_alone(tmp_path: Path) -> None:
    accelerator, losses = saved_often(tmp_path)
    foreign = tmp_path / "checkpoints" / "checkpoint_7"
    foreign.mkdir()
    (foreign / "optimizer.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"checkpoint_7/optimizer.bin cannot be read"):
        accelerator.load_state()
    accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_2")
    assert state_of(accelerator) == losses[2]
    assert foreign.is_dir()


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: spoil(folder / "model.safetensors"),
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "optimizer.json").unlink(),
    ],
)
def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(
    harm: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = one_run(tmp_path / "whole")
    one_run(tmp_path / "parts", 7)
    (folder,) = (tmp_path / "parts").glob("*/checkpoints")
    harm(folder / "checkpoint-00000006")
    assert one_run(tmp_path / "parts", resume="auto") == whole
    assert caplog.text.count("It is now called checkpoint-00000006.damaged. Resuming from ") == 1
    assert "Resuming from " + str(folder / "checkpoint-00000004") in caplog.text
    assert (folder / "checkpoint-00000006.damaged").is_dir()


def test_a_run_without_an_intact_checkpoint_starts_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = one_run(tmp_path / "whole")
    one_run(tmp_path / "parts", 3)
    (folder,) = (tmp_path / "parts").glob("*/checkpoints/checkpoint-00000002")
    spoil(folder / "model.safetensors")
    assert one_run(tmp_path / "parts", resume="auto") == whole
    assert "Resuming from the beginning." in caplog.text


def test_a_checkpoint_that_was_named_is_not_replaced_by_another(tmp_path: Path) -> None:
    one_run(tmp_path, 7)
    (folder,) = tmp_path.glob("*/checkpoints")
    spoil(folder / "checkpoint-00000006" / "model.safetensors")
    with pytest.raises(DamagedError, match=r"model.safetensors has the checksum \w+ instead of"):
        one_run(tmp_path, resume=str(folder / "checkpoint-00000006"))
    assert (folder / "checkpoint-00000006").is_dir()
