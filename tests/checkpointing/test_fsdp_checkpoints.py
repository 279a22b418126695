"""Weights and optimizer states of sharded models in Accelerate's layout: both ways, and what is refused."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.strategies.sharded import Tied, stack
from tests.worlds import run_world
from trainer_lib import Accelerator, CheckpointError, FullyShardedDataParallelPlugin, StateError, UnsupportedError
from trainer_lib.checkpointing.third_party.torch_shards import read_shards
from trainer_lib.utils import (
    fsdp2_load_full_state_dict,
    load_fsdp_model,
    load_fsdp_optimizer,
    merge_fsdp_weights,
    save_fsdp_model,
    save_fsdp_optimizer,
)

# Written by Accelerate (tests/data/foreign/make_fsdp.py): one step of AdamW on the model below.
WRITTEN = Path(__file__).parent.parent / "data" / "foreign" / "accelerate_fsdp"
FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


def _step(model: Any, optimizer: Any) -> float:
    loss = model(torch.ones(4, 6)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _alone(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return [_step(model, optimizer) for _ in range(steps)], model.state_dict()


def _prepared(kind: str, **plugin: Any) -> tuple[Accelerator, Any, Any, Any]:
    plugin = {"transformer_cls_names_to_wrap": ["Linear"], "state_dict_type": kind, **plugin}
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**plugin))
    model: Any = _model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.3))
    return accelerator, accelerator.state.fsdp_plugin, model, optimizer


def _continued(kind: str, folder: Path, use_dcp: bool) -> list[float]:
    accelerator, plugin, model, optimizer = _prepared(kind)
    load_fsdp_model(plugin, accelerator, model, folder, use_dcp=use_dcp)
    load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder, use_dcp=use_dcp)
    return [_step(model, optimizer) for _ in range(2)]


@pytest.mark.parametrize(("kind", "use_dcp"), [(FULL, True), (SHARDED, True), (SHARDED, False)])
def test_a_training_continues_from_accelerates_files(kind: str, use_dcp: bool) -> None:
    losses, _ = _alone(3)
    for continued in run_world(_continued, (kind, WRITTEN, use_dcp)):
        assert continued == pytest.approx(losses[1:], rel=1e-6)


def _written(kind: str, folder: Path, use_dcp: bool) -> list[float]:
    accelerator, plugin, model, optimizer = _prepared(kind, ignored_modules="2")
    fsdp2_load_full_state_dict(accelerator, model, _model().state_dict() if accelerator.is_main_process else {})
    before = [_step(model, optimizer) for _ in range(2)]
    save_fsdp_model(plugin, accelerator, model, folder, model_index=1, use_dcp=use_dcp)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder, optimizer_index=1, use_dcp=use_dcp)
    after = _step(model, optimizer)
    load_fsdp_model(plugin, accelerator, model, folder, model_index=1, use_dcp=use_dcp)
    load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder, optimizer_index=1, use_dcp=use_dcp)
    return [*before, after, _step(model, optimizer)]


NAMES = {
    (FULL, True): ["optimizer_1.bin", "pytorch_model_fsdp_1.bin"],
    (SHARDED, True): ["optimizer_1", "pytorch_model_fsdp_1"],
    (SHARDED, False): [f"{stem}_1_rank{rank}.bin" for stem in ("optimizer", "pytorch_model_fsdp") for rank in (0, 1)],
}


@pytest.mark.parametrize(("kind", "use_dcp"), NAMES)
def test_what_was_written_is_read_again(kind: str, use_dcp: bool, tmp_path: Path) -> None:
    for *_, after, again in run_world(_written, (kind, tmp_path / "new", use_dcp)):
        assert after == again
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == NAMES[kind, use_dcp]


def _torch_read(folder: Path) -> dict[str, Any]:
    """Read what was written with torch's own functions."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder / "pytorch_model_fsdp_1", folder / "weights.bin")
    return torch.load(folder / "weights.bin", weights_only=True)["model"]


def test_torch_reads_the_shards(tmp_path: Path) -> None:
    run_world(_written, (SHARDED, tmp_path, True))
    read = _torch_read(tmp_path)
    _, expected = _alone(2)
    assert list(read) == list(expected)
    merge_fsdp_weights(str(tmp_path / "pytorch_model_fsdp_1"), str(tmp_path / "merged"))
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for name, value in read.items():
        torch.testing.assert_close(merged[name], value, rtol=0, atol=0)


def test_shards_of_accelerate_are_merged(tmp_path: Path) -> None:
    shutil.copytree(WRITTEN / "pytorch_model_fsdp_0", tmp_path / "pytorch_model_fsdp_0")
    merge_fsdp_weights(str(tmp_path), str(tmp_path / "whole"), safe_serialization=False, remove_checkpoint_dir=True)
    _, expected = _alone(1)
    merged = torch.load(tmp_path / "whole" / "pytorch_model.bin", weights_only=True)
    assert merged.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(merged[name], value, rtol=1e-6, atol=1e-7)
    assert [path.name for path in tmp_path.iterdir()] == ["whole"], "the shards are deleted"


def test_shards_that_python_3_13_wrote_are_merged(tmp_path: Path) -> None:
    shutil.copytree(WRITTEN / "pytorch_model_fsdp_0", tmp_path / "shards")
    metadata = tmp_path / "shards" / ".metadata"
    written = pickle.loads(metadata.read_bytes())
    written.storage_meta.checkpoint_id = Path("shards")
    content = pickle.dumps(written, protocol=2).replace(b"cpathlib\nPosixPath", b"cpathlib._local\nPosixPath")
    assert b"pathlib._local" in content
    metadata.write_bytes(content)
    for name in ("shards", str(WRITTEN / "pytorch_model_fsdp_0")):
        merge_fsdp_weights(str(tmp_path / name), str(tmp_path / Path(name).name / "merged"))
    theirs, same = (
        load_file(tmp_path / name / "merged" / "model.safetensors") for name in ("shards", "pytorch_model_fsdp_0")
    )
    assert theirs.keys() == same.keys()
    assert all(torch.equal(theirs[name], same[name]) for name in same)


def test_a_nested_state_has_its_lists_and_plain_values_again() -> None:
    state = read_shards(WRITTEN / "optimizer_0", lambda path, size, dtype: torch.empty(size, dtype=dtype), alone=True)[
        "optimizer"
    ]
    assert state["param_groups"][0]["lr"] == 0.1
    assert state["param_groups"][0]["params"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert float(state["state"]["2.bias"]["step"]) == 1.0


class _Evil:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("touched"),)


def test_no_code_in_shards_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Evil()))
    with pytest.raises(CheckpointError, match=r"is refused, and no code in it was run: .* \(pathlib.Path.touch\)"):
        merge_fsdp_weights(str(tmp_path), str(tmp_path / "merged"))
    assert not (tmp_path / "touched").exists()
    (tmp_path / ".metadata").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read|is refused"):
        merge_fsdp_weights(str(tmp_path), str(tmp_path / "merged"))


def test_shards_that_are_not_there_or_damaged_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no shards of torch.distributed.checkpoint \(no \.metadata file\)"):
        merge_fsdp_weights(str(tmp_path), str(tmp_path / "merged"))
    damaged = tmp_path / "damaged"
    shutil.copytree(WRITTEN / "pytorch_model_fsdp_0", damaged)
    (damaged / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"damaged cannot be read: .*__0_0.distcp"):
        merge_fsdp_weights(str(damaged), str(tmp_path / "merged"))


def _refused(folder: Path) -> list[str]:
    accelerator, plugin, model, _ = _prepared(FULL)
    messages: list[str] = []
    for attempt in (
        lambda: load_fsdp_model(plugin, accelerator, model, folder),
        lambda: fsdp2_load_full_state_dict(accelerator, model, {"0.weight": torch.ones(5, 6)}),
    ):
        try:
            attempt()
        except (CheckpointError, StateError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    accelerator.free_memory()
    whole = Accelerator(cpu=True)
    try:
        save_fsdp_model(plugin, whole, whole.prepare(_model()), folder)
    except UnsupportedError as error:
        messages.append(str(error))
    return messages


def test_states_that_cannot_be_loaded_are_refused_on_all_ranks(tmp_path: Path) -> None:
    for missing, unfit, unsharded in run_world(_refused, (tmp_path,)):
        assert "pytorch_model_fsdp.bin cannot be read: FileNotFoundError" in missing
        assert "missing: 0.bias" in unfit
        assert unsharded.startswith("This accelerator does not shard models")


def _adapter_alone(folder: Path, kind: str) -> tuple[list[str], bool]:
    accelerator, plugin, model, _ = _prepared(kind)
    model[0].requires_grad_(requires_grad=False)
    fsdp2_load_full_state_dict(accelerator, model, _model().state_dict())
    save_fsdp_model(plugin, accelerator, model, folder, adapter_only=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_fsdp_model(plugin, accelerator, model, folder, adapter_only=True)
    loaded = accelerator.get_state_dict(model)
    expected = _model().state_dict()
    return sorted(name for name, value in loaded.items() if torch.equal(value, expected[name])), bool(loaded)


@pytest.mark.parametrize("kind", [FULL, SHARDED])
def test_only_what_is_trained_is_written(kind: str, tmp_path: Path) -> None:
    main, other = run_world(_adapter_alone, (tmp_path, kind))
    assert main == (["2.bias", "2.weight"], True)
    assert other == ([], False)


def _tied_before_its_first_step(folder: Path) -> tuple[list[float], list[float]]:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    plugin = accelerator.state.fsdp_plugin
    assert plugin is not None
    model: Any = stack(Tied)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    save_fsdp_model(plugin, accelerator, model, folder)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    inputs = torch.ones(4, 8)

    def step() -> float:
        loss = model(inputs).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    first = [step(), step()]
    load_fsdp_model(plugin, accelerator, model, folder)
    load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    return first, [step(), step()]


def test_shared_weights_and_an_optimizer_without_a_state(tmp_path: Path) -> None:
    for first, again in run_world(_tied_before_its_first_step, (tmp_path,)):
        assert first == again
