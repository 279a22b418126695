"""Quantized optimizer states are saved without conversion, and a name in a file imports no other class."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.worlds import run_world
from trainer_lib import Accelerator, CheckpointError, FullyShardedDataParallelPlugin, Trainer, TrainingArguments
from trainer_lib.checkpointing.format.state_codec import Encoded, decode, encode
from trainer_lib.tensor_files.quantized_states import QuantizedState

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


def _sharded(name: str, folder: Path, form: str, rows: int = 64) -> Any:
    """Return a step of a training under FSDP, its accelerator, and the states of its optimizer as floats."""
    import torchao.optim

    torch.compiler.set_stance("force_eager")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, rows))
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(state_dict_type=form))
    optimizer = getattr(torchao.optim, name)(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step(number: int) -> list[Tensor]:
        inputs = torch.randn(12, 128, generator=torch.Generator().manual_seed(number))
        mine = inputs.chunk(accelerator.num_processes)[accelerator.process_index]
        accelerator.backward(model(mine).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        return [weight.full_tensor().detach().clone() for weight in model.parameters()]

    def states() -> list[Tensor]:
        values = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, DTensor)]
        floats = [local.dequantize() if hasattr(local := value.to_local(), "dequantize") else local for value in values]
        return [
            DTensor.from_local(local, value.device_mesh, value.placements).full_tensor()
            for local, value in zip(floats, values, strict=True)
        ]

    return SimpleNamespace(accelerator=accelerator, step=step, states=states, folder=folder)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_sharded_states_are_saved_and_loaded_without_conversion(name: str, form: str, tmp_path: Path) -> None:
    def body() -> None:
        first = _sharded(name, tmp_path, form)
        for number in range(3):
            first.step(number)
        first.accelerator.save_state(tmp_path / "state")
        saved, expected = first.states(), [first.step(number) for number in range(3, 6)]
        first.accelerator.free_memory()
        second = _sharded(name, tmp_path, form)
        second.accelerator.load_state(tmp_path / "state")
        assert all(map(torch.equal, second.states(), saved))
        for number, weights in zip(range(3, 6), expected, strict=True):
            assert all(map(torch.equal, second.step(number), weights))

    run_world(body, (), 2, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_sharded_states_load_on_another_number_of_ranks(form: str, tmp_path: Path) -> None:
    def save() -> list[Tensor]:
        training = _sharded("AdamW8bit", tmp_path, form)
        for number in range(3):
            training.step(number)
        training.accelerator.save_state(tmp_path / "state")
        return training.states()

    def load() -> list[Tensor]:
        training = _sharded("AdamW8bit", tmp_path, form)
        training.accelerator.load_state(tmp_path / "state")
        return training.states()

    saved = run_world(save, (), 2, timeout=120)[0]
    for processes in (1, 4):
        loaded = run_world(load, (), processes, timeout=120)[0]
        assert len(loaded) == len(saved) == 8
        assert all(map(torch.equal, loaded, saved)), processes


@pytest.mark.parametrize(
    ("processes", "message"),
    [
        (
            2,
            "The blocks of a state of the shape (66, 128) do not fit into shards of (33, 128).",
        ),
        (4, "a weight of (66, 128) is not split by rows into 4 equal shards"),
    ],
)
def test_states_that_cannot_be_split_are_refused(processes: int, message: str, tmp_path: Path) -> None:
    def save() -> None:
        training = _sharded("AdamW8bit", tmp_path, "FULL_STATE_DICT", rows=66)
        training.step(0)
        training.accelerator.save_state(tmp_path / "state")

    def load() -> str:
        training = _sharded("AdamW8bit", tmp_path, "FULL_STATE_DICT", rows=66)
        with pytest.raises(CheckpointError) as refused:
            training.accelerator.load_state(tmp_path / "state")
        return str(refused.value)

    run_world(save, (), 1, timeout=120)
    for refused in run_world(load, (), processes, timeout=120):
        assert message in refused


def test_a_state_of_another_shape_is_refused() -> None:
    from torchao.optim.subclass_8bit import OptimState8bit

    state = QuantizedState.of(OptimState8bit.zeros((4, 256)))
    with pytest.raises(CheckpointError, match=r"has the shape \(4, 256\) instead of \(8, 128\)"):
        state.split_like(torch.empty(8, 128), lambda parts: None)


def test_a_state_without_torchao_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchao.optim.subclass_8bit import OptimState8bit

    encoded = encode({"exp_avg": OptimState8bit.zeros((4, 256))})
    monkeypatch.setitem(sys.modules, "torchao.optim.subclass_8bit", None)
    with pytest.raises(CheckpointError, match=r"is a torchao.optim.subclass_8bit.OptimState8bit: install torchao"):
        decode(encoded)


def test_states_whose_shards_differ_in_size_are_refused(tmp_path: Path) -> None:
    def body() -> str:
        training = _sharded("AdamW8bit", tmp_path, "SHARDED_STATE_DICT", rows=65)
        training.step(0)
        with pytest.raises(CheckpointError) as refused:
            training.accelerator.save_state(tmp_path / "state")
        return str(refused.value)

    for message in run_world(body, (), 2, timeout=120):
        assert "a weight of (65, 128) is not split by rows into 2 equal shards" in message


def test_a_run_whose_states_cannot_be_saved_ends_at_its_first_update(tmp_path: Path) -> None:
    def body() -> str:
        import torchao.optim

        torch.compiler.set_stance("force_eager")
        model = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 65))
        args = TrainingArguments(
            output_dir=tmp_path, max_steps=9, save_every="9 steps", use_cpu=True, progress_bar=False, fsdp=True
        )
        trainer = Trainer(
            model, args, train_dataset=(torch.ones(16, 128), torch.ones(16, 65)), loss_fn=nn.functional.mse_loss,
            optimizer=torchao.optim.AdamW8bit(model.parameters()),
        )  # fmt: skip
        with pytest.raises(CheckpointError) as refused:
            trainer.fit()
        assert trainer.state.step == 0
        return str(refused.value)

    for message in run_world(body, (), 2, timeout=120):
        assert "is not split by rows into 2 equal shards, so checkpoints cannot hold it" in message
