"""Tests of Printer."""

import io

import pytest

from tests.callbacks.loops import evaluate, go_through, running
from tests.worlds import run_world
from trainer_lib import Accelerator
from trainer_lib.callbacks import Printer
from trainer_lib.events import Dispatcher, Run


def test_a_run_is_lines_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    printer, run = Printer(), running(max_steps=4, steps_per_epoch=2)
    evaluations = {2: {"eval_loss": 0.53219, "eval_accuracy": 0.9}, 4: {"eval_loss": 0.4, "eval_accuracy": 0.99999}}
    go_through([printer], 4, run, log_every=2, evaluations=evaluations)
    assert capsys.readouterr().out.splitlines() == [
        "step 2/4, epoch 1: loss 0.5",
        "step 2/4, epoch 1: eval_loss 0.5322, eval_accuracy 0.9",
        "step 4/4, epoch 2: loss 0.25",
        "step 4/4, epoch 2: eval_loss 0.4, eval_accuracy 1",
        "step  epoch  eval_loss  eval_accuracy",
        "   2      1     0.5322            0.9",
        "   4      2        0.4              1",
    ]


def test_the_table_has_the_evaluations_before_a_resume() -> None:
    file, run = io.StringIO(), running(step=4)
    run.state.history += [{"step": 2, "epoch": 0.5, "eval_a_loss": 1.0}, {"step": 2, "epoch": 0.5, "loss": 1.0}]
    go_through([Printer(file)], 6, run, evaluations={6: {"eval_a_loss": 0.5, "eval_b_loss": 0.25}})
    assert file.getvalue().splitlines()[1:] == [
        "step  epoch  eval_a_loss  eval_b_loss",
        "   2    0.5            1",
        "   6      0          0.5         0.25",
    ]


def test_the_best_metric_is_printed() -> None:
    file = io.StringIO()
    Printer(file).on_best(running(step=7), "eval_loss", 0.123456)
    assert file.getvalue() == "step 7: best eval_loss so far, 0.1235\n"


def test_a_run_without_evaluations_has_no_table() -> None:
    file = io.StringIO()
    go_through([Printer(file)], 2, log_every=2)
    assert file.getvalue() == "step 2, epoch 0: loss 0.5\n"


def test_an_evaluation_on_its_own_is_a_line_and_not_in_the_table() -> None:
    file = io.StringIO()
    printer = Printer(file)
    evaluate(Dispatcher([printer]), Run(), {"test_loss": 1.0})
    go_through([printer], 2, evaluations={2: {"eval_loss": 0.5}})
    assert [line for line in file.getvalue().splitlines() if "test" in line] == ["evaluation: test_loss 1"]


def test_the_main_process_alone_prints() -> None:
    def body() -> str:
        file, run = io.StringIO(), running()
        run.accelerator = Accelerator(cpu=True)
        go_through([Printer(file)], 2, run, log_every=1, evaluations={2: {"eval_loss": 0.5}})
        return file.getvalue()

    first, second = run_world(body, timeout=60)
    assert len(first.splitlines()) == 5
    assert second == ""
