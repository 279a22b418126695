"""A loader of which each rank reads its own share."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from trainer_lib.data_loader.build_reader import RankSplit, check_preparable
from trainer_lib.data_loader.order.data_rng import positive_seed
from trainer_lib.data_loader.order.loader_position import LoaderPosition
from trainer_lib.data_loader.order.samples_per_rank import Ending
from trainer_lib.data_loader.prepared_loader import Delivery, PreparedLoader
from trainer_lib.data_loader.stateful_loader import stateful_kind
from trainer_lib.process_group import LoneProcess


class DataLoaderShard(PreparedLoader):
    """A loader of which each rank reads its own share of one global order.

    `prepare_data_loader` makes it around a user's loader. Made by hand, from a dataset, one rank reads all of it.

    Args:
        dataset: The dataset.
        device: Where batches are moved to; by default they are not moved.
        rng_types: The generators to synchronize between the ranks at the start of a pass.
        synchronized_generator: The generator that "generator" means in `rng_types`.
        skip_batches: How many batches of the first pass to skip.
        use_stateful_dataloader: Be an instance of torchdata's `StatefulDataLoader` too.
        _non_blocking: Do not wait for copies to the device.
        iteration: The epoch of the first pass.
        **kwargs: Arguments of `DataLoader`.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | str | int | None = None,
        rng_types: list[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        if use_stateful_dataloader:
            self.__class__ = stateful_kind(type(self))
        loader = DataLoader(dataset, drop_last=kwargs.pop("drop_last", _drop_last), **kwargs)
        check_preparable(loader, torch_device_mesh)
        split = RankSplit(group=LoneProcess(), world=LoneProcess())
        delivery = Delivery(
            device=device,
            non_blocking=_non_blocking,
            rng_types=tuple(rng_types or ()),
            generator=synchronized_generator,
        )
        self.set_up(split.reader(loader), split, delivery, positive_seed(torch.initial_seed()))
        self.begin_at(iteration, skip_batches)

    def _read(self, place: LoaderPosition, ending: Ending) -> Iterator[Any]:
        return self._reader.open(place, self._seed, ending)


class SkipDataLoader(DataLoaderShard):
    """A loader whose first pass skips the first batches.

    Args:
        dataset: The dataset.
        skip_batches: How many batches to skip.
        use_stateful_dataloader: Be an instance of torchdata's `StatefulDataLoader` too.
        **kwargs: Arguments of `DataLoader`.
    """

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, skip_batches=skip_batches, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
