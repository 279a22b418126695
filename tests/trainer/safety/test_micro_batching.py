"""Batches that do not fit into memory: computed in parts, with the updates of a run in which everything fits."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.faults.trainings import Dies
from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import run_world
from trainer_lib import ConfigurationError, LossResult, PartialState, Trainer, UnsupportedError
from trainer_lib.callbacks import LabelSmoothing
from trainer_lib.events import Callback, Modifier, Run
from trainer_lib.foundation.errors import NoExecutableBatchSizeError
from trainer_lib.modules.module_buffers import Buffers
from trainer_lib.options.parallel.ddp_options import DistributedDataParallelKwargs


class Full(torch.autograd.Function):
    """Runs out of memory in the backward, when the gradients of what comes behind are there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fits: bool) -> Tensor:
        ctx.fits = fits
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if not ctx.fits:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
        return gradients[0], None


class Hungry(nn.Module):
    """A network that runs out of memory at more rows than fit: in the first forward, or in the middle of a backward."""

    def __init__(self, limits: dict[int, int] | None = None, backward: bool = False, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)
        self.norm = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.3)) if norm else nn.Identity()
        self.limits, self.backward = limits or {}, backward
        self.step, self.calls = 0, list[int]()
        self.passes = 0  # the first calls, which fit whatever they are

    def forward(self, x: Tensor) -> Tensor:
        limit = min((rows for step, rows in self.limits.items() if step <= self.step), default=1000)
        self.calls.append(len(x))
        hidden = self.norm(self.first(x))
        if len(self.calls) <= self.passes:
            limit = 1000
        if not self.backward and len(x) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.last(Full.apply(hidden.tanh(), len(x) <= limit))


class Counts(Callback):
    def __init__(self, model: Hungry) -> None:
        self.model, self.losses, self.sizes = model, list[float](), list[int]()

    def on_step_begin(self, run: Run) -> None:
        self.model.step = run.state.step + 1

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        self.losses.append(values["loss"])

    def on_batch_size_reduced(self, run: Run, batch_size: int) -> None:
        self.sizes.append(batch_size)


class Logging(Trainer):
    def compute_loss(self, model: Any, batch: Any) -> Any:
        self.log("rows", 1.0, weight=len(batch[0]))
        self.log("mean", batch[0].mean(), weight=len(batch[0]))
        return super().compute_loss(model, batch)


def fitted(model: Hungry, dies_at: int | None = None, resume: str = "never", **options: Any) -> Any:
    counts = Counts(model)
    args = arguments(log_every=1, **{"per_device_train_batch_size": "auto", **options})
    callbacks: list[Callback] = [counts] if dies_at is None else [counts, Dies(dies_at)]
    loss_fn = nn.functional.cross_entropy
    data: dict[str, Any] = {"train_dataset": points(132), "train_metrics": ["accuracy"]}
    model_trainer = Logging(model, args, **data, loss_fn=loss_fn, callbacks=callbacks)
    model_trainer.fit(resume=resume)
    weights = [tensor.detach().clone() for tensor in model_trainer.unwrapped_model.state_dict().values()]
    return counts, weights, model_trainer


@pytest.mark.fault("out of memory at steps 1 and 7 on one of two ranks")
@pytest.mark.parametrize("accumulation", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_process_that_runs_out_of_memory_makes_no_difference(accumulation: int) -> None:
    options: dict[str, Any] = {"max_steps": 8}
    options |= {"global_batch_size": 16} if accumulation == 1 else {"gradient_accumulation_steps": accumulation}
    limits = {1: 5, 7: 3} if accumulation == 1 else {1: 40, 7: 20}

    def train() -> list[list[int]]:
        rank = PartialState(cpu=True).process_index
        expected, expected_weights, plain = fitted(Hungry(), **options)
        plain.accelerator.free_memory()
        sizes: list[list[int]] = []
        for backward in (False, True):
            hungry = Hungry(limits if rank else {}, backward)
            counts, weights, model_trainer = fitted(hungry, **options)
            torch.testing.assert_close(counts.losses, expected.losses, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)
            assert [entry["mean"] for entry in model_trainer.run.state.history] == pytest.approx(
                [entry["mean"] for entry in plain.run.state.history], rel=1e-5, abs=1e-7
            )  # abs: means of numbers around 1 that almost cancel
            assert [entry["accuracy"] for entry in model_trainer.run.state.history] == pytest.approx(
                [entry["accuracy"] for entry in plain.run.state.history], rel=1e-6
            )
            sizes.append(counts.sizes)
            model_trainer.accelerator.free_memory()
        return sizes

    first, second = run_world(train, (), 2, timeout=90)
    assert first == [[], []]
    assert second == [[4, 2] if accumulation == 1 else [32, 16]] * 2


@pytest.mark.fault("out of memory on one process")
def test_parts_make_the_update_of_the_whole_batch_and_it_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    expected, expected_weights, plain = fitted(Hungry(), per_device_train_batch_size=64)
    with caplog.at_level(logging.WARNING):
        counts, weights, model_trainer = fitted(Hungry({1: 40, 4: 20}, backward=True))
    torch.testing.assert_close(counts.losses, expected.losses, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)
    for name in ("rows", "mean", "grad_norm", "accuracy"):
        actual, wanted = ([entry[name] for entry in each.run.state.history] for each in (model_trainer, plain))
        assert actual == pytest.approx(wanted, rel=1e-5), name
    texts = [record.getMessage() for record in caplog.records]
    assert [text.split(". ")[0] for text in texts] == [
        "In step 1, a batch of 64 samples did not fit into memory of process 0",
        "In step 4, a batch of 32 samples did not fit into memory of process 0",
    ]
    assert "parts of 16; the updates stay those of whole batches." in texts[1]


def test_a_window_begins_anew_with_the_batches_that_did_fit() -> None:
    options: dict[str, Any] = {"gradient_accumulation_steps": 2}
    expected, expected_weights, plain = fitted(Hungry(), per_device_train_batch_size=64, **options)
    hungry = Hungry({1: 40})
    hungry.passes = 1
    counts, weights, model_trainer = fitted(hungry, **options)
    assert hungry.calls[:6] == [64, 64, 32, 32, 32, 32]
    torch.testing.assert_close(counts.losses, expected.losses, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)
    for name in ("rows", "mean", "grad_norm", "accuracy"):
        actual, wanted = ([entry[name] for entry in each.run.state.history] for each in (model_trainer, plain))
        assert actual == pytest.approx(wanted, rel=1e-5), name


class Skips(Modifier):
    """Skips micro-batches, and keeps the gradients of each update."""

    def __init__(self, skipped: list[int]) -> None:
        self.skipped, self.gradients = skipped, list[list[Tensor]]()

    def on_micro_batch_begin(self, run: Run) -> None:
        if run.state.micro_batches in self.skipped:
            run.control.skip_batch = True

    def on_optimizer_step_begin(self, run: Run) -> None:
        self.gradients.append([weight.grad.clone() for weight in run.trained_parameters if weight.grad is not None])


class Parts(Trainer):
    """Returns values to log with the loss."""

    def compute_loss(self, model: Any, batch: Any) -> Any:
        loss = super().compute_loss(model, batch)
        assert isinstance(loss, LossResult)
        return loss._replace(logs={"first": batch[0].mean()})


def gradients_and_logs(model: nn.Module, callbacks: list[Modifier], skipped: list[int], **options: Any) -> Any:
    """Return the gradients and the log of each update: windows of three batches of 4 samples."""
    skips = Skips(skipped)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*points(24)), batch_size=4)
    args = arguments(
        per_device_train_batch_size="auto", gradient_accumulation_steps=3, num_train_epochs=1, log_every=1, **options
    )
    loss_fn, callbacks = nn.functional.cross_entropy, [*callbacks, skips]
    model_trainer = Parts(model, args, train_dataset=loader, loss_fn=loss_fn, callbacks=callbacks)
    model_trainer.fit()
    logs = [(entry["loss"], entry["first"]) for entry in model_trainer.run.state.history]
    return skips.gradients, logs


@pytest.mark.parametrize(("skipped", "failing"), [(1, 2), (0, 2), (1, 3)])
def test_a_skipped_batch_stays_skipped_and_the_others_count_when_one_does_not_fit(skipped: int, failing: int) -> None:
    gradients, logs = gradients_and_logs(Hungry(), [], [skipped, 4])
    hungry = Hungry({0: 3})
    hungry.passes = failing - 1
    actual, actual_logs = gradients_and_logs(hungry, [], [skipped, 4])
    assert hungry.calls[failing - 1] == 4
    assert hungry.calls[-1] == 2
    torch.testing.assert_close(actual, gradients, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(actual_logs, logs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rows", [1, 3])
def test_callbacks_see_the_part_of_a_batch_whose_loss_they_change(rows: int) -> None:
    gradients, logs = gradients_and_logs(Hungry(), [LabelSmoothing(0.3)], [])
    actual, actual_logs = gradients_and_logs(Hungry({0: rows}), [LabelSmoothing(0.3)], [])
    torch.testing.assert_close(actual, gradients, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(actual_logs, logs, rtol=1e-5, atol=1e-7)


def test_an_update_that_is_skipped_after_a_failed_attempt_leaves_buffers_as_they_were() -> None:
    class Spoiled(Hungry):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * torch.nan

    model = Spoiled({0: 3}, norm=True)
    gradients_and_logs(model, [], [], on_nonfinite="skip")
    assert set(model.calls) == {2, 4}
    (norm,) = (module for module in model.modules() if isinstance(module, nn.BatchNorm1d))
    assert int(norm.num_batches_tracked or 0) == 0
    assert not torch.any(torch.as_tensor(norm.running_mean))


def test_running_statistics_of_processes_are_those_of_a_run_in_which_all_fits() -> None:
    def train() -> None:
        rank = PartialState(cpu=True).process_index
        options: dict[str, Any] = {"max_steps": 4, "loss_spike": 100.0}
        runs: list[Any] = []
        for limits, size in (({}, 64), ({}, "auto"), ({1: 40} if rank else {}, "auto")):
            counts, weights, model_trainer = fitted(
                Hungry(limits, norm=True), per_device_train_batch_size=size, **options
            )
            runs.append((counts.losses, weights, model_trainer.evaluate(points(20))))
            model_trainer.accelerator.free_memory()
        (losses, weights, metrics), whole, parts = runs
        assert whole[0] == losses
        torch.testing.assert_close(whole[1], weights, rtol=1e-6, atol=1e-7)
        assert whole[2] == pytest.approx(metrics, rel=1e-6)
        assert parts[2]["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=0.05)

    run_world(train, (), 2, timeout=90)


def test_a_failed_attempt_leaves_generators_and_buffers_as_they_were() -> None:
    counts, weights, _ = fitted(Hungry({1: 40}, norm=True), max_steps=4)
    assert counts.sizes == [32]
    in_parts: dict[str, Any] = {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 2}
    second, expected_weights, _ = fitted(Hungry(norm=True), max_steps=4, **in_parts)
    torch.testing.assert_close(counts.losses, second.losses, rtol=1e-6, atol=0)
    assert all(torch.equal(first, two) for first, two in zip(weights, expected_weights, strict=True))


def test_buffers_are_put_back_also_where_others_took_their_place() -> None:
    module = nn.BatchNorm1d(2)
    buffers = Buffers([module])
    for value in (1.0, 2.0):
        module.running_mean = torch.full((2,), value)
        for _ in range(2):
            buffers.copy()
            module(torch.randn(4, 2))
            if value == 2.0:
                module.running_mean = torch.zeros(2)
            buffers.restore()
            assert module.running_mean.tolist() == [value, value]
            assert int(module.num_batches_tracked or 0) == 0


def test_the_size_found_is_remembered(tmp_path: Path) -> None:
    expected, expected_weights, _ = fitted(Hungry({1: 40}), save_every=2, output_dir=tmp_path / "whole")
    with pytest.raises(InterruptedError):
        fitted(Hungry({1: 40}), dies_at=3, save_every=2, output_dir=tmp_path / "broken")
    counts, weights, _ = fitted(Hungry({1: 40}), resume="auto", save_every=2, output_dir=tmp_path / "broken")
    assert counts.sizes == []
    assert max(counts.model.calls) == 32
    assert counts.losses == expected.losses[-len(counts.losses) :]
    assert all(torch.equal(first, two) for first, two in zip(weights, expected_weights, strict=True))


def test_what_does_not_fit_alone_is_an_error() -> None:
    with pytest.raises(NoExecutableBatchSizeError, match="In step 1 a single sample did not fit") as raised:
        fitted(Hungry({1: 0}))
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


def test_a_number_is_a_number_and_the_error_says_what_would_help() -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised:
        fitted(Hungry({1: 4}), per_device_train_batch_size=8)
    (note,) = raised.value.__notes__
    assert 'With per_device_train_batch_size="auto" batches that do not fit' in note


def test_what_cannot_be_split_is_refused() -> None:
    class Stepping(Trainer):
        def training_step(self, model: Any, batch: Any) -> Any:
            return super().training_step(model, batch)

    auto: dict[str, Any] = {"per_device_train_batch_size": "auto"}
    with pytest.raises(ConfigurationError, match="so your training_step would run once for each part"):
        Stepping(network(), arguments(**auto), train_dataset=points(), loss_fn=nn.functional.cross_entropy).fit()
    for options, text in (
        ({"fsdp": True}, "which fsdp does not allow: all ranks of a sharded model compute together"),
        ({"sync_batchnorm": True}, "which sync_batchnorm=True does not allow: BatchNorm waits"),
        ({"per_device_eval_batch_size": "auto"}, "does not fit into memory by itself"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            arguments(**{**auto, **options})
    ready = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*points()), batch_size=10)
    with pytest.raises(ConfigurationError, match="a DataLoader has its batch size already"):
        trainer(arguments(**auto, global_batch_size=20), train_dataset=ready).fit()
    trainer(arguments(**auto, max_steps=1), train_dataset=ready).fit()

    def hooked() -> None:
        conflicts: list[dict[str, Any]] = [{"static_graph": True}, {"comm_hook": "bf16"}]
        for option in conflicts:
            with pytest.raises(UnsupportedError, match=next(iter(option))):
                trainer(arguments(**auto, ddp=DistributedDataParallelKwargs(**option))).fit()

    run_world(hooked, (), 2, timeout=60)


def joined(samples: list[Any]) -> Any:
    """Lay all features of all samples side by side: twice as many rows as samples."""
    inputs, targets = torch.stack([row for row, _ in samples]), torch.stack([row for _, row in samples])
    return inputs.repeat_interleave(2, dim=0), targets.repeat_interleave(2)


@pytest.mark.parametrize("limit", [0, 5])
def test_batches_whose_rows_are_not_samples_are_not_split(limit: int) -> None:
    """Rows that belong together would come into different parts, and nothing would tell."""
    options = {"per_device_train_batch_size": "auto", "global_batch_size": 8} if limit else {}
    model_trainer = Trainer(
        Hungry({0: limit}), arguments(**options), train_dataset=points(40), collate_fn=joined,
        loss_fn=nn.functional.cross_entropy,
    )  # fmt: skip
    with pytest.raises(ConfigurationError, match=r"of 8 samples did not fit.*it has 16 rows"):
        model_trainer.fit() if limit else model_trainer.evaluate(points(8))
