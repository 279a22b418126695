"""The activations that a rank of a pipeline keeps at a time, in the order in which torch's schedule runs."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import nn

from trainer_lib.options.parallel.pipeline_options import TorchPipelineParallelConfig, scheduled


def activations_in_flight(
    options: TorchPipelineParallelConfig, rank: int, ranks: int, micro_batches: int, kept: Mapping[int, int]
) -> int:
    """Return the most bytes that a rank keeps for backwards.

    Args:
        options: The schedule.
        rank: The rank in its pipeline.
        ranks: The ranks of the pipeline.
        micro_batches: The micro-batches of a window.
        kept: The bytes that the forward of a micro-batch keeps, by stage of this rank.
    """
    alone = sum(kept.values())  # a micro-batch that no schedule takes runs through all stages before its backward
    name, count = ("", 0) if options.schedule is None else scheduled(options.schedule, micro_batches, ranks)
    alive = peak = 0
    for action in _actions(name, rank, ranks, count, len(kept)) if count else ():
        if action is None:  # the rank waits
            continue
        kind = action.computation_type.value
        if kind == "F":
            alive += kept[action.stage_index]
        elif kind in ("B", "W"):  # of a backward in two parts, the second one frees what was kept
            alive -= kept[action.stage_index]
        peak = max(peak, alive)
    return peak if count == micro_batches else max(peak, alone)


def _actions(name: str, rank: int, ranks: int, count: int, stages_per_rank: int) -> list[Any]:
    """Return what a schedule of torch has a rank do."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    stages: list[Any] = [
        SimpleNamespace(
            stage_index=rank + turn * ranks, num_stages=ranks * stages_per_rank, group_size=ranks, group_rank=rank,
            has_backward=True, is_first=not (rank or turn), is_last=rank == ranks - 1 and turn == stages_per_rank - 1,
            submod=nn.Module(),
        )
        for turn in range(stages_per_rank)
    ]  # fmt: skip
    kind: Any = get_schedule_class(name)
    schedule = kind(stages[0] if name in ("GPipe", "1F1B") else stages, n_microbatches=count, loss_fn=lambda loss: loss)
    return schedule.pipeline_order[rank]
