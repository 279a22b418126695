"""Attention over sequences that several ranks hold parts of (context and sequence parallelism)."""

from trainer_lib.context_parallel.context_parallel import ContextParallel, SequenceSplit, WholeSequences
from trainer_lib.context_parallel.selection import sequence_split

__all__ = ["ContextParallel", "SequenceSplit", "WholeSequences", "sequence_split"]
