"""Errors for failed processes: the first failure comes first, with its traceback."""

from trainer_lib.launchers.process_failures import Failure, failed


def trace(error: str, depth: int = 1) -> str:
    return "Traceback (most recent call last):\n" + '  File "train.py"\n' * depth + f"{error}\n"


def test_earliest_word_is_the_cause() -> None:
    error = failed(
        [
            Failure(rank=0, exit_code=1, traceback=trace("RuntimeError: lost 2"), when=20),
            Failure(rank=2, exit_code=7, traceback=trace("ValueError: first"), when=10),
        ],
        num_processes=3,
    )
    assert str(error).startswith("Process 2 of 3 failed with exit code 7:\nTraceback")
    assert str(error).endswith("After that, process 0 raised RuntimeError: lost 2.")
    assert (error.rank, error.exit_code) == (2, 7)


def test_sudden_death_comes_before_words() -> None:
    failures = [
        Failure(rank=0, exit_code=1, traceback=trace("RuntimeError: lost 1"), when=1),
        Failure(rank=1, exit_code=-11),
    ]
    error = failed(failures, num_processes=2)
    assert str(error).startswith("Process 1 of 2 was killed by SIGSEGV.\n")
    assert error.exit_code == 139


def test_a_printed_traceback_is_not_repeated_and_the_log_is_named() -> None:
    failure = Failure(rank=0, exit_code=1, traceback=trace("ValueError: deep", depth=50), log="/logs/0/stderr.log")
    lines = str(failed([failure], num_processes=1, is_printed=True)).splitlines()
    assert lines[1:] == ["ValueError: deep", "Its output is in /logs/0/stderr.log."]


def test_an_error_without_frames_is_given_too() -> None:
    failures = [
        Failure(rank=0, exit_code=1, traceback=trace("ValueError: first\nIn step 3."), when=1),
        Failure(rank=1, exit_code=1, traceback="FileNotFoundError: [Errno 2] train.py\n", when=2),
    ]
    lines = str(failed(failures, num_processes=2, is_printed=True)).splitlines()
    assert lines[1:3] == ["ValueError: first", "In step 3."]
    assert lines[3] == "After that, process 1 raised FileNotFoundError: [Errno 2] train.py."


def test_messages_that_follow_are_cut_short() -> None:
    failures = [
        Failure(rank=0, exit_code=3),
        Failure(rank=1, exit_code=1, traceback=trace("RuntimeError: " + "long " * 100), when=1),
    ]
    assert len(str(failed(failures, num_processes=2)).splitlines()[1]) < 250
