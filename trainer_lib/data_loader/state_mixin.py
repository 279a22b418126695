"""`DataLoaderStateMixin`: tells gradient accumulation which loader is being read, and when it comes to its end."""

from trainer_lib.state.gradient_state import GradientState, Rows


class DataLoaderStateMixin:
    """The base of prepared loaders, and of your own loaders that end a window of gradients with their last batch.

    Call `begin` before the first batch and `end` after the last one. Set `end_of_dataloader` before you yield the last
    batch, and `rows` if that batch repeats samples, which `gather_for_metrics` then drops.

    Attributes:
        end_of_dataloader: Whether the current batch is the last one.
        remainder: The real samples in the last round over all ranks; -1 if unknown.
        rows: What the current batch holds on this rank; `None`: no sample is repeated.
    """

    end_of_dataloader: bool = False
    others_read_on: bool = False
    remainder: int = -1
    rows: Rows | None = None

    @property
    def gradient_state(self) -> GradientState:
        """The state of gradient accumulation, which all loaders share."""
        return GradientState()

    def reset(self) -> None:
        """Forget what is known of the current batch."""
        self.end_of_dataloader, self.others_read_on, self.remainder, self.rows = False, False, -1, None

    def begin(self) -> None:
        """Make this the loader that is being read.

        Example:
            >>> class Countdown(DataLoaderStateMixin):
            ...     def __iter__(self):
            ...         self.begin()
            ...         for number in (2, 1):
            ...             self.end_of_dataloader = number == 1
            ...             yield number
            ...         self.end()
            >>> [(number, GradientState().end_of_dataloader) for number in Countdown()]
            [(2, False), (1, True)]
        """
        self.reset()
        self.gradient_state.add_dataloader(self)

    def end(self) -> None:
        """Make the loader around it, if there is one, the one that is being read."""
        self.gradient_state.remove_dataloader(self)
