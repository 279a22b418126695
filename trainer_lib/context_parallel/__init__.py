"""Attention over sequences that several ranks hold parts of (context and sequence parallelism)."""

from trainer_lib.context_parallel.selection import sequence_split
from trainer_lib.context_parallel.sequence_split import SequenceSplit, WholeSequences

__all__ = ["SequenceSplit", "WholeSequences", "sequence_split"]
