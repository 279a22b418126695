"""Options of data loading."""

from dataclasses import dataclass

from trainer_lib.options.base import KwargsHandler, check_choice, check_count, check_flag


@dataclass
class DataLoaderConfiguration(KwargsHandler):
    """How prepared loaders share their batches across ranks.

    Args:
        split_batches: The loader's batch size is that of all ranks together; each rank takes its slice.
        dispatch_batches: Rank 0 reads all batches and sends them to the other ranks. By default off, for iterable
            datasets too.
        even_batches: Fill the last batches with samples from the beginning, so that all ranks have the same number of
            full batches. `gather_for_metrics` drops the repeated samples.
        use_seedable_sampler: No effect: the order of a shuffled loader always depends on seed and epoch only.
        data_seed: The seed of that order; by default from the generator of the loader's sampler, else torch's seed on
            rank 0.
        non_blocking: Do not wait for copies to the device (useful with pinned memory).
        use_stateful_dataloader: No effect: prepared loaders always have `state_dict` and `load_state_dict`.
        seed_each_sample: Seed the random generators before each sample from (seed, epoch, index), so that random
            augmentations depend on nothing else: not on workers, ranks or skipped batches. Costs about 7 µs a sample.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    seed_each_sample: bool = False

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
        ):
            check_flag(name, getattr(self, name))
        if self.data_seed is not None:
            check_count("data_seed", self.data_seed, at_least=0)
