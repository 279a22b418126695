"""Sharding (FSDP2) against one process: losses, gradient norms, weights and optimizer states, whatever the settings."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerator import toy
from tests.strategies.sharded import Block, Case, Tied, Twice, give_values, train
from tests.worlds import run_world
from trainer_lib import Accelerator, FullyShardedDataParallelPlugin


def _on_meta_but_main(network: nn.Module, rank: int) -> nn.Module:
    if rank == 0:
        return network
    with torch.device("meta"):
        return type(network)()


def _on_meta(network: nn.Module, rank: int) -> nn.Module:
    del rank
    with torch.device("meta"):
        return type(network)()


def _on_other_weights_but_main(network: nn.Module, rank: int) -> nn.Module:
    if rank > 0:
        for tensor in (*network.parameters(), *network.buffers()):
            tensor.data.fill_(float(rank))
    return network


TWO = {
    "full shard": Case(),
    "shard grad op": Case(plugin={"sharding_strategy": "SHARD_GRAD_OP"}),
    "whole model at once": Case(plugin={"auto_wrap_policy": "no_wrap"}),
    "blocks by size": Case(plugin={"auto_wrap_policy": "size_based_wrap", "min_num_params": 60}),
    "blocks by name": Case(plugin={"transformer_cls_names_to_wrap": ["Block", "Linear"]}),
    "blocks by class": Case(plugin={"auto_wrap_policy": [Block]}),
    "prefetching": Case(plugin={"forward_prefetch": True}),
    "no prefetching": Case(plugin={"backward_prefetch": "NO_PREFETCH"}),
    "offload": Case(plugin={"cpu_offload": True}),
    "activation checkpointing": Case(plugin={"activation_checkpointing": True}),
    "activation checkpointing, inputs on the CPU": Case(
        plugin={"activation_checkpointing": True, "activation_checkpointing_offload": True}
    ),
    "ignored": Case(plugin={"ignored_modules": r"last|blocks\.1"}, steps=2),
    "ignored, fused": Case(
        plugin={"ignored_modules": "last"}, optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True)
    ),
    "tied": Case(kind=Tied),
    "each block twice": Case(kind=Twice, plugin={"auto_wrap_policy": [Block]}),
    "each block twice, reduced each time": Case(kind=Twice, steps=2, sync_each_batch=True),
    "tied, others on meta": Case(kind=Tied, start=_on_meta_but_main),
    "others on meta": Case(start=_on_meta_but_main),
    "all on meta": Case(start=_on_meta, plugin={"param_init_fn": give_values}),
    "others have other weights": Case(start=_on_other_weights_but_main),
    "own weights": Case(plugin={"sync_module_states": False}),
    "accumulation": Case(steps=2),  # does not divide the 3 batches of a pass: the last window is short
    "accumulation, reduced each time": Case(steps=2, sync_each_batch=True),
    "weighted": Case(weighted=True),
    "weighted accumulation": Case(weighted=True, steps=2),
    "weighted accumulation, reduced each time": Case(weighted=True, steps=2, sync_each_batch=True),
    "largest gradient": Case(norm_type=float("inf")),
    "norm of 3": Case(norm_type=3.0, plugin={"ignored_modules": "last"}),
    "cut values": Case(clip=None, clip_value=0.05, plugin={"ignored_modules": "last"}),
    "evaluation before step": Case(interlude="evaluating", plugin={"reshard_after_forward": False}),
    "forward before step": Case(interlude="recording", plugin={"reshard_after_forward": False}),
    "forward before step, unclipped": Case(interlude="recording", clip=None),
    "optimizer afterwards": Case(order="afterwards"),
    "optimizer first": Case(order="optimizer first"),
    "optimizer before": Case(order="optimizer before"),
    "fused": Case(optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True)),
}
FOUR = {
    "full shard": Case(),
    "hybrid": Case(replicas=2, parts=2),
    "hybrid accumulation": Case(replicas=2, parts=2, steps=2, weighted=True),
    "hybrid, mixed": Case(replicas=2, parts=2, plugin={"ignored_modules": "last"}, norm_type=1.0),
    "reshard to two": Case(plugin={"reshard_after_forward": 2}),
}
QUICK = {  # one case for each kind of sharding
    2: {"full shard", "shard grad op", "offload", "ignored", "tied", "each block twice", "weighted accumulation"},
    4: set(),
}


def _all(cases: dict[str, Case], shards: bool) -> dict[str, Any]:
    # A second pass where windows may go on into it.
    return {name: train(case, shards, epochs=2 if case.steps > 1 else 1) for name, case in cases.items()}


@functools.cache
def results(processes: int, is_quick: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what each case tells in one process, and in several."""
    cases = TWO if processes == 2 else FOUR
    chosen = {name: case for name, case in cases.items() if (name in QUICK[processes]) is is_quick}
    (alone,) = run_world(_all, (chosen, False), 1, timeout=120)
    return alone, run_world(_all, (chosen, True), processes, timeout=120)


def _parameters() -> list[Any]:
    return [
        pytest.param(
            processes,
            name,
            id=f"{processes}-{name}",
            marks=() if name in QUICK[processes] else pytest.mark.slow,
        )
        for processes, cases in ((2, TWO), (4, FOUR))
        for name in cases
    ]


@pytest.mark.parametrize(("processes", "name"), _parameters())
def test_shards_train_as_one_process_does(processes: int, name: str) -> None:
    alone, together = results(processes, name in QUICK[processes])
    main, others = together[0][name], [result[name] for result in together[1:]]
    expected = alone[name]
    for result in (main, *others):
        assert result["losses"] == pytest.approx(expected["losses"], rel=2e-6)
        assert result["norms"] == pytest.approx(expected["norms"], rel=2e-6)
        assert result["names"] == expected["names"]
        torch.testing.assert_close(result["shift"], expected["shift"], rtol=0, atol=0)
    assert list(main["weights"]) == list(expected["weights"])
    toy.assert_same(list(main["weights"].values()), list(expected["weights"].values()), rtol=1e-4)
    assert main["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    for key, values in expected["optimizer"]["state"].items():
        state = main["optimizer"]["state"][key]
        toy.assert_same(
            [state[part].float() for part in values], [value.float() for value in values.values()], rtol=1e-4
        )
    assert all(result["weights"] == result["optimizer"] == {} for result in others)


def test_forwards_are_in_lockstep_only_where_there_are_other_ranks() -> None:
    def body() -> bool:
        return Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin()).strategy.is_in_lockstep

    assert [run_world(body, num_processes=size) for size in (1, 2)] == [[False], [True, True]]


class Widened(nn.Module):
    """A layer that returns a view."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 9)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs)[..., :8]


class ChangedInPlace(nn.Module):
    """Layers whose outputs are views that the model changes in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Widened(), Widened()])

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            inputs = layer(inputs)
            inputs += 1
        return {"scores": inputs[:, :3]}


@pytest.mark.parametrize("wrapped", [[], ["Widened"]])
def test_outputs_that_are_views_may_be_changed_in_place(wrapped: list[str]) -> None:
    inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))

    def gradients(sharded: bool) -> list[torch.Tensor]:
        plugin = FullyShardedDataParallelPlugin(
            auto_wrap_policy=None if wrapped else "no_wrap", transformer_cls_names_to_wrap=wrapped or None
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin if sharded else None)
        model = accelerator.prepare(ChangedInPlace())
        rank, ranks = accelerator.process_index, accelerator.num_processes
        scores = model(inputs[rank::ranks])["scores"]
        scores /= 2
        accelerator.backward(scores.logsumexp(dim=1).mean())
        whole: list[Any] = [parameter.grad for parameter in model.parameters()]
        return [gradient.full_tensor() if sharded else gradient for gradient in whole]

    expected = run_world(gradients, (False,), 1)[0]
    for actual in run_world(gradients, (True,), 2):
        toy.assert_same(actual, expected, rtol=1e-4)
