"""Options of data loading."""

from dataclasses import dataclass

from trainer_lib.options.base import KwargsHandler, check_choice, check_count, check_flag


@dataclass
class DataLoaderConfiguration(KwargsHandler):
    """How prepared loaders share their batches out.

    Args:
        split_batches: The loader's batch size is that of all processes together; each takes its slice.
        dispatch_batches: The first process reads and sends the others their batches. Off unless asked for, for
            iterable datasets too.
        even_batches: Fill the last round with samples from the beginning, so that all processes have the same number
            of full batches. `gather_for_metrics` drops the repeated ones.
        use_seedable_sampler: Accepted: the order of a shuffled loader is always a function of seed and epoch.
        data_seed: The seed of that order; by default the generator of the loader's sampler, else torch's seed of the
            first process.
        non_blocking: Do not wait for copies to the device (of use with pinned memory).
        use_stateful_dataloader: Accepted: prepared loaders always have `state_dict` and `load_state_dict`.
        seed_each_sample: Seed the generators before each sample from (seed, epoch, index), so that random
            augmentations depend on nothing else: not on workers, processes or skips. About 7 µs a sample.
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
