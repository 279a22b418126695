"""Names are those of the author's modules, whatever wraps them."""

from typing import cast

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from trainer_lib.modules.weights.names import canonical_name


def compiled(module: nn.Module) -> nn.Module:
    return cast(nn.Module, torch.compile(module, backend="eager"))


def test_wrappers_leave_the_names_alone() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    names = [name for name, _ in plain.named_parameters()]
    plain[1] = compiled(checkpoint_wrapper(plain[1]))
    assert [canonical_name(name) for name, _ in compiled(plain).named_parameters()] == names
