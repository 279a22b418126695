"""`save_state` on the main process only, as in many scripts, and on ranks that come late."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerator import toy
from tests.accelerator.test_persistence import engine, train, trained
from tests.trainer.tasks import arguments, trainer
from trainer_lib import Accelerator, FullyShardedDataParallelPlugin, InitProcessGroupKwargs, WorldError
from trainer_lib.accelerator.checkpoints import saving_ranks
from trainer_lib.checkpointing.format.manifest import read_manifest
from trainer_lib.collectives import agreement
from trainer_lib.events import Callback, Run
from trainer_lib.launchers import run_forked

PATIENCE = 0.4


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "PATIENCE", PATIENCE)


def weights(model: nn.Module) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


@pytest.mark.parametrize("options", [{}, {"background": True}, {"layout": "accelerate"}, {"safe_serialization": False}])
def test_the_main_process_saves_alone_where_only_it_calls(
    options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    looks = saving_ranks.looks
    monkeypatch.setattr(saving_ranks, "looks", lambda seconds: waits.append(seconds) or looks(seconds))

    def body() -> tuple[list[float], list[float], list[float], str]:
        accelerator = engine()
        model, optimizer = trained(accelerator)
        for number in range(3):
            train(accelerator, model, optimizer)
            if accelerator.is_main_process:
                accelerator.save_state(tmp_path / str(number), **options)
        whole = weights(model)
        accelerator.wait_for_save()
        accelerator.wait_for_everyone()
        accelerator.load_state(tmp_path / "0", safe_serialization=options.get("safe_serialization", True))
        train(accelerator, model, optimizer, 2)
        return whole, weights(model), waits, caplog.text

    (whole, resumed, first_waits, text), (_, other, _, _) = run_forked(body, timeout=120)
    assert resumed == whole == other
    assert first_waits == [PATIENCE, 0, 0]
    assert text.count("Rank 0 saves alone after 0.4 seconds.") == 1
    assert text.count("save_state was called on rank 0, and within 0.4 seconds not on rank 1: rank 0 saves alone.") == 1
    if options.get("layout") != "accelerate":
        assert [read_manifest(tmp_path / str(number)).world_size for number in range(3)] == [1, 1, 1]


def test_a_rank_that_comes_late_is_told_and_the_next_state_is_saved_by_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def body() -> tuple[str, list[str]]:
        accelerator = engine()
        model, optimizer = trained(accelerator)
        folders: list[str] = []
        for number in range(2):
            if accelerator.process_index == 1 and number == 0:
                time.sleep(3 * PATIENCE)
            folders.append(accelerator.save_state(tmp_path / str(number)))
            train(accelerator, model, optimizer)
        return caplog.text, folders

    (_, folders), (text, same) = run_forked(body, timeout=120)
    assert "Rank 1 called save_state after rank 0 had saved alone" in text
    assert folders == same == [str(tmp_path / "0"), str(tmp_path / "1")]
    assert [read_manifest(tmp_path / str(number)).world_size for number in range(2)] == [1, 2]


def test_all_ranks_save_together_after_states_of_the_main_process(tmp_path: Path) -> None:
    def body() -> None:
        accelerator = engine()
        model, optimizer = trained(accelerator)
        for number in range(2):
            if accelerator.is_main_process:
                accelerator.save_state(tmp_path / str(number))
            train(accelerator, model, optimizer)
        if accelerator.is_main_process:
            time.sleep(PATIENCE / 2)  # the other rank calls first, and does not take the state before for this one
        accelerator.save_state(tmp_path / "2")

    run_forked(body, timeout=120)
    assert [read_manifest(tmp_path / str(number)).world_size for number in range(3)] == [1, 1, 2]


def test_a_second_engine_begins_at_the_same_place(tmp_path: Path) -> None:
    def body() -> None:
        for number in range(2):
            accelerator = engine()
            trained(accelerator)
            if accelerator.is_main_process:
                time.sleep(PATIENCE / 2)
            accelerator.save_state(tmp_path / str(number))
            accelerator.free_memory()

    run_forked(body, timeout=120)
    assert [read_manifest(tmp_path / str(number)).world_size for number in range(2)] == [2, 2]


def test_sharded_states_wait_for_all_ranks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def body() -> str:
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
        model = accelerator.prepare(toy.model())
        if accelerator.process_index == 1:
            time.sleep(2 * PATIENCE)
        accelerator.save_state(tmp_path / "state")
        del model
        return caplog.text

    text, _ = run_forked(body, timeout=120)
    assert "Rank 0 has waited 0.4 seconds in save_state for rank 1. All ranks have to call it" in text
    assert read_manifest(tmp_path / "state").world_size == 2


def test_ranks_that_joined_in_vain_continue(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def body() -> tuple[str, str]:
        accelerator = engine()
        model, optimizer = trained(accelerator)
        if accelerator.process_index == 1:  # ranks may count their backwards differently
            train(accelerator, accelerator.unwrap_model(model), optimizer)
        folder = ""
        if accelerator.process_index != 2:
            folder = accelerator.save_state(tmp_path / "state")
        accelerator.wait_for_everyone()
        return folder, caplog.text

    first, (folder, text), last = run_forked(body, num_processes=3, timeout=120)
    assert "and within 0.4 seconds not on rank 2: rank 0 saves alone" in first[1]
    assert "Rank 1 called save_state after rank 0 had saved alone" in text
    assert (first[0], folder, last[0]) == (str(tmp_path / "state"), str(tmp_path / "state"), "")
    assert read_manifest(tmp_path / "state").world_size == 1


class Late(Callback):
    """Holds rank 1 up before a save, longer than rank 0 would wait for it in a script."""

    def on_save_begin(self, run: Run, folder: Path) -> None:
        del folder
        if run.accelerator.process_index == 1:
            time.sleep(2 * PATIENCE)


def test_a_trainer_saves_on_all_ranks_however_late_one_is(tmp_path: Path) -> None:
    def body() -> str:
        args = arguments(max_steps=2, save_every=2, output_dir=tmp_path)
        return str(trainer(args, callbacks=[Late()]).fit().last_checkpoint)

    folder, _ = run_forked(body, timeout=120)
    assert read_manifest(Path(folder)).world_size == 2


def test_sharded_states_end_with_an_error_that_names_the_missing_ranks(tmp_path: Path) -> None:
    def body() -> str:
        options = InitProcessGroupKwargs(timeout=timedelta(seconds=2))
        plugin = FullyShardedDataParallelPlugin()
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, kwargs_handlers=[options])
        model = accelerator.prepare(toy.model())
        if accelerator.process_index in (1, 3):
            time.sleep(3)
            return ""
        with pytest.raises(WorldError) as error:
            accelerator.save_state(tmp_path / "state")
        del model
        return str(error.value)

    first, _, third, _ = run_forked(body, num_processes=4, timeout=120)
    assert first == "Rank 0 has waited 2 seconds in save_state for ranks 1, 3. All ranks have to call it."
    assert third == "Rank 2 has waited 2 seconds in save_state for rank 0. All ranks have to call it."
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_waits_in_load_state_says_so(late: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def body() -> str:
        accelerator = engine()
        trained(accelerator)
        accelerator.save_state(tmp_path / "state")
        if accelerator.process_index == late:
            time.sleep(2 * PATIENCE)
        accelerator.load_state(tmp_path / "state")
        return caplog.text

    text = run_forked(body, timeout=120)[1 - late]
    assert f"Rank {1 - late} has waited 0.4 seconds in load_state for the other ranks." in text
    assert "save_state" not in text
