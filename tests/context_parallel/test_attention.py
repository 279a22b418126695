"""Attention over a group of ranks, compared with torch's attention on whole sequences."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.worlds import run_world
from trainer_lib import PartialState
from trainer_lib.context_parallel.attention.block_masks import AttentionRule
from trainer_lib.context_parallel.documents import documents_of_lengths
from trainer_lib.context_parallel.sequence_ranks import SequenceRanks

LENGTH = 32
KINDS = [("ring", True), ("ring", False), ("allgather", True), ("allgather", False), ("ulysses", False)]


def rules(is_causal: bool) -> dict[str, AttentionRule]:
    keep = torch.ones(2, LENGTH, dtype=torch.bool)
    keep[0, LENGTH - 5 :] = False  # padding on the right of one row and on the left of the other
    keep[1, :9] = False
    documents = documents_of_lengths(torch.tensor([0, 11, 12, 27, LENGTH]), LENGTH).repeat(2, 1)
    return {
        "plain": AttentionRule(is_causal),
        "padding": AttentionRule(is_causal, keep=keep),
        "documents": AttentionRule(is_causal, documents=documents),
        "window": AttentionRule(is_causal, window=7, keep=keep, documents=documents),
    }


def difference(
    kind: tuple[str, bool], rule: AttentionRule, heads: tuple[int, int], wide: int = 8, dtype: Any = torch.float64
) -> float:
    """Return how far outputs and gradients of this rank are from those of torch on the whole sequences."""
    ranks = SequenceRanks(dist.group.WORLD, *kind)
    torch.manual_seed(0)
    shapes = [(heads[0], 8), (heads[1], 8), (heads[1], wide), (heads[0], wide)]
    tensors = [torch.randn(2, count, LENGTH, width).to(dtype) for count, width in shapes]
    positions, (*whole, gradient) = torch.arange(LENGTH), tensors
    query, key, value = (tensor.requires_grad_() for tensor in whole)
    mask = rule.mask(positions, positions)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    wanted = [expected, *torch.autograd.grad(expected, whole, gradient)]
    query, key, value = parts = [ranks.layout.shard(tensor.detach(), 2).requires_grad_() for tensor in whole]
    out = ranks.attention(query, key, value, rule)
    computed = [out, *torch.autograd.grad(out, parts, ranks.layout.shard(gradient, 2))]
    pairs = zip(computed, [ranks.layout.shard(tensor, 2) for tensor in wanted], strict=True)
    return max(float((part - of_whole).detach().abs().max()) for part, of_whole in pairs)


def differences(kinds: Any, names: Any, heads: Any, **more: Any) -> dict[Any, float]:
    PartialState(cpu=True)
    return {
        (kind, name, is_causal): difference(kind, rules(is_causal)[name], heads, **more)
        for kind, name, is_causal in product(kinds, names, (True, False))
    }


def check(size: int, *args: Any, limit: float = 1e-13, **more: Any) -> None:
    def body() -> dict[Any, float]:
        return differences(*args, **more)

    for found in run_world(body, num_processes=size):
        assert {case: value for case, value in found.items() if not value <= limit} == {}


def test_attention_is_that_of_one_process() -> None:
    check(2, KINDS, ["plain", "padding"], (4, 2))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 1)])
def test_attention_with_any_rule_and_any_heads(size: int, heads: tuple[int, int]) -> None:
    check(size, KINDS, ["plain", "padding", "documents", "window"], heads)


@pytest.mark.slow
def test_values_of_another_width_and_lower_precisions() -> None:
    check(2, KINDS, ["plain", "window"], (4, 2), wide=4)
    check(2, KINDS, ["plain", "window"], (4, 2), dtype=torch.float32, limit=4e-6)
    check(2, KINDS, ["plain", "window"], (4, 2), dtype=torch.bfloat16, limit=0.1)


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_window_has_two_sides_unless_attention_is_causal(is_causal: bool) -> None:
    positions = torch.arange(5)
    allowed = AttentionRule(is_causal, window=2).mask(positions, positions)[0, 0]
    expected = torch.ones(5, 5).triu(-1).tril(0 if is_causal else 1)
    assert torch.equal(allowed, expected.bool())


def test_layouts_cut_and_join() -> None:
    def body() -> list[Any]:
        PartialState(cpu=True)
        whole, found = torch.arange(16).reshape(2, 8), []
        for balanced in (True, False):
            ranks = SequenceRanks(dist.group.WORLD, "ring", balanced)
            shard = ranks.layout.shard(whole, 1)
            found.append((shard[0].tolist(), bool((ranks.gather(shard, 1) == whole).all())))
        return found

    first, second = run_world(body)
    assert first == [([0, 1, 6, 7], True), ([0, 1, 2, 3], True)]
    assert second == [([2, 3, 4, 5], True), ([4, 5, 6, 7], True)]
