"""Errors for failed processes: the first failure comes first, with its traceback."""

from pathlib import Path

import pytest

from trainer_lib.launchers.process_failures import Failure, failed, failure_of


def trace(error: str, depth: int = 1) -> str:
    return "Traceback (most recent call last):\n" + '  File "train.py"\n' * depth + f"{error}\n"


def test_earliest_word_is_the_cause() -> None:
    error = failed(
        [
            Failure(rank=0, exit_code=1, traceback=trace("RuntimeError: lost 2."), when=20),
            Failure(rank=2, exit_code=7, traceback=trace("ValueError: first"), when=10),
        ],
        num_processes=3,
    )
    assert str(error).splitlines() == [
        "Process 2 of 3 failed with exit code 7.",
        "After that, process 0 raised RuntimeError: lost 2.",
        *trace("ValueError: first").splitlines(),
    ]
    assert (error.rank, error.exit_code) == (2, 7)


def test_an_error_of_several_lines_is_named_by_its_first() -> None:
    hang = (
        "HangError: No rank has made progress for 1 s: rank 1 hangs.\n  rank 0 is in step 5\nThe stacks are in a file."
    )
    error = failed([Failure(rank=rank, exit_code=70, traceback=hang, when=rank) for rank in (0, 1)], num_processes=2)
    assert str(error).splitlines()[:2] == [
        "Process 0 of 2 failed with exit code 70.",
        "After that, process 1 raised HangError: No rank has made progress for 1 s: rank 1 hangs.",
    ]
    failures = [
        Failure(rank=0, exit_code=1, traceback=trace("ValueError: first"), when=1),
        Failure(rank=1, exit_code=1, traceback=trace("ValueError: wrong rows:\n  row 3\nin train.csv"), when=2),
        Failure(rank=2, exit_code=1, traceback='  File "train.py", line 1\n    (\n    ^\nSyntaxError: open', when=3),
    ]
    second = str(failed(failures, num_processes=3)).splitlines()[1]
    assert second == "After that, process 1 raised ValueError: wrong rows:; process 2 raised SyntaxError: open."


def test_sudden_death_comes_before_words() -> None:
    failures = [
        Failure(rank=0, exit_code=1, traceback=trace("RuntimeError: lost 1"), when=1),
        Failure(rank=1, exit_code=-11),
    ]
    error = failed(failures, num_processes=2)
    assert str(error).startswith("Process 1 of 2 was killed by SIGSEGV.\n")
    assert error.exit_code == 139


def test_the_exit_code_is_the_worst_of_all() -> None:
    failures = [
        Failure(rank=rank, exit_code=code, traceback=trace("SystemExit"), when=rank)
        for rank, code in enumerate((3, 5, 4))
    ]
    error = failed(failures, num_processes=3)
    assert (error.rank, error.exit_code) == (0, 5)


def test_a_printed_traceback_is_not_repeated_and_the_log_is_named() -> None:
    failure = Failure(rank=0, exit_code=1, traceback=trace("ValueError: deep", depth=50), log="/logs/0/stderr.log")
    lines = str(failed([failure], num_processes=1, is_printed=True)).splitlines()
    assert lines[1:] == ["The output of process 0 is in /logs/0/stderr.log.", "ValueError: deep"]


def test_the_first_of_several_printed_tracebacks_is_repeated_at_the_end() -> None:
    failures = [Failure(rank=rank, exit_code=1, traceback=trace(f"ValueError: {rank}"), when=rank) for rank in (1, 0)]
    failures.append(Failure(rank=2, exit_code=1, traceback=trace("ValueError: 0"), when=2))
    text = str(failed(failures, num_processes=3, is_printed=True))
    assert text.endswith(f"\n{trace('ValueError: 0').rstrip()}")
    assert text.count("Traceback") == 1
    same = str(failed([failures[1], failures[2]], num_processes=3, is_printed=True))
    assert same.splitlines()[2:] == ["ValueError: 0"]


def test_an_error_without_frames_is_given_too() -> None:
    failures = [
        Failure(rank=0, exit_code=1, traceback=trace("ValueError: first\nIn step 3."), when=1),
        Failure(rank=1, exit_code=1, traceback="FileNotFoundError: [Errno 2] train.py\n", when=2),
    ]
    lines = str(failed(failures, num_processes=2, is_printed=True)).splitlines()
    assert lines[1] == "After that, process 1 raised FileNotFoundError: [Errno 2] train.py."
    assert lines[-2:] == ["ValueError: first", "In step 3."]


def test_messages_that_follow_are_cut_short() -> None:
    failures = [
        Failure(rank=0, exit_code=3),
        Failure(rank=1, exit_code=1, traceback=trace("RuntimeError: " + "long " * 100), when=1),
    ]
    assert len(str(failed(failures, num_processes=2)).splitlines()[1]) < 250


@pytest.mark.parametrize("written", ["", '{"message": {"mess'])
def test_a_record_that_a_kill_cut_off_does_not_hide_the_cause(written: str, tmp_path: Path) -> None:
    record = tmp_path / "error.json"
    record.write_text(written)
    cause = Failure(rank=0, exit_code=1, traceback=trace("ValueError: first"), when=1)
    report = str(failed([failure_of(1, -9, record), cause], num_processes=2)).splitlines()
    assert report[0] == "Process 0 of 2 failed with exit code 1."
    assert report[1].startswith("After that, process 1 raised an error that is not known")
