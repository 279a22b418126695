"""`TorchPipelineParallelConfig`: options of pipeline parallelism, and the schedules of torch by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options.base import Options, check_count

SINGLE = ("GPipe", "1F1B")
LOOPED = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # rank 0 holds the first stage and the last one
SPLIT_BACKWARD = ("InterleavedZeroBubble", *V_SHAPED)  # gradients of inputs before those of weights


@dataclass(repr=False, eq=False)
class TorchPipelineParallelConfig(Options):
    """How a model is cut: `ParallelismConfig(pp_size=2, pp_handler=TorchPipelineParallelConfig(…))`.

    Args:
        blocks: The modules between which the model may be cut, in the order they run: their names, or a pattern such
            as "encoder.layer.*". By default the children of an `nn.Sequential`, or the longest list of equal blocks.
        schedule: In which order the micro-batches of an accumulation window run: "GPipe", "1F1B", "LoopedBFS",
            "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble" or "DualPipeV". `None`: one after the other,
            without overlap.
        stages_per_rank: How many stages each rank holds; by default 1, and 2 for schedules that need several.
        blocks_per_stage: How many blocks each stage holds; `stages_per_rank` follows once the model is known. By
            default stages have as equal numbers of weights as possible.
        example_inputs: The inputs of a micro-batch, as the model is called with them: a mapping of names, or a
            sequence. With it the model is cut by tracing its forward (`torch.export`), which may be any row of
            operations: each stage gets all that it needs of those before. Only shapes and types count. Stages begin
            where the `blocks` do, or at calls of `torch.distributed.pipelining.pipe_split()`.

    Example:
        >>> TorchPipelineParallelConfig(blocks="encoder.layer.*").blocks
        'encoder.layer.*'
    """

    blocks: str | Sequence[str] | None = None
    schedule: str | None = "1F1B"
    stages_per_rank: int | None = None
    blocks_per_stage: int | None = None
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = field(default=None, repr=False, compare=False)

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
        self._check_example()
        if self.blocks_per_stage is not None:
            check_count("blocks_per_stage", self.blocks_per_stage)
            if self.stages_per_rank is not None:
                raise ConfigurationError(
                    f"stages_per_rank={self.stages_per_rank} and blocks_per_stage={self.blocks_per_stage} both say how "
                    "many stages there are. Give one of them."
                )
            return
        if self.stages_per_rank is None:
            self.stages_per_rank = 1 if self.schedule in (None, *SINGLE) else 2
        check_count("stages_per_rank", self.stages_per_rank)
        if self.schedule is not None:
            check_schedule(self.schedule, self.stages_per_rank)

    @property
    def traces(self) -> bool:
        """Whether the model is cut by tracing its forward."""
        return self.example_inputs is not None

    @property
    def example_call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional inputs and those by name of the example."""
        inputs = self.example_inputs
        return ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs or ()), {})

    def _check_example(self) -> None:
        inputs: Any = self.example_inputs
        if inputs is None:
            return
        if not isinstance(inputs, Mapping | list | tuple) or not inputs:
            raise ConfigurationError(
                f"example_inputs must be a mapping or a sequence of inputs of the model (got {type(inputs).__name__}). "
                "Example: example_inputs={'input_ids': torch.zeros(2, 128, dtype=torch.long)}."
            )
        if self.blocks_per_stage is not None:
            raise ConfigurationError(
                f"blocks_per_stage={self.blocks_per_stage} does not work with example_inputs: tracing finds where "
                "blocks run. Name the first block of each stage (blocks=[…]), and set stages_per_rank."
            )


def stages_per_rank_of(config: TorchPipelineParallelConfig, num_blocks: int, pp_size: int) -> int:
    """Return how many stages of `blocks_per_stage` blocks each rank holds.

    Raises:
        ConfigurationError: If the blocks do not fill them, or the schedule does not run so many.

    Example:
        >>> stages_per_rank_of(TorchPipelineParallelConfig(schedule="LoopedBFS", blocks_per_stage=2), 8, 2)
        2
    """
    size = config.blocks_per_stage or 1
    stages, rest = divmod(num_blocks, size * pp_size)
    if rest or not stages:
        raise ConfigurationError(
            f"The model's {num_blocks} blocks do not fill stages of {size} on {pp_size} ranks (blocks_per_stage, or "
            f"num_layers_per_virtual_pipeline_stage of Megatron-LM). Their product, {size * pp_size}, must divide the "
            "number of blocks."
        )
    if config.schedule is not None:
        check_schedule(config.schedule, stages)
    return stages


def schedule_name(name: str) -> str:
    """Return a schedule's name as torch spells it.

    Raises:
        ConfigurationError: If there is no such schedule.
    """
    known = {known.lower(): known for known in (*SINGLE, *LOOPED, *V_SHAPED)}
    if not isinstance(name, str) or name.lower() not in known:
        raise ConfigurationError(f"Unknown schedule {name!r}. Known: {', '.join(known.values())}.")
    return known[name.lower()]


def ranks_of_stages(schedule: str | None, pp_size: int, stages_per_rank: int) -> list[int]:
    """Return the rank of a pipeline that holds each stage.

    Example:
        >>> ranks_of_stages("Interleaved1F1B", 2, 2), ranks_of_stages("ZBVZeroBubble", 2, 2)
        ([0, 1, 0, 1], [0, 1, 1, 0])
    """
    ranks = list(range(pp_size))
    return [*ranks, *reversed(ranks)] if schedule in V_SHAPED else ranks * stages_per_rank


def stages_of_rank(schedule: str | None, rank: int, pp_size: int, stages_per_rank: int) -> list[int]:
    """Return the stages that a rank of the pipeline holds."""
    ranks = ranks_of_stages(schedule, pp_size, stages_per_rank)
    return [stage for stage, holder in enumerate(ranks) if holder == rank]


def check_schedule(schedule: str, stages_per_rank: int) -> None:
    """Raise unless the schedule runs that many stages on each rank."""
    if schedule in SINGLE:
        needed, fits = "1", stages_per_rank == 1
    elif schedule in V_SHAPED:
        needed, fits = "2", stages_per_rank == 2
    else:
        needed, fits = "at least 2", stages_per_rank > 1
    if not fits:
        others = SINGLE if stages_per_rank == 1 else LOOPED
        raise ConfigurationError(
            f"The schedule {schedule} takes stages_per_rank={needed} (got {stages_per_rank}). Set stages_per_rank, or "
            f"choose one of {', '.join(others)}."
        )


def check_micro_batches(schedule: str, count: int, pp_size: int) -> None:
    """Raise unless a window of `count` micro-batches fits the schedule."""
    least = _least(schedule, pp_size)
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
    if schedule in V_SHAPED:
        return schedule, count if count >= _least(schedule, pp_size) else 0
    return schedule, count // pp_size * pp_size


def _least(schedule: str, pp_size: int) -> int:
    """Return the smallest number of micro-batches that a schedule of torch takes."""
    return {"GPipe": 1, "ZBVZeroBubble": 2 * pp_size - 1, "DualPipeV": 2 * pp_size}.get(schedule, pp_size)
