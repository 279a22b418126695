"""What ranks send in a step is what the same parallelism by hand on plain torch sends, message by message."""

from collections import Counter
from typing import Any

import pytest

from benchmarks.contestants.trainer_lib import forget_state
from benchmarks.isolation import isolated
from benchmarks.parallelism.messages import Message
from benchmarks.parallelism.rounds import BY_HAND, measure
from benchmarks.parallelism.task import MESHES, TINY
from tests.worlds import run_world
from trainer_lib.state import PartialState

DOUBLE, SINGLE = 8, 4  # bytes
NORM = Message("all_reduce", DOUBLE)
# The step's agreement: the weight of the loss, requests, and the end of the data. It is a message of its own, or rides
# with the first gradients.
AGREEMENT = 5 * DOUBLE
_PARTS = TINY.rows * TINY.length // 2 * TINY.width * SINGLE  # of the keys, or the values, of a layer on a rank
# Gradients of the input of queries, keys and values travel as one, and so do those of the inner layers of an MLP.
_SHARED_INPUTS = {Message("all_reduce", TINY.rows * TINY.length * TINY.width * SINGLE): (2 + 1) * TINY.layers}
# Messages that only the training by hand sends, and those that only a Trainer sends.
DIFFERENCES: dict[str, tuple[dict[Message, int], dict[Message, int]]] = {
    # torch reduces the norms of all weights, those of each layout by themselves; here their sum travels.
    "tp": (
        {Message("all_reduce", 4 * SINGLE): 1, Message("all_reduce", 11 * SINGLE): 1} | _SHARED_INPUTS,
        {NORM: 1, Message("all_reduce", AGREEMENT): 1},
    ),
    # torch passes gradients of keys and values on, here they are scattered: half as many messages of twice the size.
    "cp": (
        {Message("all_to_all", 2 * _PARTS): 4},
        {Message("reduce_scatter", 4 * _PARTS): 2},
    ),
    # Queries, keys and values travel together: a third as many messages of three times the size, in both directions.
    "sp": ({Message("all_to_all", _PARTS): 2 * 3 * TINY.layers}, {Message("all_to_all", 3 * _PARTS): 2 * TINY.layers}),
    # Each rank gets the losses and weights of the micro-batches, and whether there is more to know of them.
    "pp": (
        {Message("all_reduce", SINGLE): 1},
        {NORM: 1, Message("broadcast", (2 * MESHES["pp"].micro_batches + 1) * DOUBLE): 1}
        | {Message("all_reduce", AGREEMENT): 1},
    ),
    "fsdp_tp": (
        {Message("all_reduce", 4 * SINGLE): 2, Message("all_reduce", 12 * SINGLE): 2}
        | {Message("all_reduce", 5 * SINGLE): 1}
        | _SHARED_INPUTS,
        {NORM: 2, Message("all_reduce", AGREEMENT): 1},
    ),
}


def _counted(names: list[str]) -> dict[str, dict[str, Counter[Message]]]:
    PartialState(cpu=True)
    counted: dict[str, dict[str, Counter[Message]]] = {}
    for name in names:
        with isolated():
            counted[name] = measure(MESHES[name], TINY, "Trainer", rounds=0, steps=1).messages
        forget_state()
    return counted


def _assert_same(messages: dict[str, Counter[Message]], name: str) -> None:
    by_hand, ours = messages[BY_HAND], messages["Trainer"]
    missing, added = map(dict, (by_hand - ours, ours - by_hand))
    if name in ("cp", "sp"):
        gradients = max(by_hand, key=lambda message: message.size)
        assert missing.pop(gradients) == added.pop(gradients._replace(size=gradients.size + AGREEMENT)) == 1
    assert (missing, added) == DIFFERENCES[name], name


@pytest.mark.slow
@pytest.mark.parametrize("names", [["tp", "cp", "sp", "pp"], ["fsdp_tp"]], ids="-".join)
def test_messages_are_those_by_hand(names: list[str]) -> None:
    results: list[Any] = run_world(_counted, (names,), MESHES[names[0]].num_ranks, timeout=240)
    for of_rank in results:
        for name, messages in of_rank.items():
            _assert_same(messages, name)
