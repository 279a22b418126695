"""States of sharded models: resumed bit by bit, resharded on load, and gathered on request."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.accelerator import toy
from tests.faults.injuries import killed_after
from tests.strategies.sharded import Stack, Tied, stack
from tests.worlds import run_world
from trainer_lib import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    PreparationError,
    StateError,
    UnsupportedError,
    load_checkpoint_in_model,
)
from trainer_lib.checkpointing.load.find import open_state
from trainer_lib.foundation.tensors.pytree import map_tensors
from trainer_lib.launchers import ProcessFailedError, run_forked

for module in ("torch.distributed.fsdp", "torch.distributed.tensor"):
    import_module(module)  # here, so that not each forked process imports it

FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"


def engine(kind: str | None, replicas: int = 1, parts: int | None = None) -> Accelerator:
    """Return an engine that shards (and writes whole states or shards), or one that replicates."""
    if kind is None:
        return Accelerator(cpu=True)
    return Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(state_dict_type=kind, transformer_cls_names_to_wrap=["Block"]),
        parallelism_config=None if parts is None else ParallelismConfig(replicas, parts),
    )


def run(
    accelerator: Accelerator,
    steps: int,
    save: dict[int, Path] | None = None,
    load: Path | None = None,
    model: Callable[[], nn.Module] = Stack,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
) -> dict[str, Any]:
    """Train up to a step; return the losses and the whole states at the end."""
    inputs, targets, _ = toy.data()
    network = stack(model)
    network, prepared = accelerator.prepare(network, optimizer(network.parameters()))
    loader = accelerator.prepare(DataLoader(TensorDataset(inputs, targets), batch_size=4, shuffle=True))
    if load is not None:
        accelerator.load_state(load)
    losses: list[float] = []
    done = accelerator.window.backwards
    while done < steps:
        for batch, wanted in loader:
            loss = toy.losses(network, batch, wanted).mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(network.parameters(), 1.0)
            prepared.step()
            prepared.zero_grad()
            losses.append(loss.item())
            done += 1
            if save and done in save:
                accelerator.save_state(save[done])
            if done == steps:
                break
    state = accelerator.strategy.model_state(network)
    moments = accelerator.strategy.optimizer_state(prepared.optimizer, [network]).get("state", {})
    return {"losses": losses, "state": state, "moments": moments}


def assert_same(first: Any, second: Any) -> None:
    """Raise unless the whole states (which the main process has) are the same."""
    assert first["losses"] == second["losses"][-len(first["losses"]) :]
    assert set(first["state"]) == set(second["state"])
    for name, value in first["state"].items():
        assert torch.equal(value, second["state"][name]), name
    for name, values in first["moments"].items():
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(second["moments"][name][key])), (name, key)


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        *(pytest.param(kind, model, marks=pytest.mark.slow) for kind, model in ((FULL, Tied), (SHARDED, Stack))),
        (SHARDED, Tied),
    ],
)
def test_a_sharded_training_resumes_bit_by_bit(kind: str, model: Callable[[], nn.Module], tmp_path: Path) -> None:
    def whole() -> Any:
        return run(engine(kind), 5, {2: tmp_path / "state"}, model=model)

    def resumed() -> Any:
        return run(engine(kind), 5, load=tmp_path / "state", model=model)

    runs, again = run_world(whole, timeout=60), run_world(resumed, timeout=60)
    for first, second in zip(again, runs, strict=True):
        assert len(first["losses"]) == 3
        assert_same(first, second)
    names = {path.relative_to(tmp_path / "state").as_posix() for path in (tmp_path / "state").rglob("*.safetensors")}
    if kind == SHARDED:
        shards = {
            f"{part}.shards/shard-0000{rank}-model-00001-of-00001.safetensors"
            for part in ("model", "optimizer")
            for rank in (1, 2)
        }
        assert shards <= names
    else:
        assert {"model.safetensors", "optimizer.safetensors"} <= names
        assert not any("shard-" in name for name in names)


@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        ((SHARDED, 2, 2), (SHARDED, 1, 4)),
        pytest.param((SHARDED, 1, 4), (SHARDED, 2, 2), marks=pytest.mark.slow),
        pytest.param((SHARDED, 1, 4), (FULL, 2, 2), marks=pytest.mark.slow),
        pytest.param((FULL, 2, 2), (SHARDED, 1, 4), marks=pytest.mark.slow),
        pytest.param((SHARDED, 2, 2), (None,), marks=pytest.mark.slow),
        pytest.param((None,), (SHARDED, 2, 2), marks=pytest.mark.slow),
    ],
)
def test_a_state_fits_another_mesh_and_strategy(saving: Any, loading: Any, tmp_path: Path) -> None:
    def body() -> Any:
        accelerator = engine(*saving)
        saved = run(accelerator, 2, {2: tmp_path / "state"}, model=Tied)
        saved = {"losses": [], "state": copied(saved["state"]), "moments": copied(saved["moments"])}
        accelerator.free_memory()
        return saved, run(engine(*loading), 2, load=tmp_path / "state", model=Tied)

    saved, loaded = run_world(body, num_processes=4, timeout=60)[0]
    assert_same(loaded, saved)


def copied(tree: Any) -> Any:
    return map_tensors(torch.clone, tree)


class Rows(torch.optim.Optimizer):
    """Descends by the size of gradients in each row: a state of another shape than its parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            sizes = parameter.grad.abs() if parameter.ndim < 2 else parameter.grad.abs().mean(dim=1)
            rows = self.state[parameter].setdefault("rows", torch.zeros_like(sizes))
            rows.mul_(0.5).add_(sizes)
            parameter -= 0.01 * parameter.grad / (1 + (rows if parameter.ndim < 2 else rows.unsqueeze(1)))


@pytest.mark.slow
def test_states_of_other_shapes_than_their_parameters_are_kept(tmp_path: Path) -> None:
    def body() -> Any:
        accelerator = engine(SHARDED)
        whole = run(accelerator, 4, {2: tmp_path / "state"}, optimizer=Rows)
        accelerator.free_memory()
        return whole, run(engine(SHARDED), 4, load=tmp_path / "state", optimizer=Rows)

    whole, resumed = run_world(body, timeout=60)[0]
    assert_same(resumed, whole)


def test_weights_are_read_from_shards_and_saved_whole(tmp_path: Path) -> None:
    def body() -> Any:
        accelerator = engine(SHARDED)
        result = run(accelerator, 1, {1: tmp_path / "state"}, model=Tied)
        accelerator.save_model(accelerator._models[0], tmp_path / "model", max_shard_size="1KB")
        accelerator.wait_for_everyone()
        return result["state"]

    state, nothing = run_world(body, timeout=60)
    assert nothing == {}
    for folder in ("state", "model"):
        model = Tied()
        load_checkpoint_in_model(model, tmp_path / folder, strict=True)
        for name, value in model.state_dict().items():
            assert torch.equal(value, state[name]), name


@pytest.mark.slow
def test_another_model_raises_on_all_ranks(tmp_path: Path) -> None:
    class Wider(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(10, 3, bias=False)
            self.more = nn.Parameter(torch.ones(2))

        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) * self.more.sum()

    def body() -> Any:
        accelerator = engine(SHARDED)
        run(accelerator, 1, {1: tmp_path / "state"})
        messages: list[str] = []
        for loading in (SHARDED, FULL):
            accelerator.free_memory()
            accelerator = engine(loading)
            with pytest.raises(StateError) as error:
                run(accelerator, 1, load=tmp_path / "state", model=Wider)
            messages.append(str(error.value))
        return messages

    for result in run_world(body, timeout=60):
        assert all("than this Wider: missing: more; not in this model: last.bias" in message for message in result)


def test_a_kill_inside_a_sharded_save_leaves_the_older_state(tmp_path: Path) -> None:
    def body() -> None:
        accelerator = engine(SHARDED)
        run(accelerator, 1, {1: tmp_path / "state"})
        if int(os.environ["RANK"]) == 1:
            killed_after(2)
        accelerator.save_state(tmp_path / "state")

    with pytest.raises(ProcessFailedError):
        run_world(body, timeout=60)
    assert open_state(tmp_path / "state").step == 1
    load_checkpoint_in_model(Stack(), tmp_path / "state", strict=True)


@pytest.mark.slow
def test_each_machine_has_whole_weights_only_where_the_main_process_is(tmp_path: Path) -> None:
    def body() -> Any:
        rank = os.environ["RANK"]
        os.environ["LOCAL_RANK"] = "0"  # as if on two machines
        accelerator = engine(FULL)
        accelerator.project_configuration.save_on_each_node = True
        whole = run(accelerator, 2, {1: tmp_path / rank / "state"})
        accelerator.save_model(accelerator._models[0], tmp_path / rank / "model")
        accelerator.free_memory()
        accelerator = engine(FULL)
        accelerator.project_configuration.save_on_each_node = True
        resumed = run(accelerator, 2, load=tmp_path / rank / "state")
        accelerator.free_memory()
        accelerator = engine(SHARDED)
        accelerator.project_configuration.save_on_each_node = True
        with pytest.raises(UnsupportedError, match="each machine has only some of the shards"):
            accelerator.save_state(tmp_path / rank / "other")
        return whole, resumed

    for whole, resumed in run_world(body, timeout=60):
        assert_same(resumed, whole)
    names = [{path.name for path in (tmp_path / str(rank)).rglob("*.safetensors")} for rank in (0, 1)]
    assert names[0] == {"model.safetensors", "optimizer.safetensors", "random_states_0.safetensors"}
    assert names[1] == {"random_states_1.safetensors"}


def test_an_unfinished_window_restarts_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def body() -> Any:
        accelerator = engine(SHARDED)
        network = stack(Stack)
        network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
        accelerator.gradient_accumulation_steps = 3
        inputs, targets, _ = toy.data()

        def step() -> bool:
            with accelerator.accumulate(network):
                accelerator.backward(toy.losses(network, inputs, targets).mean())
                optimizer.step()
                optimizer.zero_grad()
                return accelerator.sync_gradients

        step()
        accelerator.save_state(tmp_path / "state")
        accelerator.load_state(tmp_path / "state")
        return [step() for _ in range(3)], caplog.text

    first, second = run_forked(body, timeout=60)
    assert first[0] == second[0] == [False, False, True]
    assert "load_state restarts the window" in first[1]


@pytest.mark.parametrize("counts", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_optimizers_that_take_turns_have_no_unfinished_window(
    counts: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def body() -> Any:
        accelerator = engine(SHARDED)
        first, second = accelerator.prepare(stack(Stack), stack(Stack))
        optimizers = [accelerator.prepare(torch.optim.SGD(each.parameters(), lr=0.1)) for each in (first, second)]
        inputs, targets, _ = toy.data()

        def step() -> list[float]:
            losses: list[float] = []
            for network, optimizer in zip((first, second), optimizers, strict=True):
                with accelerator.accumulate(network) if counts else nullcontext():
                    loss = toy.losses(network, inputs, targets).mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
            return losses

        step()
        accelerator.save_state(tmp_path / "state")
        expected = step()
        accelerator.load_state(tmp_path / "state")
        assert step() == expected
        before = caplog.text
        with accelerator.no_sync(second):
            accelerator.backward(toy.losses(second, inputs, targets).mean())
        accelerator.save_state(tmp_path / "other")
        return before, caplog.text

    for before, after in run_forked(body, timeout=60)[:1]:
        assert "restarts the window" not in before
        assert "load_state restarts the window" in after


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ({"safe_serialization": False}, "which requires safetensors"),
        ({"max_shard_size": "1MB"}, "each rank writes its shards into one file"),
    ],
)
def test_options_that_shards_do_not_support_are_refused(tmp_path: Path, words: Any, complaint: str) -> None:
    def body() -> None:
        accelerator = engine(SHARDED)
        accelerator.prepare(stack(Stack))
        with pytest.raises(UnsupportedError, match=complaint):
            accelerator.save_state(tmp_path / "state", **words)

    run_world(body, num_processes=1)
    assert not (tmp_path / "state").exists()


def test_weights_are_loaded_into_the_shards_of_a_prepared_model(tmp_path: Path) -> None:
    def body() -> None:
        accelerator = engine(SHARDED)
        model = accelerator.prepare(stack(Stack))
        accelerator.save_model(model, tmp_path / "model")
        batch = toy.data()[0][:2]
        with torch.no_grad():
            expected = model(batch)
            for parameter in model.parameters():
                parameter.zero_()
        model(batch)  # gathers weights
        load_checkpoint_in_model(model, tmp_path / "model")
        with torch.no_grad():
            assert torch.equal(model(batch), expected)
        with pytest.raises(PreparationError, match=r"first.weight is sharded, and its type .* cannot be changed"):
            load_checkpoint_in_model(model, tmp_path / "model", dtype="bfloat16")
        with pytest.raises(PreparationError, match=r"first.weight is sharded. Load weights before prepare"):
            load_checkpoint_in_model(model, tmp_path / "model", device_map={"": "cpu"})

    run_world(body)
