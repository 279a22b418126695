"""Options of data loading."""

from dataclasses import dataclass

from trainer_lib.options.base import KwargsHandler, check_choice, check_count, check_flag


@dataclass(repr=False, eq=False)
class DataLoaderConfiguration(KwargsHandler):
    """How prepared loaders share their batches across ranks.

    Args:
        split_batches: The loader's batch size is that of all ranks together; each rank takes its slice.
        dispatch_batches: Rank 0 reads all batches and sends them to the other ranks. By default off, for iterable
            datasets too.
        even_batches: Fill the last batches with samples from the beginning, so that all ranks have the same number of
            full batches. `gather_for_metrics` drops the repeated samples.
        use_seedable_sampler: Draw the order of a shuffled loader from a generator that is seeded with seed + epoch. By
            default it is drawn from the loader's own generator, or from torch's global one, as without this library.
        data_seed: The seed of an order that is a function of seed and epoch (`use_seedable_sampler` and
            `low_memory_shuffle`); by default torch's seed on rank 0.
        non_blocking: Do not wait for copies to the device (useful with pinned memory).
        use_stateful_dataloader: Make prepared loaders instances of torchdata's `StatefulDataLoader`, which has to be
            installed. `state_dict` and `load_state_dict` are there in any case.
        seed_each_sample: Seed the random generators before each sample from (seed, epoch, index), so that random
            augmentations depend on nothing else: not on workers, ranks or skipped batches. Costs about 7 µs a sample.
        low_memory_shuffle: Compute the order of a shuffled loader from seed and epoch instead of listing it. For
            datasets of so many samples that their permutation does not fit into memory.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    seed_each_sample: bool = False
    low_memory_shuffle: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        check_choice("dispatch_batches", self.dispatch_batches, [None, True, False])
        for name in (
            "split_batches",
            "even_batches",
            "use_seedable_sampler",
            "non_blocking",
            "use_stateful_dataloader",
            "seed_each_sample",
            "low_memory_shuffle",
        ):
            check_flag(name, getattr(self, name))
        if self.data_seed is not None:
            check_count("data_seed", self.data_seed, at_least=0)
