"""Limits and intervals in tokens: counted without padding, the same on any number of ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from tests.faults.trainings import Dies
from tests.trainer.tasks import arguments, points
from tests.worlds import run_world
from trainer_lib import ConfigurationError, Trainer, TrainingArguments
from trainer_lib.callbacks import EMA, Checkpoint
from trainer_lib.events import Callback, Run

ROWS = 22  # the last batch is not full
WIDTH = 7


def texts() -> dict[str, Tensor]:
    """Return padded rows of 1 to 7 tokens."""
    lengths = torch.arange(ROWS) % WIDTH + 1
    mask = (torch.arange(WIDTH) < lengths[:, None]).long()
    tokens = torch.randint(1, 11, (ROWS, WIDTH), generator=torch.Generator().manual_seed(2)) * mask
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


class Language(nn.Module):
    """Predicts each token from itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 11)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        del attention_mask
        logits = self.embedding(input_ids)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Counts(Callback):
    """Records the tokens after each update, and the steps of logs, evaluations and checkpoints."""

    def __init__(self) -> None:
        self.after: list[int | None] = []
        self.at: dict[str, list[int]] = {"log": [], "evaluate": [], "save": []}

    def on_step_end(self, run: Run) -> None:
        self.after.append(run.state.tokens)

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        del values
        self.at["log"].append(run.state.step)

    def on_evaluate_end(self, run: Run, metrics: dict[str, float]) -> None:
        del metrics
        self.at["evaluate"].append(run.state.step)

    def on_save_begin(self, run: Run, folder: Path) -> None:
        del folder
        self.at["save"].append(run.state.step)


OPTIONS: dict[str, Any] = {
    "global_batch_size": 8,
    "shuffle": False,
    "lr_scheduler": "constant",
    "save_in_background": False,
    "keep_last": None,
    "keep_best": 0,
}


def counted(*callbacks: Callback, data: Any = None, **options: Any) -> tuple[Counts, Any]:
    """Return the counts of a run, and its state."""
    counts = Counts()
    size = {"per_device_train_batch_size": 4} | options
    args = arguments(**{**OPTIONS, **size})
    token_trainer = Trainer(
        Language(),
        args,
        train_dataset=texts() if data is None else data,
        eval_dataset=texts(),
        callbacks=[counts, *callbacks],
    )
    try:
        return counts, token_trainer.fit().state
    except InterruptedError:
        return counts, token_trainer.state


def by_hand(epochs: int = 2) -> list[int]:
    """Return the expected tokens after each update."""
    lengths = texts()["attention_mask"].sum(1)
    updates = [int(lengths[at : at + 8].sum()) for at in range(0, ROWS, 8)] * epochs
    return torch.tensor(updates).cumsum(0).tolist()


class Stream(IterableDataset[Any]):
    """Rows in order."""

    def __iter__(self) -> Any:
        rows = texts()
        return ({name: column[row] for name, column in rows.items()} for row in range(ROWS))


def rows_of_lists() -> list[dict[str, Tensor]]:
    return list(Stream())


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("make", [texts, rows_of_lists, Stream], ids=["columns", "rows", "stream"])
def test_tokens_are_counted_without_padding_and_repeats(processes: int, make: Callable[[], Any]) -> None:
    def body() -> tuple[list[int | None], int]:
        counts, state = counted(data=make(), max_tokens=10**9, num_train_epochs=2)
        return counts.after, state.tokens

    for after, tokens in run_world(body, (), processes):
        assert after == by_hand()
        assert tokens == by_hand()[-1]


def test_batches_without_a_mask_are_counted_whole() -> None:
    class Unmasked(Language):
        def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return super().forward(input_ids, input_ids, labels)

    rows = {name: column for name, column in texts().items() if name != "attention_mask"}
    state = Trainer(Unmasked(), arguments(**OPTIONS, max_tokens=100), train_dataset=rows).fit().state
    assert (state.step, state.tokens) == (2, 16 * WIDTH)


@pytest.mark.parametrize("processes", [1, 2])
def test_max_tokens_ends_the_run_at_the_update_that_reaches_it(processes: int) -> None:
    limit = by_hand()[3]

    def body(most: Any) -> tuple[int, int, str]:
        _, state = counted(max_tokens=most, num_train_epochs=None)
        return state.step, state.tokens, state.status

    for most, step in ((limit, 4), (limit + 1, 5), (f"{limit} tokens", 4)):
        assert run_world(body, (most,), processes) == [(step, by_hand()[step - 1], "finished")] * processes


@pytest.mark.parametrize("processes", [1, 2])
def test_intervals_in_tokens_fire_after_that_many_tokens(processes: int, tmp_path: Path) -> None:
    def due(every: int) -> list[int]:
        ends = [0, *by_hand(3)]
        return [step for step in range(1, len(ends)) if ends[step] // every > ends[step - 1] // every]

    def body() -> Any:
        options: dict[str, Any] = {"log_every": "50 tokens", "eval_every": "70 tokens", "save_every": "0.09k tokens"}
        return counted(output_dir=tmp_path, num_train_epochs=3, **options)[0].at

    for at in run_world(body, (), processes):
        assert at == {
            "log": sorted({*due(50), 9}),
            "evaluate": sorted({*due(70), 9}),
            "save": sorted({*due(90), 9}),
        }


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resumed_run_continues_the_count(processes: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_train_epochs": 3, "save_every": 2, "eval_every": "70 tokens"}

    def body() -> Any:
        whole, state = counted(output_dir=tmp_path / "whole", **options)
        counted(Dies(5), output_dir=tmp_path / "parts", **options)
        parts, resumed = counted(output_dir=tmp_path / "parts", resume="auto", **options)
        assert (parts.after, resumed.tokens) == (whole.after[4:], state.tokens)
        assert parts.at["evaluate"] == [step for step in whole.at["evaluate"] if step > 4]
        return resumed.tokens

    assert run_world(body, (), processes) == [by_hand(3)[-1]] * processes


def test_a_checkpoint_without_a_count_gives_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    counted(Dies(4), output_dir=tmp_path, save_every=3)
    _, state = counted(output_dir=tmp_path, resume="auto", num_train_epochs=2, max_tokens="1B")
    assert "The checkpoint has no count of tokens: they are counted from step 3" in caplog.text
    assert state.tokens == by_hand()[-1] - by_hand()[2]


def test_tokens_of_skipped_updates_are_counted() -> None:
    class Broken(Language):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
            outputs = super().forward(input_ids, attention_mask, labels)
            is_second = bool((input_ids[0] == texts()["input_ids"][8]).all()) and self.training
            return {**outputs, "loss": outputs["loss"] * (float("nan") if is_second else 1.0)}

    def body() -> Any:
        args = arguments(
            **OPTIONS, per_device_train_batch_size=4, max_tokens="1k", num_train_epochs=1, on_nonfinite="skip"
        )
        state = Trainer(Broken(), args, train_dataset=texts()).fit().state
        return state.skipped, state.tokens, state.samples

    assert run_world(body) == [(1, by_hand()[2], ROWS)] * 2


def test_tokens_are_not_counted_if_no_argument_needs_them() -> None:
    counts, state = counted(num_train_epochs=1)
    assert state.tokens is None
    assert set(counts.after) == {None}


def test_data_without_tokens_is_an_error() -> None:
    args = arguments(max_tokens=100, lr_scheduler="constant", num_train_epochs=None)
    model = nn.Linear(6, 2)
    with pytest.raises(ConfigurationError, match="count input_ids, and the batch has none"):
        Trainer(model, args, train_dataset=points(), loss_fn=nn.functional.cross_entropy).fit()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainingArguments(max_tokens=0), "max_tokens must be"),
        (lambda: TrainingArguments(max_tokens="5 steps"), "max_tokens"),
        (lambda: TrainingArguments(max_tokens="many"), "max_tokens"),
        (
            lambda: TrainingArguments(keep_every="1M tokens", output_dir="runs"),
            "only max_tokens, log_every, eval_every and save_every count tokens",
        ),
        (
            lambda: TrainingArguments(gc_every="1M tokens"),
            "only max_tokens, log_every, eval_every and save_every count tokens",
        ),
        (lambda: EMA(every="1M tokens"), "must be in steps, epochs, samples or time: callbacks do not count tokens"),
        (lambda: Checkpoint(keep_every="1M tokens"), "Use steps, epochs, samples or a time"),
    ],
)
def test_arguments_that_do_not_count_tokens_refuse_them(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
