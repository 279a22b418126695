"""Sizes in bytes."""

import pytest

from trainer_lib.foundation.sizes import convert_bytes


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KB"), (1536 * 1024, "1.5 MB"), (5 * 1024**5, "5.0 PB")],
)
def test_the_largest_unit_is_taken(size: int, text: str) -> None:
    assert convert_bytes(size) == text
