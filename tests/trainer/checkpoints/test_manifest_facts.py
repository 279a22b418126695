"""The facts about a run in a checkpoint's manifest, which need no other file."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.tasks import arguments, points, trainer
from trainer_lib import Accelerator, TrainingArguments
from trainer_lib.checkpointing.format.layout import MANIFEST_NAME
from trainer_lib.checkpointing.format.listing import checkpoints_by_run
from trainer_lib.checkpointing.format.manifest import REPORTED_FIELDS, Manifest, read_manifest, sealed
from trainer_lib.events import Callback, Run
from trainer_lib.foundation.errors import ConfigurationError, DamagedError
from trainer_lib.runs import read_run


class RequestsSave(Callback):
    """Requests a checkpoint after a step."""

    def on_step_end(self, run: Run) -> None:
        run.control.save = run.state.step == 7


def manifests(root: Path) -> dict[int, Manifest]:
    """Return the manifests under a folder, by step."""
    found_manifests = [read_manifest(path.parent) for path in root.rglob(MANIFEST_NAME)]
    return {manifest.step: manifest for manifest in sorted(found_manifests, key=lambda manifest: manifest.step)}


def test_a_manifest_holds_the_facts_of_its_run(tmp_path: Path) -> None:
    args = arguments(
        output_dir=tmp_path,
        max_steps=12,
        save_every=4,
        eval_every=5,
        log_every=3,
        keep_last=None,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=4,
        metric_for_best="loss",
        greater_is_better=True,  # so that the first evaluation is the best
    )
    result = trainer(args, eval_dataset=points(16), callbacks=[RequestsSave()]).fit()
    (folder,) = tmp_path.iterdir()
    all_manifests = manifests(tmp_path)
    reasons = {step: manifest.reasons for step, manifest in all_manifests.items()}
    assert reasons == {4: ["interval"], 5: ["best"], 7: ["asked"], 8: ["interval"], 12: ["end", "interval"]}
    assert {manifest.run_id for manifest in all_manifests.values()} == {folder.name} == {result.state.run_id}
    for step, manifest in all_manifests.items():
        assert (manifest.backwards, manifest.samples, manifest.items, manifest.epoch) == (
            2 * step,
            8 * step,
            8.0 * step,
            step / 5,
        )
        assert manifest.arguments is not None
        assert TrainingArguments.from_dict(manifest.arguments) == args
        assert manifest.world_size == 1
    assert all_manifests[5].metrics.keys() == {"eval_loss"}
    assert all_manifests[8].metrics == {}
    assert all_manifests[4].best is None
    assert all_manifests[12].best == {"metric": "eval_loss", "value": all_manifests[5].metrics["eval_loss"], "step": 5}


def test_the_last_checkpoint_has_the_reason_end(tmp_path: Path) -> None:
    trainer(arguments(output_dir=tmp_path, max_steps=3, save_every=2)).fit()
    assert {step: manifest.reasons for step, manifest in manifests(tmp_path).items()} == {2: ["interval"], 3: ["end"]}


def test_the_count_of_items_continues_after_a_resume(tmp_path: Path) -> None:
    for steps, resume in ((5, "never"), (8, "extend")):
        # Neither number of steps is a multiple of log_every.
        trainer(arguments(output_dir=tmp_path, max_steps=steps, log_every=4, save_every=1, resume=resume)).fit()
    assert {step: manifest.items for step, manifest in manifests(tmp_path).items()} == {6: 48.0, 7: 56.0, 8: 64.0}


def test_a_custom_loop_registers_its_own_facts(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    accelerator.save_state(tmp_path / "silent")
    silent = read_manifest(tmp_path / "silent")
    assert (silent.run_id, silent.step, silent.backwards, silent.reasons) == (None, 1, 1, [])
    handle = accelerator.register_state_facts(
        lambda: {"run_id": "third", "samples": 7, "metrics": {"f1": float("nan")}}
    )
    accelerator.save_state(tmp_path / "telling")
    manifest = read_manifest(tmp_path / "telling")
    assert (manifest.run_id, manifest.samples, str(manifest.metrics["f1"])) == ("third", 7, "nan")
    handle.remove()
    accelerator.save_state(tmp_path / "silent again")
    assert read_manifest(tmp_path / "silent again").run_id is None


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (lambda: {"sampels": 7}, "Unknown fact 'sampels'.*Did you mean 'samples'"),
        (lambda: {"samples": "7"}, "samples is '7'"),
        (lambda: {"arguments": {"lr": torch.ones(1)}}, "arguments contains tensors or arrays: lr"),
        (lambda: {"arguments": {"lr": object()}}, r"arguments\['lr'\] is a builtins.object"),
    ],
)
def test_facts_that_a_manifest_cannot_hold_are_refused(
    tmp_path: Path, facts: Callable[[], dict[str, Any]], words: str
) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.register_state_facts(facts)
    with pytest.raises(ConfigurationError, match=words):
        accelerator.save_state(tmp_path / "state")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigurationError, match="register_state_facts takes a function"):
        accelerator.register_state_facts("samples")  # type: ignore[arg-type]


def older(folder: Path) -> None:
    """Rewrite a checkpoint in the format from before manifests held facts about runs."""
    content = json.loads((folder / MANIFEST_NAME).read_text())
    for name in ("backwards", *(name for name in REPORTED_FIELDS if name != "step"), "digest"):
        del content[name]
    (folder / MANIFEST_NAME).write_bytes(sealed({**content, "schema": 2}))


def test_checkpoints_of_the_older_format_are_listed_and_resumed(tmp_path: Path) -> None:
    whole = trainer(arguments(output_dir=tmp_path / "whole", max_steps=10), eval_dataset=points(8)).fit()
    trainer(arguments(output_dir=tmp_path, max_steps=5), eval_dataset=points(8)).fit()
    (folder,) = tmp_path.glob("*/checkpoints/checkpoint-00000005")
    older(folder)
    ((state,),) = checkpoints_by_run(folder)
    assert (state.step, state.run_id, state.best_step, state.metrics.keys()) == (5, folder.parts[-3], 5, {"eval_loss"})
    args = arguments(max_steps=10, schedule_steps=10, resume=str(folder))
    result = trainer(args, eval_dataset=points(8)).fit()
    assert (result.state.step, result.state.samples) == (10, 80)
    assert result.metrics == pytest.approx(whole.metrics, rel=0.2)  # it began with another schedule


def test_two_runs_in_one_folder_never_mix(tmp_path: Path) -> None:
    for _ in range(2):
        trainer(arguments(output_dir=tmp_path, max_steps=4, save_every=2)).fit()
    first, other = sorted(tmp_path.iterdir())
    shutil.copytree(other / "checkpoints" / "checkpoint-00000004", first / "checkpoints" / "checkpoint-00000009")
    # Two runs in one folder are listed apart, and the newer run's checkpoint does not count as the older run's newest.
    groups = checkpoints_by_run(first)
    assert [[(state.run_id, state.step) for state in group] for group in groups] == [
        [(first.name, 2), (first.name, 4)],
        [(other.name, 4)],
    ]
    assert [group[-1].kept for group in groups] == [("newest",), ("newest",)]
    newest = read_run(first, None).newest_checkpoint()
    assert newest is not None
    assert newest.name == "checkpoint-00000004"
    result = trainer(arguments(output_dir=tmp_path, max_steps=12, save_every=2, resume=str(first))).fit()
    assert (result.state.run_id, result.state.step) == (first.name, 12)
    assert (first / "checkpoints" / "checkpoint-00000009").is_dir()  # retention deletes only checkpoints of its own run


def test_resuming_from_an_older_checkpoint_begins_a_new_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = trainer(arguments(output_dir=tmp_path, max_steps=6, save_every=2)).fit()
    (folder,) = tmp_path.iterdir()
    before = sorted(folder.rglob("*"))
    older_one = folder / "checkpoints" / "checkpoint-00000002"
    result = trainer(arguments(output_dir=tmp_path, max_steps=6, save_every=2, resume=str(older_one))).fit()
    assert "is not the newest checkpoint of its run: that run stays unchanged" in caplog.text
    assert result.state.run_id != folder.name
    assert result.state.step == 6
    assert result.history[-1]["loss"] == first.history[-1]["loss"]
    assert sorted(folder.rglob("*")) == before
    assert {manifest.run_id for manifest in manifests(tmp_path / result.state.run_id).values()} == {result.state.run_id}
    # A run whose folder was renamed keeps its name, and its checkpoints.
    moved = folder.rename(tmp_path / "moved")
    args = arguments(output_dir=tmp_path, max_steps=8, save_every=2, resume=str(moved))
    assert trainer(args).fit().state.run_id == folder.name


def test_a_manifest_with_facts_of_wrong_types_is_damaged(tmp_path: Path) -> None:
    trainer(arguments(output_dir=tmp_path, max_steps=1)).fit()
    (path,) = tmp_path.rglob(MANIFEST_NAME)
    content = json.loads(path.read_text())
    del content["digest"]
    for wrong in ({"reasons": [1]}, {"samples": "8"}, {"metrics": {"$tensor": "x"}}, {"best": 3}):
        path.write_bytes(sealed({**content, **wrong}))
        with pytest.raises(DamagedError, match=r"manifest.json is damaged"):
            read_manifest(path.parent)
