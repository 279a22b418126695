"""Names are those of the author's modules, whatever wraps them."""

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from trainer_lib.modules.names import canonical_name


def test_wrappers_leave_the_names_alone() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    names = [name for name, _ in plain.named_parameters()]
    plain[1] = torch.compile(checkpoint_wrapper(plain[1]), backend="eager")
    assert [canonical_name(name) for name, _ in torch.compile(plain, backend="eager").named_parameters()] == names
