"""Weights that are frozen when a model is prepared, and trained later."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from tests.strategies.split import VOCABULARY, WITH_VOCABULARY, Plain, Split, accelerator_for, data, model_of
from tests.worlds import run_world
from trainer_lib import Accelerator
from trainer_lib.launchers import ProcessFailedError


class _Tied(Plain):
    """A plain module whose first and last layer are one weight, with a weight without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = super().forward(input_ids, labels)
        return {**outputs, "loss": outputs["loss"] * self.scale}


def _train(accelerator: Accelerator, kind: Any) -> dict[str, Tensor]:
    model = model_of(kind)
    for name, weight in model.named_parameters():
        weight.requires_grad_("up" in name or "down" in name)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ranks, rows = accelerator.data_group, data(4)
    batch = default_collate(rows[ranks.rank * 4 // ranks.size : (ranks.rank + 1) * 4 // ranks.size])
    for _ in range(3):
        accelerator.backward(model(**batch)["loss"])
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        model.requires_grad_(True)
    return {name: tensor.detach().clone() for name, tensor in accelerator.get_state_dict(model).items()}


MESHES = {
    "fsdp": Split(sizes={}, fsdp=True),
    "fsdp_ignored": Split(sizes={}, fsdp=True, options={"ignored_modules": "norm"}),
    "pp2": Split(sizes={"pp_size": 2}),
    "tp2_dp2": Split(sizes={"tp_size": 2, "dp_replicate_size": 2}, plan=WITH_VOCABULARY),
    "pp2_dp2": Split(sizes={"pp_size": 2, "dp_replicate_size": 2}),
    "pp2_fsdp2": Split(sizes={"pp_size": 2, "dp_shard_size": 2}),
}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("mesh", MESHES)
def test_they_are_trained_as_on_one_process(mesh: str) -> None:
    case = MESHES[mesh]
    kind = Plain if case.plan else _Tied

    def train() -> dict[str, Tensor]:
        return _train(accelerator_for(case), kind)

    (expected,) = run_world(train, (), 1)
    actual, *_ = run_world(train, (), 2 * max(len(case.sizes), 1))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_ddp_refuses_to_train_them() -> None:
    with pytest.raises(
        ProcessFailedError, match=r"embed\.weight was frozen when Plain was prepared, and is trained now \(and 8 more\)"
    ):
        run_world(lambda: _train(Accelerator(cpu=True), Plain), timeout=60)
