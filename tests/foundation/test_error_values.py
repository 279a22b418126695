"""Values formatted for error messages."""

import numpy as np
import pytest
import torch
from torch import nn

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, unknown
from trainer_lib.options.base import check_count


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("auto", "'auto'"),
        (1e-5, "1e-05"),
        (None, "None"),
        (int, "<class 'int'>"),
        ([1, 2, 3], "[1, 2, 3]"),
        ({"b": 1, "a": (2,)}, "{'b': 1, 'a': (2,)}"),
        (torch.tensor([1.0]), "tensor([1.])"),
        ((torch.zeros(16, 4), np.zeros(16)), "(<Tensor of shape (16, 4)>, <ndarray of shape (16,)>)"),
        (nn.Sequential(*[nn.Linear(4, 4)] * 9), "<Sequential>"),
        (list(range(1000)), "[0, 1, 2, 3, 4, 5, 6, 7, ...]"),
        (torch.utils.data.DataLoader([0]), "<DataLoader>"),  # type: ignore[arg-type]
        (Broken(), "<Broken>"),
    ],
)
def test_a_value_is_shown_on_one_short_line(value: object, text: str) -> None:
    assert shown(value) == text or (isinstance(value, Broken) and shown(value).startswith("<Broken"))


@pytest.mark.parametrize("value", ["x" * 5000, [["y" * 300] * 50] * 50, {str(n): "z" * 99 for n in range(99)}])
def test_a_long_value_is_cut(value: object) -> None:
    assert len(shown(value)) <= 120
    assert "\n" not in shown(value)
    with pytest.raises(ConfigurationError) as caught:
        check_count("seed", value)
    assert len(str(caught.value)) < 200
    assert len(unknown("tracker", value, ["a", "b"])) < 200
