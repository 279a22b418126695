"""Quantized optimizer states are saved without conversion, and a name in a file imports no other class."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.worlds import run_world
from trainer_lib import CheckpointError, Trainer, TrainingArguments
from trainer_lib.checkpointing.format.state_codec import Encoded, decode, encode

pytestmark = pytest.mark.filterwarnings("ignore")  # torchao's own, as it is imported


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 2))


def fitted(folder: Path, name: str, steps: int, resume: Any = "never") -> tuple[list[Tensor], list[str]]:
    import torchao.optim

    torch.compiler.set_stance("force_eager")  # compiling takes longer than the test
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 64, generator=generator)
    model = network()
    args = TrainingArguments(
        output_dir=folder, max_steps=steps, schedule_steps=8, save_every="2 steps", per_device_train_batch_size=8,
        use_cpu=True, progress_bar=False, resume=resume,
    )  # fmt: skip
    optimizer = getattr(torchao.optim, name)(model.parameters(), lr=1e-2)
    trainer = Trainer(
        model, args, train_dataset=(inputs, (inputs[:, 0] > 0).long()), optimizer=optimizer,
        loss_fn=nn.functional.cross_entropy,
    )  # fmt: skip
    trainer.fit()
    kinds = {type(value).__name__ for state in optimizer.state.values() for value in state.values()}
    return [parameter.detach().clone() for parameter in model.parameters()], sorted(kinds)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("AdamW8bit", "OptimState8bit"), ("AdamW4bit", "OptimState4bit")])
@pytest.mark.parametrize("processes", [1, 2])
def test_resumed_runs_are_bitwise_the_uninterrupted_one(name: str, kind: str, processes: int, tmp_path: Path) -> None:
    def body() -> None:
        expected, kinds = fitted(tmp_path / "whole", name, 8)
        assert kind in kinds
        fitted(tmp_path / "parts", name, 4)
        resumed, _ = fitted(tmp_path / "parts", name, 8, resume="extend")
        for weight, other in zip(resumed, expected, strict=True):
            assert torch.equal(weight, other)

    run_world(body, (), processes, timeout=120)


def test_a_quantized_state_comes_back_as_it_was() -> None:
    from torchao.optim.subclass_8bit import OptimState8bit

    state: Any = OptimState8bit.zeros((4, 256))
    state.copy_(torch.linspace(-1, 1, 1024).reshape(4, 256))
    encoded = encode({"exp_avg": state})
    assert sorted(encoded.tensors) == ["exp_avg.codes", "exp_avg.qmap", "exp_avg.scale"]
    back = decode(encoded)["exp_avg"]
    assert type(back) is OptimState8bit
    assert torch.equal(back.dequantize(), state.dequantize())
    assert (back.signed, back.block_size, back.dtype) == (state.signed, state.block_size, state.dtype)


@pytest.mark.parametrize("name", ["subprocess.Popen", "torchao.utils.unwrap_tensor_subclass", "os"])
def test_no_other_class_is_imported_for_a_name_in_a_file(name: str) -> None:
    tree = {"$quantized": name, "parts": {}, "context": [], "size": [1], "stride": [1]}
    with pytest.raises(CheckpointError, match="which this version does not know"):
        decode(Encoded({"value": tree}))
