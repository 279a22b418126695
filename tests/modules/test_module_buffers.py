"""Copies of buffers that are restored where an update is skipped."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer_lib.modules.module_buffers import Buffers


@pytest.mark.parametrize("is_skipped", [True, False])
def test_buffers_are_restored_where_the_flag_says_so(is_skipped: bool) -> None:
    layer = nn.BatchNorm1d(2)
    buffers = Buffers([layer])
    buffers.copy()
    layer(torch.ones(4, 2))
    buffers.restore_where(torch.tensor(is_skipped))
    assert (layer.running_mean == 0).all() == is_skipped


def test_a_flag_reaches_the_buffers_of_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A split model has buffers beside each of its layers; the norm of its gradients is on the first device."""
    restored: list[torch.device] = []
    # torch copies no pretended tensors of a device that it was not built for.
    monkeypatch.setattr(Tensor, "copy_", lambda _, value: restored.append(value.device))
    with FakeTensorMode():
        layers = [nn.BatchNorm1d(2, affine=False, device=torch.device("cuda", index)) for index in range(2)]
        buffers = Buffers(layers)
        buffers.copy()
        buffers.restore_where(torch.ones((), dtype=torch.bool, device="cuda:0"))
    assert restored == 3 * [torch.device("cuda", 0)] + 3 * [torch.device("cuda", 1)]
