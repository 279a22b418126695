"""Tests of profiling some updates."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.callbacks.loops import folder_of
from tests.trainer.tasks import arguments, trainer
from tests.worlds import run_world
from trainer_lib import ProfileKwargs
from trainer_lib.callbacks import JsonlLog, Profile
from trainer_lib.events import Modifier, Run
from trainer_lib.foundation.errors import ConfigurationError


def names_in(trace: Path) -> list[str]:
    return [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if "name" in event]


def history_entries(history: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    return [line for line in lines if line["event"] == "profile"]


def test_a_trace_of_some_updates_and_the_slowest_operations(tmp_path: Path) -> None:
    args = arguments(output_dir=tmp_path)
    trainer(args, callbacks=[Profile(after=2, steps=3, top=4)]).fit()
    trace = folder_of(tmp_path) / "profile" / "process-0-steps-3-5.json"
    assert names_in(trace).count("aten::cross_entropy_loss") == 3  # one in each update
    (line,) = history_entries(folder_of(tmp_path) / "history.jsonl")
    assert (line["step"], line["steps"], line["trace"]) == (5, "3-5", str(trace))
    times = [operation["milliseconds"] for operation in line["operations"]]
    assert len(times) == 4
    assert times == sorted(times, reverse=True)
    assert all(operation["calls"] > 0 for operation in line["operations"])


def test_each_rank_writes_its_trace_also_if_the_run_ends_early(tmp_path: Path) -> None:
    def body() -> None:
        args = arguments(max_steps=4, per_device_train_batch_size=4)
        trainer(args, callbacks=[Profile(after=3, steps=50, folder=tmp_path)]).fit()

    run_world(body, timeout=60)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"process-{rank}-steps-4-4.json" for rank in (0, 1)]


def test_a_resumed_run_counts_from_the_resume_and_an_error_ends_the_profile(tmp_path: Path) -> None:
    class Fails(Modifier):
        def on_loss(self, run: Run) -> None:
            if run.state.step == 5:
                raise RuntimeError("broken")

    def fit(**options: Any) -> None:
        args = arguments(output_dir=tmp_path, resume="auto", save_every=2, **options)
        trainer(args, callbacks=[Profile(after=1, steps=5, folder=tmp_path), Fails()]).fit()

    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            fit()
    traces = sorted(tmp_path.glob("*.json"))
    assert [trace_file.name for trace_file in traces] == ["process-0-steps-2-5.json", "process-0-steps-6-6.json"]
    assert "aten::cross_entropy_loss" in names_in(traces[0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Profile(steps=0), r"Profile\(steps\) must be a whole number of at least 1 \(got 0\)"),
        (lambda: Profile(after=-1), r"Profile\(after\) must be .* at least 0 \(got -1\)"),
        (lambda: Profile(top=True), r"Profile\(top\) must be .*\(got True\)"),
        (lambda: Profile(options=ProfileKwargs(output_trace_dir="traces")), "must not set a schedule or a folder"),
        (lambda: trainer(callbacks=[Profile()]).fit(), "Give output_dir, or Profile"),
    ],
)
def test_bad_options_are_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        wrong()


def test_a_run_that_ends_before_the_profile_records_nothing_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    history = tmp_path / "history.jsonl"
    trainer(arguments(max_steps=2), callbacks=[JsonlLog(history), Profile(folder=tmp_path / "profile")]).fit()
    assert history_entries(history) == []
    assert not (tmp_path / "profile").exists()
    assert "Profile wrote no trace: it skips the first 10 updates, and the run ended before." in caplog.text
    caplog.clear()
    trainer(arguments(max_steps=2), callbacks=[Profile(after=0, folder=tmp_path / "profile")]).fit()
    assert "no trace" not in caplog.text
