"""The progress bar of one process."""

import pytest

from tests.worlds import run_world
from trainer_lib import ConfigurationError
from trainer_lib.progress import tqdm
from trainer_lib.state import PartialState


def test_one_bar_a_machine() -> None:
    def body() -> list[bool]:
        PartialState()
        bars = [tqdm([1, 2]), tqdm([1, 2], main_process_only=False), tqdm(total=2, disable=True)]
        hidden = [bar.disable for bar in bars]
        assert list(bars[0]) == [1, 2]
        return hidden

    assert run_world(body, timeout=60) == [[False, False, True], [True, False, True]]


def test_the_old_first_argument_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Give main_process_only by name: main_process_only=True"):
        tqdm(True, [1, 2])
