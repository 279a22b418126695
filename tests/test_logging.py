"""Loggers that know of the other processes."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.worlds import run_world
from trainer_lib import ConfigurationError, get_logger
from trainer_lib import logging as our_logging
from trainer_lib.foundation.environment import patch_environment
from trainer_lib.logging import MultiProcessAdapter
from trainer_lib.state import PartialState, is_initialized


@pytest.fixture(autouse=True)
def nothing_was_said_yet() -> Iterator[None]:
    our_logging._said_once.clear()
    yield
    logging.getLogger("ours").setLevel(logging.NOTSET)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [record.getMessage() for record in caplog.records if record.name == "ours"]
    caplog.clear()
    return texts


def said_by_each(body: Callable[[MultiProcessAdapter], None], size: int = 2) -> list[list[str]]:
    """Return what each process logs."""

    def run() -> list[str]:
        PartialState()
        messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("ours").addHandler(handler)
        body(get_logger("ours", log_level="INFO"))
        return messages

    return run_world(run, num_processes=size, timeout=60)


def test_the_main_process_logs_unless_all_are_asked_to() -> None:
    def body(logger: MultiProcessAdapter) -> None:
        rank = PartialState().process_index
        logger.info("once %d", 1)
        logger.warning("rank %d", rank, main_process_only=False)
        logger.debug("below the level", main_process_only=False)
        logger.log(logging.INFO, "by number")

    assert said_by_each(body) == [["once 1", "rank 0", "by number"], ["rank 1"]]


def test_all_log_in_order(tmp_path: Path) -> None:
    path = tmp_path / "said"

    def body(logger: MultiProcessAdapter) -> None:
        handler = logging.FileHandler(path)
        logger.logger.addHandler(handler)
        for turn in range(3):
            logger.info("turn %d rank %d", turn, PartialState().process_index, in_order=True)

    said_by_each(body, size=4)
    assert path.read_text().splitlines() == [f"turn {turn} rank {rank}" for turn in range(3) for rank in range(4)]


def test_in_order_needs_no_equal_levels() -> None:
    def body(logger: MultiProcessAdapter) -> None:
        if not PartialState().is_main_process:
            logger.setLevel(logging.ERROR)
        logger.info("only the first hears this", in_order=True)

    assert said_by_each(body) == [["only the first hears this"], []]


def test_after_the_world_is_left_each_goes_on_by_its_rank() -> None:
    def body(logger: MultiProcessAdapter) -> None:
        PartialState().destroy_process_group()
        logger.info("main")
        logger.info("all", in_order=True)

    assert said_by_each(body) == [["main", "all"], ["all"]]


def test_before_the_world_forms_the_launchers_variables_count(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("ours", log_level="INFO")
    logger.info("alone")
    assert messages(caplog) == ["alone"]
    with patch_environment(rank="1", world_size="2"):
        logger.info("not this one")
        logger.info("all", main_process_only=False)
        logger.info("all", in_order=True)
        assert messages(caplog) == ["all", "all"]
    with patch_environment(rank="0", world_size="2"):
        logger.info("the first")
        assert messages(caplog) == ["the first"]
    assert not is_initialized(), "to log makes no state"
    assert not dist.is_initialized(), "and forms no world"


def test_a_group_of_the_script_counts_too(caplog: pytest.LogCaptureFixture) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with patch_environment(rank="1", world_size="2"):
        get_logger("ours", log_level="INFO").info("rank 0 of the group")
    assert messages(caplog) == ["rank 0 of the group"]


def test_senseless_variables_are_no_reason_not_to_log(caplog: pytest.LogCaptureFixture) -> None:
    with patch_environment(rank="x"):
        get_logger("ours", log_level="INFO").info("still here")
    assert messages(caplog) == ["still here"]


def test_an_adapter_around_a_logger_names_its_caller(caplog: pytest.LogCaptureFixture) -> None:
    class Wrapped(logging.LoggerAdapter[Any]):
        def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
            self.logger.log(level, msg, *args, stacklevel=3, **kwargs)

    Wrapped(get_logger("ours", log_level="INFO"), {}).info("a")
    assert [record.funcName for record in caplog.records] == ["test_an_adapter_around_a_logger_names_its_caller"]


def test_the_callers_line_shows(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("ours", log_level="INFO")

    def wrapper() -> None:
        logger.info("of the caller's caller", stacklevel=3)

    logger.info("a")
    logger.log(logging.INFO, "b")
    logger.info("c", in_order=True)
    logger.warning_once("d")
    wrapper()
    try:
        raise KeyError("e")
    except KeyError:
        logger.exception("e")
    assert {(record.filename, record.funcName) for record in caplog.records} == {
        ("test_logging.py", "test_the_callers_line_shows")
    }
    assert caplog.records[-1].exc_info is not None


def test_a_warning_comes_once_for_each_text_and_arguments(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        get_logger("ours").warning_once("slow: %s", "disk")
        get_logger("ours").warning_once("slow: %s", "network")
        get_logger("ours").warning_once("fast", main_process_only=False)
    assert messages(caplog) == ["slow: disk", "slow: network", "fast"]


def test_extra_fields_of_the_call_and_of_the_adapter(caplog: pytest.LogCaptureFixture) -> None:
    MultiProcessAdapter(logging.getLogger("ours"), {"run": "7"}).error("x", extra={"step": 3})
    get_logger("ours").error("y", extra={"step": 4})
    assert [(getattr(r, "run", None), getattr(r, "step", None)) for r in caplog.records] == [("7", 3), (None, 4)]


def test_levels_come_from_the_call_or_the_launcher() -> None:
    assert get_logger("ours").logger.level == logging.NOTSET
    with patch_environment(accelerate_log_level="debug"):
        assert get_logger("ours").logger.level == logging.DEBUG
        assert get_logger("ours", log_level="ERROR").logger.level == logging.ERROR
    with pytest.raises(ConfigurationError, match=r"Unknown log level 'INFOO'. Known: .* Did you mean 'INFO'?"):
        get_logger("ours", log_level="INFOO")
