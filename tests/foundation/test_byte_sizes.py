"""Sizes in bytes."""

from typing import Any

import pytest

from trainer_lib.foundation.byte_sizes import convert_bytes, convert_file_size_to_int
from trainer_lib.foundation.errors import ConfigurationError


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KB"), (1536 * 1024, "1.5 MB"), (5 * 1024**5, "5.0 PB")],
)
def test_the_largest_unit_is_taken(size: int, text: str) -> None:
    assert convert_bytes(size) == text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (12, 12),
        ("12", 12),
        ("12B", 12),
        ("10GB", 10**10),
        ("1.5 KB", 1500),
        ("1MiB", 2**20),
        ("2TiB", 2**41),
        ("8Kb", 1000),
        ("0.5gib", 2**29),
        (1.5, 1),
        (0.9 * 2**33, 7730941132),
    ],
)
def test_sizes_as_people_write_them(text: float | str, size: int) -> None:
    assert convert_file_size_to_int(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", -1, True, "1 XB", "1e3", None, -1.5, float("inf"), float("nan")])
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(ConfigurationError, match="is not a size"):
        convert_file_size_to_int(text)
