"""Tests of recording and replaying the samples of an update."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from tests.callbacks.loops import folder_of
from tests.trainer.tasks import arguments, points, trainer
from tests.worlds import run_world
from trainer_lib import Accelerator, DataLoaderConfiguration
from trainer_lib.callbacks import Provenance, SampleLosses, replay_batch, samples_of_step
from trainer_lib.callbacks.sample_provenance import _decode, _encode
from trainer_lib.events import Callback, Modifier, Run
from trainer_lib.foundation.errors import ConfigurationError


class Noisy(Dataset[Any]):
    """Points that are moved at random each time."""

    def __init__(self) -> None:
        self.inputs, self.labels = points()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index] + torch.randn(6) * random.random(), self.labels[index]


class Batches(Callback):
    """Keeps the batches of each step."""

    def __init__(self) -> None:
        self.batches: dict[int, list[Any]] = {}

    def on_micro_batch_begin(self, run: Run) -> None:
        self.batches.setdefault(run.state.step + 1, []).append(run.batch)

    def all_of(self, step: int) -> tuple[Tensor, Tensor]:
        inputs, labels = zip(*self.batches[step], strict=True)
        return torch.cat(inputs), torch.cat(labels)


def test_samples_are_written_as_ranges() -> None:
    for samples in ([3, 4, 5, 9], [5, 4, 3], [], [0], [7, 7, 8]):
        assert _decode(_encode(samples)) == samples
    assert _encode([3, 4, 5, 9]) == "3-5,9"
    assert _decode(_encode(["a", 1])) == ["a", 1]


def test_samples_of_a_sampler_of_numpy_are_replayed(tmp_path: Path) -> None:
    class Permuted(Sampler[int]):
        def __len__(self) -> int:
            return 40

        def __iter__(self) -> Iterator[int]:
            return iter(np.random.default_rng(0).permutation(40))  # pyright: ignore[reportReturnType]

    kept, losses = Batches(), SampleLosses()
    dataset = TensorDataset(*points(40))
    loader = DataLoader(dataset, batch_size=8, sampler=Permuted())
    args = arguments(output_dir=tmp_path, num_train_epochs=2)
    trainer(args, train_dataset=loader, callbacks=[Provenance(), kept, losses]).fit()
    inputs, labels = replay_batch(folder_of(tmp_path), 2, dataset)
    assert torch.equal(inputs, kept.all_of(2)[0])
    assert torch.equal(labels, kept.all_of(2)[1])
    assert sorted(sample for sample, _ in losses.top(80)) == list(range(40))


def test_a_batch_is_replayed_with_its_random_numbers(tmp_path: Path) -> None:
    kept = Batches()
    args = arguments(output_dir=tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=4)
    engine = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(seed_each_sample=True))
    trainer(args, train_dataset=Noisy(), callbacks=[Provenance(), kept], accelerator=engine).fit()
    assert sorted(kept.batches) == list(range(1, 11))
    for step in (1, 3, 10):
        assert [len(batch) for batch in samples_of_step(folder_of(tmp_path), step)[0]] == [4, 4]
        torch.random.manual_seed(step)  # what is drawn does not depend on it
        inputs, labels = replay_batch(folder_of(tmp_path), step, Noisy())
        assert torch.equal(inputs, kept.all_of(step)[0])
        assert torch.equal(labels, kept.all_of(step)[1])
    with pytest.raises(ConfigurationError, match=r"step 11 are not recorded .* The recorded steps are 1 to 10"):
        replay_batch(folder_of(tmp_path), 11, Noisy())
    with pytest.raises(ConfigurationError, match=r"needs a dataset with an index \(got a generator\)"):
        replay_batch(folder_of(tmp_path), 1, (sample for sample in range(3)))


def test_samples_of_arrays_by_name_and_of_lists_are_replayed(tmp_path: Path) -> None:
    inputs, labels = points()
    named = {"inputs": inputs, "labels": labels.numpy(), "names": [f"sample {index}" for index in range(40)]}
    trainer(arguments(output_dir=tmp_path, max_steps=1), callbacks=[Provenance()]).fit()
    ((samples,),) = samples_of_step(folder_of(tmp_path), 1)
    batch = replay_batch(folder_of(tmp_path), 1, named)
    assert torch.equal(batch["inputs"], inputs[samples])
    assert torch.equal(batch["labels"], labels[samples])
    assert batch["names"] == [f"sample {index}" for index in samples]
    assert torch.equal(replay_batch(folder_of(tmp_path), 1, list(inputs)), inputs[samples])


def test_each_sample_is_written_once_over_all_processes_and_restarts(tmp_path: Path) -> None:
    def fit(**options: Any) -> None:
        args = arguments(output_dir=tmp_path, num_train_epochs=1, resume="auto", **options)
        trainer(args, callbacks=[Provenance(), *([Killed()] if "save_every" in options else [])]).fit()

    class Killed(Callback):
        may_change_training = True

        def on_step_end(self, run: Run) -> None:
            if run.state.step == 4:
                raise RuntimeError("killed")

    def fails() -> None:
        with pytest.raises(RuntimeError, match="killed"):
            fit(save_every="2 steps", per_device_train_batch_size=4)

    run_world(fails, timeout=60)
    before = [samples_of_step(folder_of(tmp_path), step) for step in (1, 2)]
    assert [len(batch) for batch in before] == [2, 2]
    assert samples_of_step(folder_of(tmp_path), 3)
    fit(per_device_train_batch_size=8)  # alone from here on
    after = [samples_of_step(folder_of(tmp_path), step) for step in range(1, 6)]
    assert after[:2] == before
    assert [len(batch) for batch in after] == [2, 2, 1, 1, 1]
    assert sorted(i for step in after for process in step for batch in process for i in batch) == list(range(40))
    inputs, labels = replay_batch(folder_of(tmp_path), 5, points())
    assert torch.equal(inputs, points()[0][after[4][0][0]])
    assert len(labels) == 8


def test_each_checkpoint_has_its_lines_and_a_rewound_run_rewrites_them(tmp_path: Path) -> None:
    def written() -> list[int]:
        (file,) = folder_of(tmp_path).glob("provenance/*")
        return [json.loads(line)["step"] for line in file.read_text().splitlines()]

    class Looks(Modifier):
        """Looks, at each save, for which updates there are lines."""

        def __init__(self) -> None:
            self.found: list[list[int]] = []

        def on_save_end(self, run: Run, folder: Path) -> None:
            self.found.append(written())

    inputs, labels = points()
    inputs[27] = float("nan")  # in step 4
    looks = Looks()
    saving: dict[str, Any] = {"output_dir": tmp_path, "save_every": 2, "save_in_background": False}
    args = arguments(num_train_epochs=1, log_every=100, shuffle=False, on_nonfinite="rewind", **saving)
    trainer(args, train_dataset=(inputs, labels), callbacks=[Provenance(), looks]).fit()
    assert looks.found == [[1, 2], [1, 2, 3], [1, 2, 3, 5]]  # in step 4 there is nothing now
    assert written() == [1, 2, 3, 5]
    epochs = [samples_of_step(folder_of(tmp_path), step)[0][0] for step in (1, 2, 3, 5)]
    assert epochs == [[*range(first, first + 8)] for first in (0, 8, 16, 32)]


def test_an_unknown_order_switches_it_off_and_training_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    once: Any = iter(range(40))
    loader = DataLoader(TensorDataset(*points()), batch_size=8, sampler=once)
    args = arguments(num_train_epochs=1, lr_scheduler="constant")
    result = trainer(args, train_dataset=loader, callbacks=[Provenance(tmp_path), SampleLosses()]).fit()
    assert (result.status, result.state.step) == ("finished", 5)
    assert "Provenance raised in on_micro_batch_begin at step 0 and is switched off" in caplog.text
    assert "SampleLosses raised in on_micro_batch_end at step 0 and is switched off" in caplog.text


def test_without_a_folder_it_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Provenance\(folder=…\)"):
        trainer(callbacks=[Provenance()]).fit()
