"""Gathering for metrics: every sample once."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.worlds import run_world
from trainer_lib import ConfigurationError
from trainer_lib.collectives import gather_real_objects, gather_real_rows
from trainer_lib.state import PartialState
from trainer_lib.state.gradient_state import Rows

Everywhere = Callable[[Callable[[int, int], Any]], list[Any]]


def test_processes_drop_their_own_repeated_rows(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        # The last round of a loader with a batch of 3: full on the first, one sample on the second, none after it.
        real = [3, 1, 0, 0][rank]
        rows = Rows(total=3, real=real) if real < 3 else None
        samples = torch.tensor([10 * rank, 10 * rank + 1, 10 * rank + 2])
        expected = [0, 1, 2, 10][: 3 + (size > 1)]
        assert gather_real_rows(samples, rows).tolist() == expected
        assert gather_real_rows(samples.bool(), rows).tolist() == [bool(sample) for sample in expected]
        assert gather_real_rows(samples.to(torch.bfloat16), rows).tolist() == [float(sample) for sample in expected]

    everywhere(body)


def test_structures_of_tensors_and_lists(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        rows = Rows(total=2, real=1) if rank == size - 1 else None
        gathered = gather_real_rows(
            {
                "ids": torch.tensor([rank, rank]),
                "texts": [f"#{rank}", "again"],
                "pair": (["p", "q"], np.array([[rank], [rank]])),
                "source": f"file {rank}",
            },
            rows,
        )
        assert gathered["ids"].tolist() == [other for other in range(size - 1) for _ in range(2)] + [size - 1]
        assert gathered["texts"] == [
            text for other in range(size) for text in (f"#{other}", "again")[: 2 - (other == size - 1)]
        ]
        assert gathered["pair"][0] == ["p", "q"] * (size - 1) + ["p"]
        assert len(gathered["pair"][1]) == 2 * size - 1
        assert gathered["source"] == [f"file {other}" for other in range(size)]

    everywhere(body)


def test_several_rows_a_sample_are_cut_with_it(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        tokens = torch.arange(12).view(6, 2)  # 3 samples of 2 tokens
        assert len(gather_real_rows(tokens, Rows(total=3, real=2))) == 4 * size
        assert gather_real_rows(tokens[:0], Rows(total=3, real=2)).shape == (0, 2)

    everywhere(body)


def test_a_loss_repeated_for_a_full_batch_stands_for_the_real_samples(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        loss = torch.tensor(0.5).repeat(8)
        assert len(gather_real_rows(loss, Rows(total=3, real=3, full=8))) == 3 * size
        assert len(gather_real_rows(loss, Rows(total=8, real=5, full=8))) == 5 * size
        assert len(gather_real_rows(loss, Rows(total=3, real=3))) == 8 * size

    everywhere(body)


def test_all_rows_are_kept_where_none_are_repeated() -> None:
    assert len(gather_real_rows(torch.ones(7), Rows(total=3, real=3))) == 7
    assert len(gather_real_rows(torch.ones(7), Rows(total=0, real=0))) == 7


def test_rows_that_fit_no_sample_are_refused_on_all_processes() -> None:
    def body() -> list[str]:
        state = PartialState()
        messages: list[str] = []
        for gather, value in (
            (gather_real_rows, torch.ones(4)),
            (gather_real_rows, ["text"] * 4),
            (gather_real_objects, ["text"] * 4),
        ):
            with pytest.raises(ConfigurationError) as caught:
                gather(value, Rows(total=3, real=1) if state.is_last_process else None)
            state.wait_for_everyone()
            messages.append(str(caught.value))
        return messages

    first, last = run_world(body, timeout=60)
    for message in last:
        assert message.startswith("gather_for_metrics got 4 rows for a batch of 3 samples, 2 of which")
        assert "even_batches=False" in message
    assert first == [f"gather_for_metrics failed on rank 1: {message}" for message in last]


@pytest.mark.parametrize("real", [3, 1, 0])
def test_a_tensor_without_dimensions_is_one_value_of_each_rank_with_real_samples(
    real: int, everywhere: Everywhere
) -> None:
    def body(rank: int, size: int) -> list[str]:
        is_last, messages = rank == size - 1, list[str]()
        logger, handler = logging.getLogger("trainer_lib.collectives.gather_for_metrics"), logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
        logger.addHandler(handler)
        rows = Rows(total=3, real=real) if is_last else None
        for _ in range(2):
            gathered = gather_real_rows({"loss": torch.tensor(rank + 0.5)}, rows)
            expected = [other + 0.5 for other in range(size)]
            assert gathered["loss"].tolist() == expected[: size - (real == 0)]
        logger.removeHandler(handler)
        return messages

    *others, last = everywhere(body)
    assert others == [[]] * len(others)
    assert len(last) == (real < 3)
    assert all("If it is their mean, they count in it. Pass one value per sample" in message for message in last)


def test_objects_are_joined_without_repeated_items(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        rows = Rows(total=2, real=1)
        boxes = [{"boxes": torch.ones(rank + 1, 4)}, {"boxes": torch.ones(9, 4)}]
        gathered = gather_real_objects(boxes, rows)
        assert [len(row["boxes"]) for row in gathered] == [other + 1 for other in range(size)]
        assert gather_real_objects(("a", "b"), rows) == ["a"] * size
        assert gather_real_objects([], rows) == []
        assert gather_real_objects("text", rows) == ["text"] * size
        assert gather_real_objects({"texts": ["a", "b"], "loss": 1.5}, rows) == [{"texts": ["a"], "loss": 1.5}] * size
        tensors = gather_real_objects(torch.full((2, rank + 1), rank), rows)
        assert [tensor.shape for tensor in tensors] == [(1, other + 1) for other in range(size)]

    everywhere(body)


def test_an_empty_list_on_one_process(everywhere: Everywhere) -> None:
    def body(rank: int, size: int) -> None:
        values = [rank] if rank else []
        assert gather_real_rows(values, None) == list(range(1, size))
        assert gather_real_objects(values, None) == list(range(1, size))

    everywhere(body)
