"""The training batches of an epoch, with errors that name a dead data worker or data that is used up."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainer_lib.checkpointing.format.rng_state import Generators
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.logging import get_logger
from trainer_lib.trainer.fit.context import FitContext

_logger = get_logger(__name__)

_HOST = torch.device("cpu")  # whose generators draw the order


class TrainBatches:
    """The training batches of a fit.

    Args:
        context: The fit.
    """

    def __init__(self, context: FitContext) -> None:
        self._context, self._loader = context, context.loader
        self._has_opened = False

    @contextmanager
    def of_epoch(self) -> Generator[Iterator[Any]]:
        """Return the context of an epoch's batches, in which the death of a data worker is named.

        In the first epoch the ranks compare what a stream begins with. If the first batch cannot be read, the
        generators are again what they were before.
        """
        state, generators = self._context.run.state, Generators(_HOST)
        before, micro_batches = generators.state_dict(), state.micro_batches
        batches = iter(self._loader)  # has the workers, and is held until they were asked whether they live
        try:
            if self._has_opened or not self._loader.reads_alike:
                yield batches
            else:
                from trainer_lib.trainer.data import rank_data_check

                self._has_opened = True
                yield rank_data_check.checked_stream(self._context.group, self._loader, batches)
        except Exception as error:
            if isinstance(error, (RuntimeError, OSError, EOFError)):
                self._loader.name_dead_workers(error)  # torch raises it wherever training happens to be
            if state.micro_batches == micro_batches:  # a resumed run begins the epoch again
                generators.load_state_dict(before)
            raise
        finally:
            del batches

    def used_up(self) -> str:
        """Return why training ends where an epoch has no batch.

        Raises:
            ConfigurationError: If there was no batch at all.
        """
        state = self._context.run.state
        if not state.step:
            raise ConfigurationError(
                "The training data gave no batch. Is the dataset empty, or an iterator that was read before? With "
                "drop_last=True it needs a whole batch for each process."
            )
        _logger.warning(
            "Epoch %d gave no batch: an iterator can be read only once. Training ends at step %d.",
            state.epoch + 1,
            state.step,
        )
        return "the data came to an end"
