"""Options of context and sequence parallelism, under Accelerate's names."""

from dataclasses import dataclass

from trainer_lib.foundation import environment
from trainer_lib.options.base import KwargsHandler, check_choice, check_count, check_flag

_RING = ("alltoall", "ring")  # torch calls a ring of messages alltoall


@dataclass(repr=False, eq=False)
class TorchContextParallelConfig(KwargsHandler):
    """How attention reaches the keys of other ranks.

    Args:
        cp_comm_strategy: "allgather" gathers keys and values in one message, which takes the memory of whole sequences
            for them; "ring" passes them around while it computes, and "alltoall" is Accelerate's name for it. By
            default the launcher's setting, or else "allgather".
        load_balance: Give each rank a part of the head and one of the tail of a sequence, so that causal attention is
            the same work for all.
    """

    cp_comm_strategy: str | None = None
    load_balance: bool = True

    def __post_init__(self) -> None:
        """Take up what the launcher says, and check the values."""
        if self.cp_comm_strategy is None:
            self.cp_comm_strategy = environment.context_parallel_strategy() or "allgather"
        check_choice("cp_comm_strategy", self.cp_comm_strategy, ("allgather", *_RING))
        check_flag("load_balance", self.load_balance)

    @property
    def method(self) -> str:
        """The way of exchanging keys and values: "allgather" or "ring"."""
        return "ring" if self.cp_comm_strategy in _RING else "allgather"


@dataclass(repr=False, eq=False)
class DeepSpeedSequenceParallelConfig(KwargsHandler):
    """Options of sequence parallelism (Ulysses), which runs without DeepSpeed.

    Args:
        sp_seq_length: The length of the sequences. Nothing depends on it: each batch is cut by its own length.
        sp_seq_length_is_variable: Whether batches have different lengths, which they always may.
        sp_attn_implementation: "sdpa", or one of flash attention's names, for which torch's attention runs too.
    """

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        """Take up what the launcher says, and check the values."""
        for name, value in environment.sequence_parallelism_requested().items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.sp_seq_length is not None:
            check_count("sp_seq_length", self.sp_seq_length)
        if self.sp_seq_length_is_variable is None:
            self.sp_seq_length_is_variable = True
        if "flash-attn" in (self.sp_attn_implementation or "").rpartition("/")[2]:  # a kernel of the Hub
            return
        known = (None, "sdpa", "flash_attention_2", "flash_attention_3")
        check_choice("sp_attn_implementation", self.sp_attn_implementation, known)
