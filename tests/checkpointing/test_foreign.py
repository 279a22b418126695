"""Converting checkpoints of other libraries; `tests/data/foreign/make.py` documents how they were saved."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from tests.trainer.tasks import network, trainer
from tests.worlds import run_world
from trainer_lib import Accelerator, CheckpointError, ConfigurationError, StateError, Trainer, TrainingArguments
from trainer_lib.checkpointing.format.manifest import read_manifest
from trainer_lib.checkpointing.load.find import verify_state
from trainer_lib.checkpointing.third_party.conversion import convert
from trainer_lib.commands.main import main
from trainer_lib.foundation.errors import UnsupportedError

FOREIGN = Path(__file__).parents[1] / "data" / "foreign"
OF_TRAINER, OF_ACCELERATE = FOREIGN / "transformers", FOREIGN / "accelerate"
LOSSES: dict[str, list[float]] = json.loads((FOREIGN / "losses.json").read_text())


def changed(source: Path, folder: Path, change: Callable[[Path], Any]) -> Path:
    """Return a copy of a checkpoint to which something was done."""
    shutil.copytree(source, folder)
    change(folder)
    return folder


# -- of Hugging Face's Trainer -----------------------------------------------------------------------------------------


def language_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=40, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, pad_token_id=0
        )
    )


def texts() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(40, (40, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": torch.cat([torch.tensor([-100]), row[1:]])} for row in tokens]


def language_trainer(*, is_evaluated: bool = False, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.01,
        "weight_decay": 0.1,
        "warmup": 3,
        "lr_scheduler": "cosine",
        "shuffle": False,
        "use_cpu": True,
        "log_every": 1,
        "progress_bar": False,
    }
    data: dict[str, Any] = {"train_dataset": texts(), "eval_dataset": texts() if is_evaluated else None}
    return Trainer(language_model(), TrainingArguments(**{**defaults, **options}), **data)


def the_model(first: Trainer) -> nn.Module:
    assert isinstance(first.model, nn.Module)
    return first.model


def losses_after(result: Any, step: int) -> list[float]:
    return [entry["loss"] for entry in result.history if entry["step"] > step and "loss" in entry]


def test_a_converted_checkpoint_of_hugging_faces_trainer_resumes_equally(tmp_path: Path) -> None:
    converted = convert(OF_TRAINER, tmp_path / "converted")
    assert (converted.step, converted.epochs, converted.left_out.keys()) == (7, 1.4, {"training_args.bin", "engine"})
    manifest = verify_state(tmp_path / "converted")
    assert (manifest.step, manifest.epoch, manifest.reasons) == (7, 1.4, ["imported"])
    assert {path.suffix for path in (tmp_path / "converted").iterdir()} == {".json", ".safetensors"}
    assert (tmp_path / "converted" / "config.json").read_bytes() == (OF_TRAINER / "config.json").read_bytes()
    model_trainer = language_trainer(output_dir=tmp_path / "runs")
    result = model_trainer.fit(resume=str(tmp_path / "converted"))
    # Dropout too: the generators go on.
    assert losses_after(result, 7) == pytest.approx(LOSSES["transformers"], rel=1e-6)
    assert [entry["step"] for entry in result.history] == [2, 4, 6, 8, 9, 10]
    assert (result.state.step, result.state.epoch) == (10, 2)
    assert {checkpoint["step"] for checkpoint in result.state.checkpoints} == {10}
    assert read_manifest(Path(result.state.checkpoints[0]["path"])).origin is None


@pytest.mark.parametrize("fsdp", [False, True])
def test_two_processes_go_on_from_it(tmp_path: Path, fsdp: bool) -> None:
    convert(OF_TRAINER, tmp_path / "converted", without=("random_states",))

    def body(size: int) -> list[float]:
        model_trainer = language_trainer(gradient_accumulation_steps=2 // size, fsdp=fsdp and size > 1)
        for module in the_model(model_trainer).modules():  # what is dropped differs from process to process
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return losses_after(model_trainer.fit(resume=str(tmp_path / "converted")), 7)

    (alone,) = run_world(body, (1,), 1, timeout=60)
    assert run_world(body, (2,), 2, timeout=60) == [pytest.approx(alone, rel=1e-5)] * 2


def test_weights_in_several_files_are_read(tmp_path: Path) -> None:
    weights = load_file(OF_TRAINER / "model.safetensors")

    def split(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        names = sorted(weights)
        files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
        for file, keys in files.items():
            save_file({name: weights[name] for name in keys}, folder / file)
        index = {"metadata": {}, "weight_map": {name: file for file, keys in files.items() for name in keys}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    convert(changed(OF_TRAINER, tmp_path / "split", split), tmp_path / "converted")
    converted = load_file(tmp_path / "converted" / "model.safetensors")
    assert converted.keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in converted.items())
    assert not list((tmp_path / "converted").glob("*index.json"))


def test_its_optimizer_is_that_of_other_groups_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without weight decay there is one group here, and there it was two: states find their parameters all the same."""
    convert(OF_TRAINER, tmp_path / "converted")
    saved = torch.load(OF_TRAINER / "optimizer.pt", weights_only=True)
    model_trainer = language_trainer(weight_decay=0.0, max_steps=7)
    model_trainer.fit(resume=str(tmp_path / "converted"))
    (group,) = model_trainer.run.optimizers["default"].param_groups
    assert "several values of weight_decay (0.1, 0.0). It keeps its own: 0.0" in caplog.text
    assert group["weight_decay"] == 0.0
    assert group["lr"] == saved["param_groups"][0]["lr"]
    named = dict(the_model(model_trainer).named_parameters())
    of = {name: model_trainer.run.optimizers["default"].state[value] for name, value in named.items()}
    decayed = [name for name, value in named.items() if value.ndim > 1]
    for number, name in enumerate([*decayed, *(name for name in of if name not in decayed)]):
        for key, value in saved["state"][number].items():
            assert torch.equal(of[name][key], value), (name, key)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "sgd"}, r"imported optimizer state has .*betas.*, which this SGD does not have"),
        ({"optimizer": "rmsprop", "optimizer_kwargs": {"foreach": False}}, "this RMSprop does not have"),
        (
            {"lr_scheduler": "plateau", "is_evaluated": True},
            r"The imported schedule state has .*lr_lambdas.*--without scheduler",
        ),
    ],
)
def test_a_state_of_another_class_raises(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    convert(OF_TRAINER, tmp_path / "converted")
    with pytest.raises(StateError, match=words):
        language_trainer(**options).fit(resume=str(tmp_path / "converted"))


def test_a_model_with_other_parameters_raises(tmp_path: Path) -> None:
    def smaller(folder: Path) -> None:
        state = torch.load(folder / "optimizer.pt", weights_only=True)
        state["state"][3]["exp_avg"] = torch.ones(7)
        torch.save(state, folder / "optimizer.pt")

    convert(changed(OF_TRAINER, tmp_path / "other", smaller), tmp_path / "converted")
    with pytest.raises(StateError, match="The imported states of 16 parameters fit the shapes"):
        language_trainer().fit(resume=str(tmp_path / "converted"))
    convert(OF_TRAINER, tmp_path / "whole")
    model_trainer = language_trainer()
    next(the_model(model_trainer).parameters()).requires_grad_(False)
    with pytest.raises(StateError, match="has 16 parameters, and this AdamW has 15"):
        model_trainer.fit(resume=str(tmp_path / "whole"))


# -- of Accelerate -----------------------------------------------------------------------------------------------------


def prepared(schedule: Any = torch.optim.lr_scheduler.CosineAnnealingLR, **options: Any) -> tuple[Any, ...]:
    """Return an engine with what the script of the fixture prepared."""
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = schedule(optimizer, **(options or {"T_max": 10}))
    loader = DataLoader(TensorDataset(inputs, (inputs.sum(dim=1) > 0).long()), batch_size=8)
    return (accelerator, *accelerator.prepare(model, optimizer, loader, scheduler))


def rest(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, scheduler: Any) -> list[float]:
    """Return the losses of what is left of a pass."""
    losses: list[float] = []
    for batch, targets in loader:
        loss = cross_entropy(model(batch), targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("epochs", [None, 1.4])
def test_a_converted_checkpoint_of_accelerate_resumes_equally(
    tmp_path: Path, epochs: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    converted = convert(OF_ACCELERATE, tmp_path / "converted", epochs)
    assert ("sampler" in converted.left_out) == (epochs is None)
    accelerator, model, optimizer, loader, scheduler = prepared()
    accelerator.load_state(tmp_path / "converted")
    assert ("has no sampler: the prepared one keeps its state (the position in the data" in caplog.text) == (
        epochs is None
    )
    assert "engine" not in caplog.text
    if epochs is None:
        loader = accelerator.skip_first_batches(loader, 2)
    losses = rest(accelerator, model, optimizer, loader, scheduler)
    assert losses == pytest.approx(LOSSES["accelerate"], rel=1e-6)
    assert len(losses) == 3
    saved = torch.load(OF_ACCELERATE / "optimizer.bin", weights_only=True)["param_groups"][0]
    (group,) = optimizer.param_groups
    assert {name: group[name] for name in ("betas", "initial_lr")} == {"betas": saved["betas"], "initial_lr": 0.05}


def test_generators_stand_where_they_stood(tmp_path: Path) -> None:
    import random

    import numpy as np

    convert(OF_ACCELERATE, tmp_path / "converted")
    accelerator, *_ = prepared()
    accelerator.load_state(tmp_path / "converted")
    drawn = random.random(), float(np.random.rand()), float(torch.rand(1))
    state = torch.load(OF_ACCELERATE / "random_states_0.pkl", weights_only=False)  # ours, made by the script
    random.setstate(state["random_state"])
    np.random.set_state(state["numpy_random_seed"])
    torch.set_rng_state(state["torch_manual_seed"])
    assert drawn == (random.random(), float(np.random.rand()), float(torch.rand(1)))


def as_of_two(folder: Path) -> None:
    """Make a checkpoint that of two processes with DDP, of two models, with a scaler and a registered object."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({f"module.{name}": value for name, value in tensors.items()}, folder / "pytorch_model.bin")
    torch.save({"module.weight": torch.ones(2, 3)}, folder / "pytorch_model_1.bin")
    shutil.copy(folder / "random_states_0.pkl", folder / "random_states_1.pkl")
    torch.save({"seen": 7}, folder / "custom_checkpoint_0.pkl")
    torch.save({"scale": 1024.0}, folder / "scaler.pt")


def test_all_that_accelerate_may_save_is_read(tmp_path: Path) -> None:
    converted = convert(changed(OF_ACCELERATE, tmp_path / "two", as_of_two), tmp_path / "converted", epochs=2.0)
    assert (converted.custom, converted.scaler, len(converted.generators)) == ([{"seen": 7}], {"scale": 1024.0}, 2)
    assert "steps a schedule 2 times per update" in converted.left_out["the unit of schedules"]
    manifest = verify_state(tmp_path / "converted")
    parts = ["optimizer", "scheduler", "model", "model_1", "scaler", "sampler", "custom_checkpoint", "random_states"]
    assert (manifest.world_size, manifest.parts) == (2, parts)
    weights = load_file(OF_ACCELERATE / "model.safetensors")
    assert load_file(tmp_path / "converted" / "model.safetensors").keys() == weights.keys()
    assert list(load_file(tmp_path / "converted" / "model_1.safetensors")) == ["weight"]


def test_another_schedule_raises_unless_it_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    convert(OF_ACCELERATE, tmp_path / "converted")
    accelerator, *_ = prepared(torch.optim.lr_scheduler.StepLR, step_size=2)
    with pytest.raises(StateError, match=r"The imported schedule state has T_max.*--without scheduler"):
        accelerator.load_state(tmp_path / "converted")
    convert(OF_ACCELERATE, tmp_path / "without", without=("scheduler",))
    accelerator.load_state(tmp_path / "without")
    assert "has no scheduler: the prepared one keeps its state (as requested)" in caplog.text


# -- what is refused ---------------------------------------------------------------------------------------------------


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def with_payload(name: str, marker: Path, way: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        if name == "pytorch_model.bin":
            (folder / "model.safetensors").unlink()
        content = {"state": {}, "param_groups": [Payload(marker)]}
        if way == "pickle":
            (folder / name).write_bytes(pickle.dumps(content, protocol=2))
        else:
            torch.save(content, folder / name, _use_new_zipfile_serialization=way == "zip")

    return change


@pytest.mark.parametrize("way", ["zip", "legacy", "pickle"])
@pytest.mark.parametrize(
    ("source", "name"),
    [
        (OF_TRAINER, "optimizer.pt"),
        (OF_TRAINER, "scheduler.pt"),
        (OF_TRAINER, "pytorch_model.bin"),
        (OF_ACCELERATE, "optimizer.bin"),
        (OF_ACCELERATE, "custom_checkpoint_0.pkl"),
        (OF_ACCELERATE, "scaler.pt"),
    ],
)
def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path, source: Path, name: str, way: str) -> None:
    folder = changed(source, tmp_path / "foreign", with_payload(name, tmp_path / "ran", way))
    with pytest.raises(CheckpointError, match=rf"{name}"):
        convert(folder, tmp_path / "converted")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foreign"]


@pytest.mark.parametrize(("source", "name"), [(OF_TRAINER, "rng_state.pth"), (OF_ACCELERATE, "random_states_0.pkl")])
def test_generators_that_would_run_code_are_left_out(tmp_path: Path, source: Path, name: str) -> None:
    folder = changed(source, tmp_path / "foreign", with_payload(name, tmp_path / "ran", "zip"))
    converted = convert(folder, tmp_path / "converted")
    assert "is refused, and no code in it was run" in converted.left_out["random_states"]
    assert "mkdir" in converted.left_out["random_states"]
    assert "random_states" not in verify_state(tmp_path / "converted").parts
    assert not (tmp_path / "ran").exists()


def truncate(name: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-500])


def index_outside(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (truncate("optimizer.pt"), CheckpointError, r"optimizer.pt cannot be read"),
        (truncate("model.safetensors"), CheckpointError, r"model.safetensors cannot be read as safetensors"),
        (lambda folder: (folder / "model.safetensors").unlink(), CheckpointError, "has no whole weights"),
        (
            lambda folder: (folder / "trainer_state.json").write_text("{}"),
            CheckpointError,
            "cannot be read as the state of a training",
        ),
        (
            lambda folder: (folder / "trainer_state.json").write_text("[["),
            CheckpointError,
            "cannot be read as the state of a training",
        ),
        (
            lambda folder: (folder / "pytorch_model_fsdp_0_rank1.bin").touch(),
            UnsupportedError,
            r"FSDP with LOCAL_STATE_DICT \(pytorch_model_fsdp_0_rank1.bin\)",
        ),
        (
            lambda folder: (folder / "global_step7").mkdir(),
            UnsupportedError,
            "checkpoint zero-to-fp32 .*foreign TARGET",
        ),
        (index_outside, CheckpointError, r"\.\./model.safetensors"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    tmp_path: Path, change: Callable[[Path], Any], kind: type[Exception], words: str
) -> None:
    folder = changed(OF_TRAINER, tmp_path / "foreign", change)
    with pytest.raises(kind, match=words):
        convert(folder, tmp_path / "converted")
    assert not list(tmp_path.glob("converted*"))


def test_a_trainer_refuses_what_accelerate_saved(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="written by Accelerate, which records neither the steps nor the epo"):
        trainer().fit(resume=OF_ACCELERATE)
    convert(OF_ACCELERATE, tmp_path / "converted")
    with pytest.raises(CheckpointError, match=r"has 0 registered objects, and this Accelerator has 1"):
        trainer(model=network()).fit(resume=str(tmp_path / "converted"))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "convert", str(OF_ACCELERATE), str(tmp_path / "one"), "--epochs", "1.4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["library"], report["epochs"]) == ("Accelerate", 1.4)
    assert main(["checkpoint", "convert", str(OF_TRAINER), str(tmp_path / "two"), "--without", "optimizer"]) == 0
    assert "  without optimizer: as requested" in capsys.readouterr().out
    assert main(["checkpoint", "inspect", str(tmp_path / "two")]) == 0
    assert "imported from Hugging Face's Trainer" in capsys.readouterr().out
    for code, arguments, words in (
        (2, [OF_TRAINER, tmp_path / "two"], "exists already"),
        (
            1,
            [tmp_path / "nowhere", tmp_path / "three"],
            "is not a checkpoint of Hugging Face's Trainer or of Accelerate",
        ),
        (2, [OF_TRAINER, tmp_path / "three", "--epochs", "-1"], "-1 must be 0 or more"),
        (2, [OF_TRAINER, tmp_path / "three", "--without", "all"], "invalid choice"),
        (2, [OF_TRAINER, "memory://bucket/three"], "is a URL. Convert to a folder on this machine"),
    ):
        assert main(["checkpoint", "convert", *map(str, arguments)]) == code, arguments
        assert words in capsys.readouterr().err
