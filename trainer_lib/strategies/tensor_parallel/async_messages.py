"""Overlap the messages of tensor parallelism with matrix products, in graphs that inductor compiles (async TP)."""

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

from trainer_lib.foundation.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Styles whose messages are gathers and scatters of sequences; torch overlaps no all-reduce.
_OVERLAPPING = ("rowwise_scatter_sequence", "gather_sequence", "sequence_parallel_gather", "scatter_sequence")


class AsyncMessages:
    """Lets inductor cut gathers and scatters of one group into parts that overlap with matrix products."""

    def __init__(self) -> None:
        self._before: bool | None = None

    def begin(self, group: "ProcessGroup", styles: Iterable[str]) -> None:
        """Switch it on for the ranks that split each matrix.

        Raises:
            ConfigurationError: If the plan has no messages that torch overlaps.
        """
        if not set(styles) & set(_OVERLAPPING):
            raise ConfigurationError(
                "enable_async_tp=True overlaps gathers and scatters of sequences, and this plan only sums whole "
                "activations. Give TorchTensorParallelConfig(sequence_parallel=True), or a plan with "
                f"{', '.join(_OVERLAPPING[:2])}; or leave enable_async_tp out."
            )
        from torch._inductor import config  # torch has no public option for it
        from torch.distributed import _symmetric_memory

        with warnings.catch_warnings():  # torch says there is no need, and its own pass still asks for it
            warnings.simplefilter("ignore", FutureWarning)
            _symmetric_memory.enable_symm_mem_for_group(group.group_name)  # pyright: ignore[reportDeprecated] - see above
        if self._before is None:
            self._before = config._micro_pipeline_tp  # pyright: ignore[reportPrivateUsage] - torch has no public name
        config._micro_pipeline_tp = True  # pyright: ignore[reportPrivateUsage] - torch has no public name

    def end(self) -> None:
        """Switch it off again."""
        if self._before is not None:
            from torch._inductor import config

            config._micro_pipeline_tp, self._before = self._before, None  # pyright: ignore[reportPrivateUsage] - torch has no public name
