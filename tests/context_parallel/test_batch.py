"""Batches cut along the sequence: labels, positions, padding, documents."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from trainer_lib.context_parallel.batch import BatchCut, first_positions
from trainer_lib.context_parallel.sequence_layout import SequenceLayout
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError

TOKENS = torch.arange(10, 24).reshape(2, 7)


class Pair(NamedTuple):
    inputs: Tensor
    labels: Tensor


def parts(batch: Any, size: int = 2, balanced: bool = False, **options: Any) -> list[Any]:
    return [BatchCut(SequenceLayout(size, rank, balanced), **options).part(batch) for rank in range(size)]


def joined(batches: list[Any], name: str, balanced: bool = False) -> Tensor:
    return SequenceLayout(2, 0, balanced).join([part.batch[name] for part in batches], 1)


@pytest.mark.parametrize("balanced", [True, False])
def test_labels_are_shifted_before_they_are_cut(balanced: bool) -> None:
    batch: dict[str, Any] = {
        "input_ids": TOKENS,
        "labels": TOKENS,
        "attention_mask": torch.ones_like(TOKENS),
        "name": "a",
    }
    cut = parts(batch, balanced=balanced, shifts_labels=True, takes_positions=True)
    assert (cut[0].length, cut[0].real_length, cut[0].batch["name"]) == (8, 7, "a")
    expected = torch.cat([TOKENS[:, 1:], torch.full((2, 2), -100)], 1)
    assert torch.equal(joined(cut, "shift_labels", balanced), expected)
    assert torch.equal(joined(cut, "labels", balanced), expected)
    assert joined(cut, "position_ids", balanced)[:, :7].tolist() == [list(range(7))] * 2
    assert joined(cut, "attention_mask", balanced)[:, 7].tolist() == [0, 0]
    assert "shift_labels" not in batch
    assert torch.equal(batch["labels"], TOKENS)


def test_pairs_and_named_tuples_keep_their_type() -> None:
    (first, _), (named, _) = parts((TOKENS, TOKENS)), parts(Pair(TOKENS, TOKENS))
    assert [tensor.tolist() for tensor in first.batch] == [TOKENS[:, :4].tolist()] * 2
    assert type(named.batch) is Pair
    assert parts((TOKENS, TOKENS))[1].batch[1][:, -1].tolist() == [-100, -100]


def test_documents_are_known_by_positions_or_lengths() -> None:
    batch = {"input_ids": TOKENS[:1], "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 1]])}
    expected = [[0, 0, 0, 1, 1, 2, 2, -1]]
    assert parts(batch)[0].documents is None
    assert parts(batch, separates_documents=True)[1].documents.tolist() == expected
    by_lengths = {"input_ids": TOKENS[:1], "cu_seq_lens_q": torch.tensor([0, 3, 5, 7]), "max_length_q": 3}
    part = parts(by_lengths)[0]
    assert part.documents.tolist() == expected
    assert list(part.batch) == ["input_ids"]


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"no sequences to cut: no input is a tensor of \[batch, positions"):
        parts((torch.ones(2), torch.ones(2)))
    with pytest.raises(ConfigurationError, match=r"a target for each position: \[batch, 7, …\] \(got shape \(2,\)\)"):
        parts((TOKENS, torch.ones(2)))
    with pytest.raises(ConfigurationError, match=r"float32 have no value that a loss ignores.* multiple of 2"):
        parts((TOKENS, torch.ones(2, 7)))
    with pytest.raises(UnsupportedError, match=r"attention_mask of shape \(2, 1, 7, 7\) cannot be cut"):
        parts({"input_ids": TOKENS, "attention_mask": torch.ones(2, 1, 7, 7)})
    with pytest.raises(
        ConfigurationError, match=r"A sequence of 7 cannot be cut for 2 ranks.*multiple of 4. Pad it to 8"
    ):
        SequenceLayout(2, 0, balanced=True).shard(TOKENS, 1)


def test_first_positions_have_a_target_each() -> None:
    batch = {"input_ids": TOKENS, "labels": torch.full((2, 7), -100), "weight": torch.ones(2), "scale": 3}
    short = first_positions(batch, None, 4)
    assert short["input_ids"].tolist() == [[10, 11, 12, 13]]
    assert short["labels"].tolist() == [[0, 0, 0, 0]]
    assert (short["weight"].tolist(), short["scale"]) == ([1.0], 3)
