"""`TorchPipelineParallelConfig`: options of pipeline parallelism, and the schedules of torch by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options.base import check_count

SINGLE = ("GPipe", "1F1B")
LOOPED = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble")


@dataclass
class TorchPipelineParallelConfig:
    """How a model is cut: `ParallelismConfig(pp_size=2, pp_handler=TorchPipelineParallelConfig(…))`.

    Args:
        blocks: The modules between which the model may be cut, in the order they run: their names, or a pattern such
            as "encoder.layer.*". By default the children of an `nn.Sequential`, or the longest list of equal blocks.
        schedule: In which order the micro-batches of an accumulation window run: "GPipe", "1F1B", "LoopedBFS",
            "Interleaved1F1B" or "InterleavedZeroBubble". `None`: one after the other, without overlap.
        stages_per_rank: How many stages each rank holds; by default 1, and 2 for schedules that need several.

    Example:
        >>> TorchPipelineParallelConfig(blocks="encoder.layer.*").blocks
        'encoder.layer.*'
    """

    blocks: str | Sequence[str] | None = None
    schedule: str | None = "1F1B"
    stages_per_rank: int | None = None

    def __post_init__(self) -> None:
        """Check the types; names are checked with the model."""
        blocks: Any = self.blocks
        is_list = isinstance(blocks, Sequence) and all(isinstance(name, str) for name in blocks)
        if blocks is not None and not (is_list and blocks):
            raise ConfigurationError(
                f"blocks must be a pattern or a list of module names (got {blocks!r}). Example: "
                "blocks='model.layers.*'."
            )
        if self.schedule is not None:
            self.schedule = schedule_name(self.schedule)
        if self.stages_per_rank is None:
            self.stages_per_rank = 2 if self.schedule in LOOPED else 1
        check_count("stages_per_rank", self.stages_per_rank)
        if self.schedule is not None:
            check_schedule(self.schedule, self.stages_per_rank)


def schedule_name(name: str) -> str:
    """Return a schedule's name as torch spells it.

    Raises:
        ConfigurationError: If there is no such schedule.
    """
    known = {known.lower(): known for known in (*SINGLE, *LOOPED)}
    if not isinstance(name, str) or name.lower() not in known:
        raise ConfigurationError(f"Unknown schedule {name!r}. Known: {', '.join(known.values())}.")
    return known[name.lower()]


def stages_of_rank(schedule: str, rank: int, pp_size: int, stages_per_rank: int) -> list[int]:
    """Return the stages that a rank of the pipeline holds."""
    if schedule in SINGLE:
        return [rank]
    return [rank + turn * pp_size for turn in range(stages_per_rank)]


def check_schedule(schedule: str, stages_per_rank: int) -> None:
    """Raise unless the schedule runs that many stages on each rank."""
    if (schedule in SINGLE) != (stages_per_rank == 1):
        needed = "1" if schedule in SINGLE else "at least 2"
        raise ConfigurationError(
            f"The schedule {schedule} takes stages_per_rank={needed} (got {stages_per_rank}). Set stages_per_rank, or "
            f"choose one of {', '.join(SINGLE if stages_per_rank == 1 else LOOPED)}."
        )


def check_micro_batches(schedule: str, count: int, pp_size: int) -> None:
    """Raise unless a window of `count` micro-batches fits the schedule."""
    least = pp_size if schedule != "GPipe" else 1
    if count < least or (schedule in LOOPED and count % pp_size):
        multiple = f", and a multiple of {pp_size}" if schedule in LOOPED else ""
        raise ConfigurationError(
            f"The schedule {schedule} with pp_size={pp_size} needs at least {least} micro-batches{multiple} (got "
            f"{count}). Cut the window's batches smaller, or choose schedule='GPipe', which takes any number."
        )


def scheduled(schedule: str, count: int, pp_size: int) -> tuple[str, int]:
    """Return the schedule for up to `count` micro-batches, and how many of them it takes: perhaps none."""
    if schedule in SINGLE:
        return (schedule if count >= pp_size else "GPipe"), count
    return schedule, count // pp_size * pp_size
