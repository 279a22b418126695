"""`trainer-lib test`: each check passes in a good world, fails in a wrong one, and the command starts them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.worlds import run_world
from trainer_lib import Accelerator, DataLoaderConfiguration
from trainer_lib.commands.main import main
from trainer_lib.launchers import ProcessFailedError, run_forked
from trainer_lib.testing import self_check

CHECKS = [
    (self_check.check_collectives, "give every rank what all 2 put in"),
    (self_check.check_data_order, "each of 24 samples once an epoch, in the order of one process"),
    (self_check.check_accumulation, "the update of 2 micro-batches a process is that of all their samples"),
    (self_check.check_training, "weights after 3 updates with AdamW are those of one process"),
    (self_check.check_save_and_load, "bit for bit"),
    (self_check.check_evaluation, "each of 19 samples once"),
]


@pytest.mark.parametrize(("check", "proved"), CHECKS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_check_passes_on_two_processes(check: Callable[[Accelerator], str], proved: str) -> None:
    def body() -> str:
        return check(Accelerator(cpu=True, gradient_accumulation_steps=2))

    assert all(proved in result for result in run_world(body, num_processes=2))


def test_an_update_of_too_few_micro_batches_fails() -> None:
    def body() -> str:
        with pytest.raises(self_check.CheckFailedError) as error:
            self_check.check_accumulation(Accelerator(cpu=True, gradient_accumulation_steps=1))
        return str(error.value)

    assert all("weights differ from those of one process by" in message for message in run_world(body, num_processes=2))


def test_another_order_of_the_data_fails() -> None:
    def body() -> str:
        options = DataLoaderConfiguration(use_seedable_sampler=True)
        with pytest.raises(self_check.CheckFailedError) as error:
            self_check.check_data_order(Accelerator(cpu=True, dataloader_config=options))
        return str(error.value)

    assert all(message.startswith("the order of an epoch gave [") for message in run_world(body, num_processes=2))


@pytest.mark.launch
@pytest.mark.slow
def test_the_command_starts_the_world_of_the_configuration(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--use_fsdp", "--fsdp_transformer_layer_cls_to_wrap", "Block"]
    file = tmp_path / "config.yaml"
    file.write_text("num_processes: 2\nuse_cpu: true")
    assert main(["test", "--config_file", str(file), *options]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "2 processes, cpu, FSDP, mixed_precision=no"
    assert [line[:5] for line in lines[1:-1]] == ["[ok] "] * 6
    assert lines[-1] == "All checks passed: this world trains as one process does."


def test_a_check_that_fails_ends_its_process_and_is_named(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check = self_check.check_training

    def wrong(accelerator: Accelerator) -> str:
        if accelerator.process_index == 1:
            raise self_check.CheckFailedError("differs")
        return check(accelerator)

    monkeypatch.setitem(self_check._CHECKS, "Training", wrong)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    with pytest.raises(ProcessFailedError, match="CheckFailedError: Training failed on rank 1: differs") as caught:
        run_forked(self_check.main, timeout=100)
    assert caught.value.exit_code == 1
    out = capfd.readouterr().out
    assert "[ok] Accumulation: " in out
    assert "All checks passed" not in out


def test_the_checks_are_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test", str(tmp_path)]) == 2
    assert "the checks are the script" in capsys.readouterr().err
    assert main(["test", "--help"]) == 0
    assert "Takes all options of `trainer-lib launch`" in capsys.readouterr().out.replace("\n", " ")
    assert main(["test", "--tpu"]) == 2
