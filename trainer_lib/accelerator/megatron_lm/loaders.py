"""Loaders whose batches are those of an update, and loaders of Megatron-LM's datasets."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from trainer_lib.data_loader.megatron_lm.gpt_samples import gpt_datasets, weighted_paths
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.options.megatron_lm.dummy_data_loader import MegatronLMDummyDataLoader

if TYPE_CHECKING:
    from trainer_lib.options.megatron_lm.megatron_lm_plugin import MegatronLMPlugin


class EndlessLoader:
    """What a loader of a dataset of Megatron-LM has in addition: `next` begins the next pass where one ends."""

    _batches: Iterator[Any] | None = None

    def __next__(self: Any) -> Any:
        if self._batches is None:
            self._batches = iter(self)
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self)
            return next(self._batches)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a position."""
        self._batches = None
        super().load_state_dict(state_dict)  # type: ignore[misc]


def of_windows(loader: DataLoader[Any], plugin: "MegatronLMPlugin") -> DataLoader[Any]:
    """Return a loader of micro-batches; with a train step a copy whose batches hold all micro-batches of an update."""
    if not plugin.computes_windows:
        return loader
    count = plugin.num_micro_batches or 1
    if loader.batch_size is None or not isinstance(loader.batch_sampler, BatchSampler):
        raise ConfigurationError(
            "A train step needs a DataLoader with batch_size=, the size of a micro-batch (got one with a batch_sampler "
            "of its own, or without batches). Give DataLoader(dataset, batch_size=…)."
        )
    copied, sampler = copy.copy(loader), copy.copy(loader.batch_sampler)
    sampler.batch_size = loader.batch_size * count
    copied.__dict__["batch_size"], copied.__dict__["batch_sampler"] = sampler.batch_size, sampler
    return copied


def with_datasets(
    values: Sequence[Any], plugin: "MegatronLMPlugin", replicas: int, prepare: Callable[[DataLoader[Any]], Any]
) -> tuple[Any, ...]:
    """Return what `prepare` got, with prepared loaders for stand-ins: to train on, to validate on, to test on."""
    dummies = [value for value in values if isinstance(value, MegatronLMDummyDataLoader)]
    if not dummies:
        return tuple(values)
    plugin.megatron_dataset_flag = True
    if len(dummies) > 3:
        raise ConfigurationError(
            f"prepare got {len(dummies)} MegatronLMDummyDataLoaders. There are three: the loaders to train on, to "
            "validate on and to test on."
        )
    options = dummies[0]
    loaders = iter(
        None if dataset is None else _endless(prepare(_loader(dataset, options, shuffles=index == 0)))
        for index, dataset in enumerate(_datasets(options, plugin, replicas))
    )
    return tuple(next(loaders) if isinstance(value, MegatronLMDummyDataLoader) else value for value in values)


def _datasets(options: MegatronLMDummyDataLoader, plugin: "MegatronLMPlugin", replicas: int) -> list[Any]:
    provider = plugin.custom_megatron_datasets_provider_function
    if provider is not None:
        return list(provider(plugin.samples_of_datasets(options.needed("micro_batch_size"), replicas)))
    paths = weighted_paths(options.needed("data_path"))
    return gpt_datasets(paths, options.needed("split"), options.needed("seq_length", plugin.seq_length))


def _loader(dataset: Any, options: MegatronLMDummyDataLoader, shuffles: bool) -> DataLoader[Any]:
    seed, workers = options.needed("seed"), options.needed("num_workers")
    generator = torch.Generator().manual_seed(seed) if shuffles else None
    size = options.needed("micro_batch_size")
    return DataLoader(
        dataset, batch_size=size, shuffle=shuffles, generator=generator, drop_last=True, num_workers=workers
    )


def _endless(loader: Any) -> Any:
    loader.__class__ = type(type(loader).__name__, (EndlessLoader, type(loader)), {})
    return loader
