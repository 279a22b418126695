"""Attributes and tensors are restored after a block, also after an error."""

import pytest
import torch

from trainer_lib.foundation.tensors.kept_state import attributes_kept, tensors_kept


def test_attributes_of_all_objects_are_restored_after_an_error() -> None:
    layers = [torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2).eval()]

    def change() -> None:
        with attributes_kept(layers, ["training", "momentum"]):
            for layer in layers:
                layer.training, layer.momentum = not layer.training, None
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        change()
    assert [(layer.training, layer.momentum) for layer in layers] == [(True, 0.1), (False, 0.1)]


def test_tensors_keep_their_values_and_identity() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    buffer = torch.tensor([3])

    def change() -> None:
        with tensors_kept([weight, buffer]):
            with torch.no_grad():
                weight.mul_(5)
            buffer.zero_()
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        change()
    assert weight.tolist() == [1.0, 2.0]
    assert weight.requires_grad
    assert weight.is_leaf
    assert buffer.tolist() == [3]
