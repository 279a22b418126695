"""State on disk by the engine's verbs: what is in a folder, hooks, names, and everything that does not fit."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from xxhash import xxh3_128_hexdigest

from tests.accelerator import toy
from tests.accelerator.training import Counting
from tests.worlds import run_world
from trainer_lib import (
    Accelerator,
    CheckpointError,
    ConfigurationError,
    ProjectConfiguration,
    StateError,
    load_checkpoint_in_model,
)
from trainer_lib.checkpointing.format.layout import partial_beside, replaced_beside
from trainer_lib.checkpointing.format.manifest import CHECKSUM, read_manifest, sealed
from trainer_lib.modules.weights.state_dicts import module_state


def engine(**options: Any) -> Accelerator:
    return Accelerator(cpu=True, **options)


def trained(accelerator: Accelerator, steps: int = 1, model: nn.Module | None = None) -> tuple[Any, Any]:
    """Return a model and its optimizer after some updates."""
    model = toy.model() if model is None else model
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    train(accelerator, model, optimizer, steps)
    return model, optimizer


def train(accelerator: Accelerator, model: Any, optimizer: Any, steps: int = 1) -> None:
    inputs, targets, _ = toy.data()
    for _ in range(steps):
        accelerator.backward(toy.losses(model, inputs, targets).mean())
        optimizer.step()
        optimizer.zero_grad()


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# -- what is there ---------------------------------------------------------------------------------------------------


def test_the_folder_holds_safetensors_and_json_and_is_listed_in_its_manifest(tmp_path: Path) -> None:
    accelerator = engine(mixed_precision="fp16")
    model, optimizer = trained(accelerator, 2)
    loader = accelerator.prepare(DataLoader(list(range(6))))  # type: ignore[arg-type]
    schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 5))
    accelerator.register_for_checkpointing(Counting())
    folder = Path(accelerator.save_state(tmp_path / "state"))
    assert folder == tmp_path / "state"
    names = {
        "model.safetensors",
        "optimizer.json",
        "optimizer.safetensors",
        "scheduler.json",
        "scaler.json",
        "sampler.process_0.json",
        "custom_checkpoint_0.json",
        "engine.process_0.json",
        "random_states_0.json",
        "random_states_0.safetensors",
    }
    assert names_in(folder) == names | {"manifest.json"}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["files"] == {
        name: {"size": (folder / name).stat().st_size, "xxh3_128": xxh3_128_hexdigest((folder / name).read_bytes())}
        for name in names
    }
    assert (manifest["world_size"], manifest["step"], manifest["iteration"]) == (1, 2, None)
    assert manifest["precision"] == "fp16"
    assert manifest["versions"]["torch"] == torch.__version__
    assert names_in(tmp_path) == {f"state/{name}" for name in names_in(folder)}
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    assert all(torch.equal(value, weights[name]) for name, value in toy_state(model).items())
    assert (len(loader), schedule.get_last_lr()) == (6, [0.1])


def toy_state(model: nn.Module) -> dict[str, Any]:
    return {name: value.clone() for name, value in module_state(model).items()}


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_state_loaded_in_the_same_process_takes_everything_back(precision: str, tmp_path: Path) -> None:
    accelerator = engine(mixed_precision=precision)
    model, optimizer = trained(accelerator, 2)
    before = toy_state(model)
    folder = accelerator.save_state(tmp_path / "state")
    train(accelerator, model, optimizer, 2)
    after = toy_state(model)
    accelerator.backward(model(torch.ones(3, 8)).sum())  # gradients of another time
    accelerator.load_state(folder)
    assert all(torch.equal(value, before[name]) for name, value in toy_state(model).items())
    train(accelerator, model, optimizer, 2)
    assert all(torch.equal(value, after[name]) for name, value in toy_state(model).items())


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells which files are in memory")
def test_nothing_goes_on_to_live_in_the_files(tmp_path: Path) -> None:
    accelerator = engine()
    model, _ = trained(accelerator)
    folder = accelerator.save_state(tmp_path / "state")
    accelerator.load_state(folder)
    loaded = toy.model().to("meta")
    load_checkpoint_in_model(loaded, folder)
    assert torch.equal(loaded.get_parameter("0.bias"), model.get_parameter("0.bias"))
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_two_models_and_optimizers_have_files_of_their_own(tmp_path: Path) -> None:
    accelerator = engine()
    pairs = [trained(accelerator, steps) for steps in (1, 3)]
    before = [toy_state(model) for model, _ in pairs]
    folder = Path(accelerator.save_state(tmp_path / "state"))
    assert {"model.safetensors", "model_1.safetensors", "optimizer_1.safetensors"} <= names_in(folder)
    for model, optimizer in pairs:
        train(accelerator, model, optimizer)
    after = [toy_state(model) for model, _ in pairs]
    accelerator.load_state(folder)
    assert_same(pairs, before)
    for model, optimizer in pairs:
        train(accelerator, model, optimizer)
    assert_same(pairs, after)


def assert_same(pairs: list[tuple[Any, Any]], states: list[dict[str, Any]]) -> None:
    for (model, _), state in zip(pairs, states, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in toy_state(model).items())


def test_large_models_are_sharded_and_read_back(tmp_path: Path) -> None:
    accelerator = engine()
    model, _ = trained(accelerator)
    before = toy_state(model)
    folder = Path(accelerator.save_state(tmp_path / "state", max_shard_size="300B"))
    assert {"model-00001-of-00002.safetensors", "model.safetensors.index.json"} <= names_in(folder)
    toy_zero(model)
    accelerator.load_state(folder)
    assert all(torch.equal(value, before[name]) for name, value in toy_state(model).items())


def toy_zero(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def test_states_of_compiled_and_plain_models_fit_each_other(tmp_path: Path) -> None:
    def compiled_inside() -> nn.Module:
        first, *others = toy.model()
        return nn.Sequential(torch.compile(first, backend="eager"), *others)  # type: ignore[arg-type]

    kinds: list[Callable[[], Any]] = [
        toy.model,
        compiled_inside,
        lambda: torch.compile(toy.model(), backend="eager"),
    ]
    for build in kinds:
        accelerator = engine()
        model, _ = trained(accelerator, 0, build())  # to step would compile, which takes seconds
        before = toy_state(model)
        assert list(before) == list(accelerator.get_state_dict(model)) == list(toy.model().state_dict())
        folder = accelerator.save_state(tmp_path / "state")
        for other in kinds:
            accelerator.free_memory()
            accelerator = engine()
            model, _ = trained(accelerator, 0, other())
            toy_zero(model)
            accelerator.load_state(folder)
            assert all(torch.equal(value, before[name]) for name, value in toy_state(model).items())
        accelerator.free_memory()


def test_extra_state_of_modules_goes_along(tmp_path: Path) -> None:
    class Remembering(nn.Linear):
        seen: tuple[int, torch.Tensor]

        def get_extra_state(self) -> Any:
            return {"seen": self.seen}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["seen"]

    accelerator = engine()
    model = accelerator.prepare(Remembering(2, 2))
    model.seen = (1, torch.ones(2))
    folder = Path(accelerator.save_state(tmp_path / "state"))
    assert "model.extra.json" in names_in(folder)
    model.seen = 0, torch.zeros(2)
    accelerator.load_state(folder)
    number, tensor = model.seen
    assert (number, tensor.tolist()) == (1, [1, 1])


# -- hooks -----------------------------------------------------------------------------------------------------------


class Pretrained(nn.Module):
    """A model that can write itself, as those of diffusers and transformers can."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = toy.model()

    def forward(self, inputs: Tensor) -> Any:
        return self.layers(inputs)

    def save_pretrained(self, folder: str) -> None:
        torch.save(self.state_dict(), Path(folder, "mine.pt"))


def test_hooks_write_and_load_models_in_their_own_way(tmp_path: Path) -> None:
    accelerator = engine()
    (first, _), (second, _) = trained(accelerator), trained(accelerator)
    seen: list[Any] = []

    def save(models: list[nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
        seen.append((models, [list(state) for state in weights]))
        Path(output_dir, "unet").mkdir()
        torch.save(weights.pop(0), Path(output_dir, "unet", "weights.pt"))

    def load(models: list[nn.Module], input_dir: str) -> None:
        model = models.pop(0)
        model.load_state_dict(torch.load(Path(input_dir, "unet", "weights.pt")))

    saving = accelerator.register_save_state_pre_hook(save)
    before = [toy_state(model) for model in (first, second)]
    folder = Path(accelerator.save_state(tmp_path / "state"))
    assert seen == [([first, second], [list(toy.model().state_dict())] * 2)]
    assert {"unet/weights.pt", "model_1.safetensors"} <= names_in(folder)
    assert "unet/weights.pt" in json.loads((folder / "manifest.json").read_text())["files"]
    assert "model.safetensors" not in names_in(folder)
    with pytest.raises(CheckpointError, match="has no weights of model: a save hook removed them"):
        accelerator.load_state(folder)
    for model in (first, second):
        toy_zero(model)
    accelerator.register_load_state_pre_hook(load)
    accelerator.load_state(folder)
    assert_same([(first, None), (second, None)], before)
    saving.remove()
    assert "model.safetensors" in names_in(Path(accelerator.save_state(tmp_path / "other")))


def test_a_hook_may_hand_in_other_weights(tmp_path: Path) -> None:
    accelerator = engine()
    trained(accelerator)

    def halve(models: Any, weights: list[dict[str, Any]], output_dir: str) -> None:
        weights[0] = {name: value.half() for name, value in weights[0].items()}

    accelerator.register_save_state_pre_hook(halve)
    folder = Path(accelerator.save_state(tmp_path / "state"))
    assert safetensors.torch.load_file(folder / "model.safetensors")["0.weight"].dtype is torch.float16


def test_a_hook_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    accelerator = engine()
    trained(accelerator)

    def fail(*arguments: Any) -> None:
        raise KeyError("the hook")

    accelerator.register_save_state_pre_hook(fail)
    with pytest.raises(KeyError, match="the hook"):
        accelerator.save_state(tmp_path / "state")
    assert list(tmp_path.iterdir()) == []


# -- one folder in the place of another ------------------------------------------------------------------------------


def test_a_newer_state_replaces_one_of_the_same_name_and_leaves_foreign_files(tmp_path: Path) -> None:
    accelerator = engine()
    model, optimizer = trained(accelerator)
    folder = tmp_path / "state"
    (folder / "notes").mkdir(parents=True)
    (folder / "notes" / "why.txt").write_text("before")
    accelerator.save_state(folder, max_shard_size="300B")
    (folder / "tokenizer.json").write_text("{}")
    train(accelerator, model, optimizer)
    before = toy_state(model)
    accelerator.save_state(folder)
    # What others put there stays; the first state's shards, which are listed in its manifest, are gone.
    assert {"notes/why.txt", "tokenizer.json", "model.safetensors"} <= names_in(folder)
    assert not any("-of-" in name for name in names_in(folder))
    assert (folder / "notes" / "why.txt").read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    toy_zero(model)
    accelerator.load_state(folder)
    assert all(torch.equal(value, before[name]) for name, value in toy_state(model).items())


def test_a_fact_of_zeros_is_read_as_it_was_written(tmp_path: Path) -> None:
    accelerator = engine()
    trained(accelerator)
    accelerator.register_state_facts(lambda: {"arguments": {"trace": "0" * 32, "seed": 10**32}})
    accelerator.save_state(tmp_path)
    assert read_manifest(tmp_path).arguments == {"trace": "0" * 32, "seed": 10**32}


def test_folders_that_are_added_do_not_damage_a_checkpoint(tmp_path: Path) -> None:
    accelerator = engine()
    trained(accelerator)
    accelerator.save_state(tmp_path)
    for name in ("model/config.json", "model/model.safetensors", "scheduler/scheduler_config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    accelerator.load_state(tmp_path)
    (tmp_path / "model.shards").mkdir()
    (tmp_path / "model.shards" / "shard.safetensors").write_text("{}")
    with pytest.raises(CheckpointError, match=r"model\.shards/shard\.safetensors is not in its manifest"):
        accelerator.load_state(tmp_path)


def test_a_link_that_a_hook_makes_at_each_save_stays(tmp_path: Path) -> None:
    accelerator = engine()
    trained(accelerator)
    (tmp_path / "data").mkdir()
    accelerator.register_save_state_pre_hook(lambda *given: (Path(given[2]) / "data").symlink_to(tmp_path / "data"))
    for _ in range(2):
        accelerator.save_state(tmp_path / "state")
    assert (tmp_path / "state" / "data").is_symlink()


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    accelerator = engine()
    trained(accelerator)
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    accelerator.save_state(tmp_path / "link" / "state")
    accelerator.load_state(tmp_path / "link" / "state")
    assert (tmp_path / "disk" / "state" / "manifest.json").is_file()


@pytest.mark.parametrize("value", [".", "..", "~"])
def test_the_working_directory_is_never_replaced(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigurationError, match="is the working directory or above it"):
        engine().save_state(value)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="is a file, and a checkpoint is a folder"):
        engine().save_state("file")


# -- names and numbers -----------------------------------------------------------------------------------------------


def numbered(folder: Path, **options: Any) -> Accelerator:
    configuration = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, **options)
    return engine(project_config=configuration)


def states_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_states_name_themselves_and_the_newest_is_loaded(tmp_path: Path) -> None:
    accelerator = numbered(tmp_path)
    model, optimizer = trained(accelerator)
    with pytest.raises(CheckpointError, match=r"There is no checkpoint to load yet in .*checkpoints. Call save_state"):
        accelerator.load_state()
    folder = ""
    for _ in range(11):
        folder = accelerator.save_state()
        train(accelerator, model, optimizer)
    assert Path(folder) == tmp_path / "checkpoints" / "checkpoint_10"
    assert accelerator.save_iteration == 11
    newest = safetensors.torch.load_file(f"{folder}/model.safetensors")
    accelerator.load_state()
    assert all(torch.equal(value, newest[name]) for name, value in toy_state(model).items())


def test_loading_restores_the_numbering(tmp_path: Path) -> None:
    accelerator = numbered(tmp_path)
    trained(accelerator)
    first = accelerator.save_state()
    accelerator.save_state()
    accelerator.free_memory()
    accelerator = numbered(tmp_path)
    trained(accelerator)
    with pytest.raises(ConfigurationError, match=r"checkpoint_0 exists already, from another run. Call load_state\(\)"):
        accelerator.save_state()
    accelerator.load_state()
    assert accelerator.save_state().endswith("checkpoint_2")
    # An older one: the newer ones stay, and the next one is newer still.
    accelerator.load_state(first)
    assert accelerator.save_state().endswith("checkpoint_3")
    accelerator.free_memory()
    other = numbered(tmp_path / "other")
    trained(other)
    other.load_state(first)
    assert other.save_iteration == 1


def test_the_oldest_go_once_the_newest_is_there(tmp_path: Path) -> None:
    accelerator = numbered(tmp_path, total_limit=2, iteration=8)
    trained(accelerator)
    for _ in range(4):
        accelerator.save_state()
    assert states_in(tmp_path) == ["checkpoint_10", "checkpoint_11"]
    (tmp_path / "checkpoints" / "checkpoint_7.partial").mkdir()
    (tmp_path / "checkpoints" / "checkpoint_6.deleted").mkdir()
    (tmp_path / "checkpoints" / "mine.partial").mkdir()
    accelerator.save_state(tmp_path / "checkpoints" / "best")
    accelerator.register_save_state_pre_hook(lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        accelerator.save_state()
    assert {"checkpoint_10", "checkpoint_11"} <= set(states_in(tmp_path))
    accelerator.checkpoints.save_hooks.clear()
    accelerator.save_state()
    assert states_in(tmp_path) == ["best", "checkpoint_11", "checkpoint_12", "mine.partial"]


def test_a_folder_that_cannot_be_deleted_does_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = numbered(tmp_path, total_limit=1)
    trained(accelerator)
    accelerator.save_state()

    def refuse(*arguments: Any, **options: Any) -> None:
        raise PermissionError(1, "not permitted")

    rename = Path.rename
    monkeypatch.setattr(
        Path, "rename", lambda path, new: refuse() if path.name == "checkpoint_0" else rename(path, new)
    )
    accelerator.save_state()
    assert "could not be deleted" in caplog.text
    assert states_in(tmp_path) == ["checkpoint_0", "checkpoint_1"]


def test_a_folder_has_to_be_given_without_automatic_naming(tmp_path: Path) -> None:
    accelerator = engine(project_dir=tmp_path)
    assert (accelerator.project_dir, accelerator.logging_dir) == (tmp_path, tmp_path)
    with pytest.raises(
        ConfigurationError, match=r"save_state\(\) needs a folder. Call save_state\(folder\), or give Acc"
    ):
        accelerator.save_state()
    with pytest.raises(ConfigurationError, match=r"load_state\(\) needs a folder"):
        accelerator.load_state()


def test_another_project_can_be_set(tmp_path: Path) -> None:
    accelerator = engine(project_dir=tmp_path / "first", log_with="jsonl")
    trained(accelerator)
    accelerator.project_configuration = ProjectConfiguration(
        project_dir=tmp_path / "second", automatic_checkpoint_naming=True, total_limit=1, iteration=4
    )
    assert (accelerator.project_dir, accelerator.save_iteration) == (tmp_path / "second", 4)
    for _ in range(2):
        accelerator.save_state()
    assert states_in(tmp_path / "second") == ["checkpoint_5"]
    accelerator.init_trackers("digits")
    accelerator.log({"loss": 0.5}, step=1)
    accelerator.end_training()
    assert not (tmp_path / "first").exists()
    assert sorted(path.name for path in (tmp_path / "second").iterdir()) == ["checkpoints", "digits.jsonl"]
    with pytest.raises(ConfigurationError, match=r"which is not set. Give project_dir"):
        accelerator.project_configuration = ProjectConfiguration(automatic_checkpoint_naming=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"total_limit": 2}, "total_limit=2 needs automatic_checkpoint_naming=True"),
        ({"total_limit": 0, "automatic_checkpoint_naming": True}, "total_limit must be a whole number of at least 1"),
        ({"iteration": -1}, "iteration must be a whole number of at least 0"),
        ({"save_on_each_node": "yes"}, "save_on_each_node must be True or False"),
        ({"automatic_checkpoint_naming": 1}, "automatic_checkpoint_naming must be True or False"),
    ],
)
def test_a_project_that_cannot_be_meant(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        ProjectConfiguration(project_dir="x", **options)


def test_two_ways_to_say_where_have_to_agree(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="contradict each other"):
        engine(project_dir="a", project_config=ProjectConfiguration(project_dir="b"))
    with pytest.raises(ConfigurationError, match=r"which is not set. Give project_dir"):
        engine(project_config=ProjectConfiguration(automatic_checkpoint_naming=True))
    with pytest.raises(ConfigurationError, match="must be a ProjectConfiguration, got a str"):
        engine(project_config="here")
    made = engine(project_dir="a", project_config=ProjectConfiguration(logging_dir="logs", iteration=3))
    assert (made.project_dir, made.logging_dir, made.save_iteration) == ("a", "logs", 3)


# -- what does not fit -----------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return the folder of a state of the toy; what saved it is gone."""
    accelerator = numbered(tmp_path)
    trained(accelerator)
    folder = Path(accelerator.save_state())
    accelerator.free_memory()
    return folder


def test_a_state_of_another_model_names_what_differs_and_changes_nothing(saved: Path) -> None:
    accelerator = engine()
    model, optimizer = trained(
        accelerator, model=nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3), nn.PReLU())
    )
    before = toy_state(model)
    with pytest.raises(
        StateError, match=r"another model than this Sequential: missing: 3.weight; other shapes: 0.bias"
    ):
        accelerator.load_state(saved)
    assert all(torch.equal(value, before[name]) for name, value in toy_state(model).items())
    assert accelerator.save_iteration == 0
    assert optimizer.state


def test_without_strict_names_may_differ(saved: Path) -> None:
    accelerator = engine()
    model = nn.Sequential(*toy.model(), nn.PReLU())
    model = accelerator.prepare(model)
    accelerator.prepare(torch.optim.AdamW(model[:3].parameters(), lr=0.1))
    with pytest.raises(StateError, match=r"missing: 3.weight"):
        accelerator.load_state(saved)
    accelerator.load_state(saved, strict=False, map_location="on_device")
    assert torch.equal(model[0].bias, safetensors.torch.load_file(saved / "model.safetensors")["0.bias"])


def test_a_state_of_another_number_of_things_is_told(saved: Path) -> None:
    accelerator = engine()
    model = accelerator.prepare(toy.model())
    with pytest.raises(CheckpointError, match=r"has 1 optimizers, and this Accelerator has 0. Make and prepare"):
        accelerator.load_state(saved)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    accelerator.register_for_checkpointing(Counting())
    with pytest.raises(CheckpointError, match=r"has 0 registered objects, and this .* has 1. Make and register_for_ch"):
        accelerator.load_state(saved)
    accelerator._custom_objects.clear()
    accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 2))
    with pytest.raises(CheckpointError, match="has 0 schedulers, and this Accelerator has 1"):
        accelerator.load_state(saved)


def test_a_state_of_another_optimizer_is_told(saved: Path) -> None:
    accelerator = engine()
    model = toy.model()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    accelerator.prepare(model, torch.optim.AdamW(groups))
    with pytest.raises(StateError, match="has 1 parameter groups, and this AdamW has 2"):
        accelerator.load_state(saved)


def test_a_state_of_another_class_is_told_before_anything_is_loaded(saved: Path) -> None:
    accelerator = engine()
    model = accelerator.prepare(toy.model())
    accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    before = toy_state(model)
    with pytest.raises(
        CheckpointError, match=r"has the state of AdamW as optimizer, and optimizer is now SGD.* Prepare Ad"
    ):
        accelerator.load_state(saved)
    assert all(torch.equal(value, before[name]) for name, value in toy_state(model).items())


def test_a_state_of_another_schedule_is_told(tmp_path: Path) -> None:
    def with_schedule(kind: Any) -> Accelerator:
        accelerator = engine()
        model = toy.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accelerator.prepare(model, optimizer, kind(optimizer, 3))
        return accelerator

    accelerator = with_schedule(torch.optim.lr_scheduler.StepLR)
    folder = accelerator.save_state(tmp_path / "state")
    accelerator.free_memory()
    with_schedule(torch.optim.lr_scheduler.StepLR).load_state(folder)
    accelerator.free_memory()
    other = with_schedule(torch.optim.lr_scheduler.CosineAnnealingLR)
    with pytest.raises(
        CheckpointError, match="the state of StepLR as scheduler, and scheduler is now CosineAnnealingLR"
    ):
        other.load_state(folder)


def test_another_precision_is_told(saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = engine(mixed_precision="fp16")
    trained(accelerator)
    with caplog.at_level(logging.WARNING):
        accelerator.load_state(saved)
        assert "has no scaler: the prepared one keeps its state" in caplog.text
        folder = accelerator.save_state(tmp_path / "fp16")
        accelerator.free_memory()
        accelerator = engine(mixed_precision="no")
        trained(accelerator)
        accelerator.load_state(folder)
    assert "has a scaler, and no prepared object to load it into" in caplog.text


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "has no manifest.json: .* its save was interrupted"),
        (lambda folder: (folder / "model.safetensors").unlink(), "is damaged: model.safetensors is missing"),
        (
            lambda folder: (folder / "optimizer.json").write_text("{}"),
            r"is damaged: optimizer.json has 2 bytes instead of \d+",
        ),
        (
            lambda folder: (folder / "manifest.json").write_text('{"format'),
            "manifest.json is not the manifest of a checkpoint",
        ),
        (lambda folder: edit(folder, schema=99), "has format 99, and this version .* reads formats up to 3"),
        (lambda folder: edit(folder, format="other"), "is not the manifest of a checkpoint: it has another format"),
        (
            lambda folder: edit(folder, files={"../../x": {"size": 1, "xxh3_128": ""}}),
            "names '../../x', which leads out of",
        ),
        (lambda folder: edit(folder, files={"model.safetensors": {}}), "manifest.json is damaged"),
        (
            lambda folder: edit(folder, files={"model.safetensors": {"size": "1", CHECKSUM: ""}}),
            "sizes must be numbers",
        ),
        (lambda folder: edit(folder, files={"model.safetensors": {"size": 1}}), "manifest.json is damaged"),
        (lambda folder: edit(folder, more=1), "manifest.json is damaged"),
        (lambda folder: edit(folder, kinds=["AdamW"]), r"manifest.json is damaged: kinds is \['AdamW'\]"),
        (lambda folder: edit(folder, world_size="2"), r"manifest.json is damaged: world_size is '2'"),
        (lambda folder: edit(folder, parts=[["model"]]), r"manifest.json is damaged: \['model'\] is not a string"),
        (lambda folder: edit(folder, files=["model"]), r"manifest.json is damaged: files is \['model'\]"),
        (lambda folder: edit(folder, files={"model": 1}), r"manifest.json is damaged"),
        (
            lambda folder: flip_header(folder / "optimizer.safetensors"),
            r"is damaged: optimizer.safetensors has the checksum \w{32} instead of \w{32}",
        ),
    ],
)
def test_a_damaged_folder_is_told(saved: Path, spoil: Callable[[Path], None], words: str) -> None:
    spoil(saved)
    accelerator = engine()
    trained(accelerator)
    with pytest.raises(CheckpointError, match=words):
        accelerator.load_state(saved)


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "manifest.json"
    path.write_bytes(sealed(json.loads(path.read_text()) | changes))


def flip_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[9] ^= 0xFF
    path.write_bytes(content)


def test_a_damaged_state_is_not_replaced_blindly(saved: Path) -> None:
    (saved / "manifest.json").write_text("{")
    accelerator = engine()
    trained(accelerator)
    with pytest.raises(
        CheckpointError, match=r"is not the manifest of a checkpoint.* Move the folder away, or save under another"
    ):
        accelerator.save_state(saved)


def test_a_path_that_is_not_there_is_answered_with_what_is(saved: Path) -> None:
    accelerator = engine()
    shutil.copytree(saved, saved.with_name("best"))
    with pytest.raises(
        CheckpointError, match=r"no checkpoint .*besst.*there are: best, checkpoint_0. Did you mean 'best'\?"
    ):
        accelerator.load_state(saved.with_name("besst"))
    with pytest.raises(CheckpointError, match="The newest is 'checkpoint_0'"):
        accelerator.load_state(saved.with_name("checkpoint_7"))
    with pytest.raises(
        CheckpointError, match=r"is a folder of checkpoints, not a checkpoint. The newest in it is .*checkpoint_0"
    ):
        accelerator.load_state(saved.parent)
    with pytest.raises(
        CheckpointError, match=r"is a folder of checkpoints, not a checkpoint. The newest in it is .*checkpoint_0"
    ):
        accelerator.load_state(saved.parent.parent)
    with pytest.raises(CheckpointError, match="There is no checkpoint /nowhere/at/all"):
        accelerator.load_state("/nowhere/at/all")
    with pytest.raises(CheckpointError, match="is a file, and a checkpoint is a folder"):
        accelerator.load_state(saved / "manifest.json")
    (saved / "manifest.json").unlink()
    (saved / "random_states_0.pkl").touch()  # a name of Accelerate
    with pytest.raises(CheckpointError, match="has 1 models, and this Accelerator has 0"):
        accelerator.load_state(saved)


def test_an_older_state_beside_its_place_is_found(saved: Path) -> None:
    accelerator = numbered(saved.parent.parent)
    trained(accelerator)
    saved.rename(replaced_beside(saved))
    partial_beside(saved).mkdir()
    accelerator.load_state()
    assert accelerator.save_iteration == 1
    accelerator.load_state(saved)
    # What is no whole state does not take its place: it goes when there is a newer one.
    saved.mkdir()
    (saved / "notes").touch()
    accelerator.load_state(saved)
    accelerator.save_state(saved)
    assert names_in(saved.parent) == {f"checkpoint_0/{name}" for name in names_in(saved)}
    assert "notes" in names_in(saved)


def test_what_a_killed_save_left_beside_is_replaced(saved: Path) -> None:
    accelerator = numbered(saved.parent.parent)
    trained(accelerator)
    shutil.copytree(saved, replaced_beside(saved))  # killed after the renames, before the older state was deleted
    accelerator.save_state(saved)
    assert names_in(saved.parent) == {f"checkpoint_0/{name}" for name in names_in(saved)}


# -- pickles, on the user's word only --------------------------------------------------------------------------------


class Stubborn(Counting):
    """An object whose state is more than plain values."""

    def state_dict(self) -> Any:
        return {"stack": [ValueError("x")]}


def test_objects_that_need_a_pickle_need_the_word_twice(tmp_path: Path) -> None:
    accelerator = engine()
    trained(accelerator)
    accelerator.register_for_checkpointing(Stubborn())
    with pytest.raises(CheckpointError, match=r"custom_checkpoint_0\['stack.0'\] is a builtins.ValueError"):
        accelerator.save_state(tmp_path / "state")
    assert list(tmp_path.iterdir()) == []
    folder = accelerator.save_state(tmp_path / "state", allow_pickle=True)
    with pytest.raises(CheckpointError, match=r"custom_checkpoint_0\['stack.0'\] was pickled when it was saved"):
        accelerator.load_state(folder)
    accelerator.load_state(folder, allow_pickle=True)


def test_pickled_weights_need_the_word_again_in_another_process(tmp_path: Path) -> None:
    accelerator = engine()
    model, _ = trained(accelerator)
    before = toy_state(model)
    folder = Path(accelerator.save_state(tmp_path / "state", safe_serialization=False))
    assert {"pytorch_model.bin"} == {name for name in names_in(folder) if "model" in name}

    def load_elsewhere() -> str:
        accelerator = engine()
        trained(accelerator)
        with pytest.raises(CheckpointError) as raised:
            accelerator.load_state(folder)
        accelerator.load_state(folder, safe_serialization=False)
        return str(raised.value)

    words = "were saved with safe_serialization=False, as a pickle. Call load_state(…, safe_serialization=False)"
    assert words in run_world(load_elsewhere, num_processes=1)[0]
    toy_zero(model)
    accelerator.load_state(folder)
    assert all(torch.equal(value, before[name]) for name, value in toy_state(model).items())


def test_the_word_for_pickled_weights_is_for_their_folder_alone(tmp_path: Path) -> None:
    accelerator = engine()
    trained(accelerator)
    folder = Path(accelerator.save_state(tmp_path / "state", safe_serialization=False))
    shutil.copytree(folder, tmp_path / "copy")
    with pytest.raises(CheckpointError, match=r"saved with safe_serialization=False, as a pickle. Call load_state"):
        accelerator.load_state(tmp_path / "copy")
    accelerator.save_state(folder)
    shutil.copytree(tmp_path / "copy", folder, dirs_exist_ok=True)  # of another process, in its place
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"saved with safe_serialization=False, as a pickle. Call load_state"):
        accelerator.load_state(folder)


def test_what_cannot_be_registered() -> None:
    accelerator = engine()
    with pytest.raises(
        ConfigurationError, match=r"lack state_dict or load_state_dict: int \(argument 1\), list \(argument 2\)"
    ):
        accelerator.register_for_checkpointing(Counting(), 3, [])
    assert accelerator._custom_objects == []
    with pytest.raises(ConfigurationError, match=r"hook takes a function of \(models, weights, output_dir\) \(got 3\)"):
        accelerator.register_save_state_pre_hook(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"hook takes a function of \(models, input_dir\) \(got 'hook'\)"):
        accelerator.register_load_state_pre_hook("hook")  # type: ignore[arg-type]


def test_arguments_that_nobody_knows(tmp_path: Path) -> None:
    accelerator = engine()
    with pytest.raises(ConfigurationError, match=r"argument of save_state 'max_shard_sise'.*mean 'max_shard_size'"):
        accelerator.save_state(tmp_path / "state", max_shard_sise=3)
    with pytest.raises(ConfigurationError, match="'much' is not a size"):
        accelerator.save_state(tmp_path / "state", max_shard_size="much")
    with pytest.raises(ConfigurationError, match=r"A checkpoint folder must be a path \(got 3\)"):
        accelerator.save_state(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"A checkpoint folder must be a path \(got 3\)"):
        accelerator.load_state(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="Unknown argument of load_state 'assign'"):
        accelerator.load_state(tmp_path, assign=True)
    with pytest.raises(ConfigurationError, match=r"Unknown map_location 'gpu'"):
        accelerator.load_state(tmp_path, map_location="gpu")
    with pytest.raises(ConfigurationError, match=r"are options of torch.load, which load_state does not use"):
        accelerator.load_state(tmp_path, {"weights_only": False})


def test_a_state_between_clipping_and_step_cannot_be_taken(tmp_path: Path) -> None:
    accelerator = engine()
    model, _ = trained(accelerator)
    accelerator.backward(model(torch.ones(3, 8)).sum())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(StateError, match=r"between clipping and step\(\) of AdamW"):
        accelerator.save_state(tmp_path / "state")


# -- several processes -----------------------------------------------------------------------------------------------


def test_every_process_has_generators_and_a_place_of_its_own(tmp_path: Path) -> None:
    def body() -> Any:
        accelerator = engine()
        model, _ = trained(accelerator)
        torch.manual_seed(accelerator.process_index)
        # Each process may have another name in mind; the main process's counts.
        folder = accelerator.save_state(tmp_path / f"state_{accelerator.process_index}")
        drawn = torch.rand(1).item()
        torch.manual_seed(9)
        accelerator.load_state(folder)
        again = torch.rand(1).item()
        return folder, drawn == again, drawn, list(accelerator.get_state_dict(model))

    first, second = run_world(body, timeout=60)
    assert first[0] == second[0] == str(tmp_path / "state_0")
    assert first[1]
    assert second[1]
    assert first[2] != second[2]
    assert first[3] == list(toy.model().state_dict())
    assert {"random_states_1.json", "engine.process_1.json"} <= names_in(tmp_path / "state_0")


def test_hooks_get_the_models_without_their_wrappers(tmp_path: Path) -> None:
    """As a script does that writes each model in its own format: `model.save_pretrained(…)`."""

    def body() -> Any:
        accelerator = engine()
        prepared, _ = trained(accelerator, model=Pretrained())
        wrapper = type(prepared).__name__
        model = accelerator.unwrap_model(prepared)

        def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
            for model in models:
                if accelerator.is_main_process:
                    model.save_pretrained(output_dir)
                weights.pop()

        def load(models: list[Any], input_dir: str) -> None:
            models.pop().load_state_dict(torch.load(Path(input_dir, "mine.pt")))

        accelerator.register_save_state_pre_hook(save)
        accelerator.register_load_state_pre_hook(load)
        folder = accelerator.save_state(tmp_path / "state")
        before = toy_state(model)
        toy_zero(model)
        accelerator.load_state(folder)
        return wrapper, [torch.equal(before[name], value) for name, value in toy_state(model).items()]

    assert run_world(body, timeout=60) == [("DistributedDataParallel", [True] * 4)] * 2


def test_each_machine_can_have_a_state_of_its_own(tmp_path: Path) -> None:
    def body() -> Any:
        import os

        rank = int(os.environ["RANK"])
        os.environ["LOCAL_RANK"] = "0"  # as if on two machines
        accelerator = engine(project_config=ProjectConfiguration(save_on_each_node=True))
        assert accelerator.should_save_model
        model, _ = trained(accelerator)
        folder = Path(accelerator.save_state(tmp_path / str(rank) / "state"))
        accelerator.save_model(model, tmp_path / str(rank) / "model")
        accelerator.load_state(folder)
        return names_in(folder), names_in(tmp_path / str(rank) / "model")

    for rank, (names, weights) in enumerate(run_world(body, timeout=60)):
        assert weights == {"model.safetensors"}
        assert {"model.safetensors", f"random_states_{rank}.json"} <= names
        assert f"random_states_{1 - rank}.json" not in names


def test_an_error_of_one_process_is_one_on_all_and_nothing_is_lost(tmp_path: Path) -> None:
    def body() -> Any:
        accelerator = engine()
        trained(accelerator)
        folder = accelerator.save_state(tmp_path / "state")
        counting = Counting()
        accelerator.register_for_checkpointing(counting)
        if accelerator.process_index == 1:
            counting.state_dict = lambda: 1 / 0  # type: ignore[method-assign, assignment]
        with pytest.raises((CheckpointError, ZeroDivisionError)) as error:
            accelerator.save_state(folder)
        accelerator._custom_objects.clear()
        accelerator.load_state(folder)
        return f"{error.type.__name__}: {error.value}"

    first, second = run_world(body, timeout=60)
    assert first == "CheckpointError: save_state failed on rank 1: ZeroDivisionError: division by zero"
    assert second == "ZeroDivisionError: division by zero"
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_processes_that_do_different_things_are_told(tmp_path: Path) -> None:
    def body() -> str:
        accelerator = engine()
        trained(accelerator)
        verb = accelerator.save_state if accelerator.is_main_process else accelerator.load_state
        with pytest.raises(CheckpointError) as error:
            verb(tmp_path / "state")
        return str(error.value)

    first, second = run_world(body, timeout=60)
    assert first == "Rank 0 is in save_state and rank 1 in load_state."
    assert "rank 0 in save_state" in second or "There is no checkpoint" in second
