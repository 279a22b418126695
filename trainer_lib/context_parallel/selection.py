"""How the sequences of a `ParallelismConfig` are shared."""

from trainer_lib.context_parallel.sequence_split import SequenceSplit, WholeSequences
from trainer_lib.logging import get_logger
from trainer_lib.parallelism_config import ParallelismConfig

_logger = get_logger(__name__)


def sequence_split(config: ParallelismConfig | None, device_type: str) -> SequenceSplit:
    """Return how ranks share sequences: not at all without `cp_size` and `sp_size`. All ranks call it."""
    if config is None or not (config.cp_enabled or config.sp_enabled):
        return WholeSequences()
    from trainer_lib.context_parallel.context_parallel import ContextParallel
    from trainer_lib.context_parallel.sequence_ranks import SequenceRanks

    mesh = config.get_device_mesh(device_type)
    assert mesh is not None  # since some size is above 1
    if config.sp_enabled:
        _logger.warning_once(
            "sp_size=%d: sequence parallelism (Ulysses) runs on torch's all-to-all, without DeepSpeed, whatever "
            "sp_backend and sp_attn_implementation say.",
            config.sp_size,
        )
        has_plan = config.tp_handler is not None and config.tp_handler.plan is not None
        tp_size = None if has_plan and config.tp_enabled else config.sizes["tp"]
        return ContextParallel(SequenceRanks(mesh.get_group("sp"), "ulysses"), tp_size)
    handler = config.cp_options
    return ContextParallel(SequenceRanks(mesh.get_group("cp"), handler.method, handler.load_balance))
