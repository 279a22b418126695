"""Tests of observers: gradient norms, system metrics, timing, tables, FLOPs."""

import copy
import csv
import io
import logging
import math
import resource
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.callbacks.by_hand import Named, assert_equal, trained, weights
from tests.callbacks.loops import go_through, running
from tests.faults.trainings import Dies
from tests.trainer.tasks import arguments, network, points, trainer
from tests.worlds import run_world
from trainer_lib import FullyShardedDataParallelPlugin
from trainer_lib.callbacks import (
    CsvLog,
    Flops,
    GradientNorms,
    Histograms,
    JsonlLog,
    ModelSummary,
    Predictions,
    Profile,
    Provenance,
    SampleLosses,
    SystemMonitor,
    Timer,
    Webhook,
    every,
    samples_of_step,
)
from trainer_lib.callbacks.flops import peak_of
from trainer_lib.callbacks.text_tables import show_table
from trainer_lib.callbacks.trackers import TrackerCallback
from trainer_lib.events import Callback, Run, RunState
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.tracking.base import GeneralTracker


@pytest.mark.parametrize("make", [SystemMonitor, lambda: Webhook("http://127.0.0.1:9", timeout=0.1)])
def test_what_a_run_holds_does_not_keep_search_from_copying_a_callback(make: Any) -> None:
    callback = make()
    copy.deepcopy(callback)
    trained(callback)
    copy.deepcopy(callback)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: GradientNorms(by="layers"),
        lambda: GradientNorms(by=0),
        lambda: GradientNorms(by=True),
        lambda: GradientNorms(by={}),
        lambda: Flops(peak=0),
        lambda: Flops(peak=float("nan")),
        lambda: ModelSummary(depth=0),
        lambda: ModelSummary(depth=True),
    ],
)
def test_bad_options_are_refused(wrong: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"^(GradientNorms|Flops|ModelSummary)\((by|peak|depth)\) must be .*\(got "
    ):
        wrong()


# -- all of them at once ---------------------------------------------------------------------------------------------


def all_of(folder: Path) -> list[Callback]:
    """Return one of each callback that only looks."""
    return [
        CsvLog(folder / "history.csv"),
        Flops(peak=1e9),
        GradientNorms(),
        Histograms("3 steps"),
        ModelSummary(file=io.StringIO()),
        Predictions(2),
        Profile(after=2, steps=2, folder=folder),
        Provenance(folder),
        SampleLosses(),
        SystemMonitor(),
        Timer(),
    ]


def test_they_leave_training_as_it_is_also_after_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"save_every": 3, "optimizer": "adamw", "log_every": 2, "output_dir": tmp_path}
    without = trained(model=network(dropout=0.2), optimizer="adamw")
    with pytest.raises(InterruptedError):
        trained(*all_of(tmp_path), Dies(8), model=network(dropout=0.2), eval_dataset=points(), **options)
    options |= {"resume": "auto", "eval_dataset": points()}
    assert_equal(trained(*all_of(tmp_path), model=network(dropout=0.2), **options), without)
    steps = [row["step"] for row in rows_of(tmp_path / "history.csv") if row["loss"]]
    assert steps == ["2", "4", "6", "8", "10"]
    assert [len(samples_of_step(tmp_path, step)[0][0]) for step in range(1, 11)] == [8] * 10
    assert "switched off" not in caplog.text


def test_they_leave_training_on_two_processes_as_it_is(tmp_path: Path) -> None:
    def body() -> tuple[Named, Named]:
        options: dict[str, Any] = {"per_device_train_batch_size": 4, "log_every": 5}
        seen = all_of(tmp_path)
        run = trainer(arguments(**options), eval_dataset=points(), callbacks=seen)
        run.fit()
        assert set(seen) <= set(run.events)  # none was switched off
        run.accelerator.free_memory()
        plain = trainer(arguments(**options))
        plain.fit()
        return weights(run.unwrapped_model), weights(plain.unwrapped_model)

    for with_them, without in run_world(body, timeout=60):
        assert_equal(with_them, without)
    assert [row["step"] for row in rows_of(tmp_path / "history.csv")] == ["5", "5", "10", "10"]  # with evaluations
    assert [len(batch) for (batch,) in samples_of_step(tmp_path, 1)] == [4, 4]


# -- norms of gradients ----------------------------------------------------------------------------------------------


class Kept(Callback):
    """Keeps what is logged, and the norms as a loop by hand has them."""

    def __init__(self) -> None:
        self.squares: list[dict[str, float]] = []
        self.logs: list[dict[str, float]] = []

    def on_backward_end(self, run: Run) -> None:
        norms = {
            name: float(weight.grad.norm()) ** 2 for name, weight in run.parameters.items() if weight.grad is not None
        }
        self.squares.append(norms)

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        self.logs.append(dict(values))

    def norm(self, *names: str) -> float:
        return math.sqrt(sum(squares[name] for squares in self.squares for name in names) / len(self.squares))


def test_norms_are_those_of_layers_before_clipping() -> None:
    kept = Kept()
    monitors = [GradientNorms(), GradientNorms({"first": "0.*", "of no weight": "5.*"})]
    trainer(arguments(max_steps=5, log_every=5, max_grad_norm=0.01), callbacks=[*monitors, kept]).fit()
    values = kept.logs[0]
    assert values["grad_norm/0"] == pytest.approx(kept.norm("0.weight", "0.bias"), rel=1e-6)
    assert values["grad_norm/3"] == pytest.approx(kept.norm("3.weight", "3.bias"), rel=1e-6)
    assert values["grad_norm/first"] == pytest.approx(values["grad_norm/0"], rel=1e-6)
    assert values["grad_norm/0"] > 0.01
    assert [name for name in values if name.startswith("grad_norm/")] == [
        "grad_norm/0",
        "grad_norm/3",
        "grad_norm/first",
    ]


@pytest.mark.parametrize("kind", [CsvLog, JsonlLog])
def test_a_folder_is_no_log_file_and_stays(tmp_path: Path, kind: Any) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    with pytest.raises(ConfigurationError, match=rf"{kind.__name__}\(path\) must be a file \(got the folder"):
        trainer(callbacks=[kind(folder)]).fit()
    assert list(tmp_path.iterdir()) == [folder]


def test_norms_of_single_weights_now_and_then() -> None:
    kept = Kept()
    trainer(
        arguments(max_steps=4, log_every=4), callbacks=[every("4 steps", GradientNorms(by="parameter")), kept]
    ).fit()
    last = math.sqrt(kept.squares[-1]["3.bias"])
    assert kept.logs[0]["grad_norm/3.bias"] == pytest.approx(last, rel=1e-6)


def test_norms_are_the_same_on_two_processes_and_with_shards() -> None:
    def norms(**options: Any) -> dict[str, float]:
        kept = Kept()
        kept.on_backward_end = lambda run: None  # type: ignore[method-assign]
        run = trainer(arguments(max_steps=3, log_every=3, **options), callbacks=[GradientNorms(by=1), kept])
        run.fit()
        return {name: value for name, value in kept.logs[0].items() if name.startswith("grad_norm/")}

    alone = norms(per_device_train_batch_size=8)
    options: dict[str, Any]
    for options in ({}, {"fsdp": FullyShardedDataParallelPlugin()}):
        for rank_norms in run_world(
            lambda options=options: norms(per_device_train_batch_size=4, **options), timeout=60
        ):
            assert rank_norms == pytest.approx(alone, rel=1e-5)


# -- the machine, and time -------------------------------------------------------------------------------------------


def test_system_metrics_are_logged() -> None:
    monitor, values = SystemMonitor(), dict[str, float]()
    monitor.on_fit_begin(running())
    monitor.on_log(running(), values)
    assert set(values) == {
        f"system/{name}" for name in ("cpu_percent", "memory_percent", "process_cpu_percent", "process_memory_gb")
    } | (values.keys() & {"system/workers_memory_gb"})
    assert 0.05 < values["system/process_memory_gb"] < 100
    assert 0 < values["system/memory_percent"] <= 100


def test_remaining_time_is_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    timer, run, logged = Timer(), running(max_steps=40, step=10), list[dict[str, float]]()
    timer.on_fit_begin(run)
    for pause in (0.0, 3.0):
        run.state.step, clock[0] = run.state.step + 5, clock[0] + 2.0
        timer.on_evaluate_begin(run)
        clock[0] += pause
        timer.on_evaluate_end(run, {})
        values = dict[str, float]()
        timer.on_log(run, values)
        logged.append(values)
    assert logged[0] == pytest.approx({"elapsed_seconds": 2.0, "remaining_seconds": 10.0})
    assert logged[1] == pytest.approx({"elapsed_seconds": 7.0, "remaining_seconds": 14.0})
    timer.on_save_begin(run, Path())
    clock[0] += 1.0
    timer.on_save_end(run, Path())
    timer.on_fit_end(run)
    clock[0] += 50.0
    assert timer.summary() == {"elapsed": 8.0, "evaluation": 3.0, "saving": 1.0, "training": 4.0}


def test_the_last_checkpoint_counts_as_saving(tmp_path: Path) -> None:
    timer = Timer()
    args = arguments(max_steps=2, output_dir=str(tmp_path), save_every="100 steps", save_in_background=False)
    trainer(args, callbacks=[timer]).fit()
    assert list(tmp_path.glob("*/checkpoints/checkpoint-*"))
    assert timer.summary()["saving"] > 0


def test_remaining_time_by_epochs_by_time_limit_and_without_an_end() -> None:
    cases: list[tuple[dict[str, Any], Any, float | None]] = [
        ({"max_epochs": 4.0, "epoch": 1}, None, 0.25),
        ({"max_steps": 10, "step": 2, "seconds": 30.0}, SimpleNamespace(time_limit=60.0), 0.5),
        ({}, None, None),
    ]
    for state, args, share in cases:
        timer, values, run = Timer(), dict[str, float](), running()
        timer.on_fit_begin(run)
        run.state, run.args = RunState(status="running", **state), args
        timer.on_log(run, values)
        assert ("remaining_seconds" in values) == (share is not None)
        if share is not None:
            assert values["remaining_seconds"] == pytest.approx(values["elapsed_seconds"] * (1 - share) / share)


# -- tables ----------------------------------------------------------------------------------------------------------


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_rows_of_logs_and_evaluations(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "history.csv"
    go_through([CsvLog(path)], 6, log_every=2, evaluations={4: {"eval_loss": 0.5}})
    rows = rows_of(path)
    assert [row["step"] for row in rows] == ["2", "4", "4", "6"]
    assert [row["loss"] for row in rows] == ["0.5", "0.25", "", str(1 / 6)]
    assert [row["eval_loss"] for row in rows] == ["", "", "0.5", ""]


def test_only_an_evaluation_takes_the_place_of_its_earlier_row(tmp_path: Path) -> None:
    log, run = CsvLog(tmp_path / "history.csv"), running(step=4, samples=16)
    go_through([log], 4, log_every=2, evaluations={4: {"eval_loss": 0.5}})
    log.on_fit_begin(run)  # resumes from step 4
    log.on_log(run, {"loss": 0.125})
    log.on_evaluate_end(run, {"eval_loss": 0.25})
    assert [row["loss"] for row in rows_of(log.path)] == ["0.5", "0.25", "0.125", ""]
    assert [row["eval_loss"] for row in rows_of(log.path)] == ["", "", "", "0.25"]


def test_a_resumed_run_removes_later_rows_and_a_new_run_starts_fresh(tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    go_through([CsvLog(path)], 6, log_every=2, evaluations={4: {"eval_loss": 0.5}})
    with path.open("a") as file:
        file.write("7,0")  # it was killed while it wrote
    go_through([CsvLog(path)], 8, run=running(step=4, samples=16), log_every=2)
    assert [row["step"] for row in rows_of(path)] == ["2", "4", "4", "6", "8"]
    assert rows_of(path)[2]["eval_loss"] == "0.5"
    assert "7" not in {row["step"] for row in rows_of(path)}
    log, run = CsvLog(path), running(step=8, samples=32)
    log.on_fit_begin(run)
    run.state.step = 2
    log.on_load_end(run, Path())  # it went back
    assert [row["step"] for row in rows_of(path)] == ["2"]
    go_through([CsvLog(path)], 2, log_every=2)
    assert [row["step"] for row in rows_of(path)] == ["2"]
    assert [row["step"] for row in rows_of(tmp_path / "history.csv.old")] == ["2"]


def test_rows_that_a_full_disk_does_not_take_are_rewound_too(tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    log, limits = CsvLog(path), resource.getrlimit(resource.RLIMIT_FSIZE)
    log.on_log(running(step=1), {"loss": 1.0})
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, limits[1]))
    try:
        for step in (2, 3):
            log.on_log(running(step=step), {"loss": 2.0})
        log.on_load_end(running(step=2), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    log.on_log(running(step=3), {"loss": 3.0})
    assert [(row["step"], row["loss"]) for row in rows_of(path)] == [("1", "1.0"), ("2", "2.0"), ("3", "3.0")]


def test_rows_that_a_full_disk_does_not_take_are_written_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    path, whole = tmp_path / "history.csv", tmp_path / "whole.csv"

    class Fill(Callback):
        """A disk that is full from step 2 to step 5."""

        def on_step_end(self, run: Run) -> None:
            if run.state.step in (2, 5):
                most = path.stat().st_size + 20 if run.state.step == 2 else limits[0]
                resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))

    def fit(*callbacks: Callback) -> None:
        trainer(arguments(log_every="1 step", max_steps=8), callbacks=callbacks, eval_dataset=points(8)).fit()

    try:
        with caplog.at_level(logging.WARNING):
            fit(CsvLog(path), Fill())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [message for message in caplog.messages if "cannot be written" in message] == [
        f"{path} cannot be written: File too large. Its rows wait until it can."
    ]
    fit(CsvLog(whole))
    rows, wanted = ([(row["step"], row["loss"], row["eval_loss"]) for row in rows_of(file)] for file in (path, whole))
    assert rows == wanted


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.embedding.weight.requires_grad = False


def test_a_summary_counts_shared_weights_once_and_goes_as_deep_as_asked() -> None:
    texts = list[list[str]]()
    for depth in (None, 1):
        file = io.StringIO()
        ModelSummary(depth, file).on_fit_begin(Run(model=Tied()))
        texts.append([" ".join(line.split()) for line in file.getvalue().splitlines()])
    assert texts[0] == [
        "layer class shape parameters trained",
        "embedding Embedding 10×4 40 0",
        "blocks.0 Linear 4×4 4 20 20",
        "blocks.1 LayerNorm 4 4 8 8",
        "head Linear 10×4 0 0",
        "Total: 68 parameters, 28 trained; 0.0 MB.",
    ]
    assert texts[1][1:4] == ["embedding Embedding 10×4 40 0", "blocks Sequential 28 28", "head Linear 10×4 0 0"]


class Tables(GeneralTracker):
    """A tracker that takes tables."""

    name = "tables"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[Any] = []

    @property
    def tracker(self) -> Any:
        return self.tables

    def store_init_configuration(self, values: Any) -> None:
        del values

    def log(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
        del values, step, kwargs

    def log_table(self, table_name: str, columns: Any = None, data: Any = None, **kwargs: Any) -> None:
        self.tables.append((table_name, columns, data, kwargs["step"]))


def test_totals_are_in_the_history_and_the_table_in_trackers(tmp_path: Path) -> None:
    tables, history = Tables(), tmp_path / "history.jsonl"
    callbacks = [TrackerCallback(tables), JsonlLog(history), ModelSummary(file=io.StringIO())]
    trainer(arguments(max_steps=1), callbacks=callbacks).fit()
    assert '"parameters": 74, "trained": 74, "bytes": 296' in history.read_text()
    ((name, columns, data, step),) = tables.tables
    assert (name, columns[0], step) == ("model", "layer", 0)
    assert data[0] == ["0", "Linear", "8×6 8", 56, 56]
    assert not show_table(Run(), "any", ["a"], [[1]])


# -- operations ------------------------------------------------------------------------------------------------------


def test_operations_are_those_of_matrix_products_and_counted_once() -> None:
    kept = Kept()
    flops = Flops(peak=1e9)
    run = trainer(arguments(max_steps=4, log_every=2), callbacks=[flops, kept])
    run.fit()
    # Two for each product and sum; the gradient of the first layer's inputs is not needed.
    assert flops.per_sample == 2 * (2 * 6 * 8 + 3 * 8 * 2)
    first, second = kept.logs
    assert "mfu" not in first
    assert second["mfu"] == pytest.approx(second["teraflops_per_second"] * 1e3)


def test_the_share_of_the_peak() -> None:
    flops, run, values = Flops(peak=1000.0), running(), dict[str, float]()
    flops.on_fit_begin(run)
    run.batch = {"inputs": torch.zeros(4, 6)}
    flops.on_micro_batch_begin(run)
    network()(torch.zeros(4, 6))
    flops.on_micro_batch_end(run)
    assert flops.per_sample == 2 * (6 * 8 + 8 * 2)
    for samples, seconds in ((4, 9.0), (12, 13.0)):
        run.state.samples, run.state.seconds = samples, seconds
        flops.on_log(run, values)
    assert values == pytest.approx({"teraflops_per_second": 128 * 8 / 4 / 1e12, "mfu": 128 * 8 / 4 / 1000})


def test_an_error_in_the_counted_batch_leaves_no_counting_behind() -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(6, 2))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        trainer(model=Broken(), callbacks=[Flops()]).fit()
    assert _get_current_dispatch_mode() is None


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "fp16", 756e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA A100-SXM4-40GB", "no", 19.5e12),
        ("Tesla T4", "fp16", 65e12),
        ("NVIDIA GeForce 256", "bf16", None),
    ],
)
def test_peaks_of_devices(name: str, precision: str, peak: float | None) -> None:
    assert peak_of(name, precision) == peak
