"""The public state of gradient accumulation: whether this micro-batch updates, and which loaders are being read."""

from typing import Any, ClassVar, NamedTuple, Protocol

from trainer_lib.options.accumulation_options import GradientAccumulationPlugin


class Rows(NamedTuple):
    """What the last batch of a loader holds on this rank."""

    total: int
    real: int  # the rest repeats samples, to make ranks even
    full: int | None = None  # the rows of a full batch; None: unknown


class ActiveLoader(Protocol):
    """The attributes that gradient accumulation reads from a loader."""

    end_of_dataloader: bool
    others_read_on: bool  # at its end: whether other ranks have more batches
    remainder: int
    rows: Rows | None  # None: every row of the current batch is real, or nothing is known


class GradientState:
    """The state of gradient accumulation. All instances share it.

    `sync_gradients` is whether the current micro-batch updates.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    sync_gradients: bool
    plugin: GradientAccumulationPlugin
    _readers: list[Any]

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            self.sync_gradients = True
            self._readers = []
            self.plugin = gradient_accumulation_plugin or GradientAccumulationPlugin(num_steps=1)
        elif gradient_accumulation_plugin is not None:
            self.plugin = gradient_accumulation_plugin

    @property
    def initialized(self) -> bool:
        """Whether a `GradientState` exists."""
        return "plugin" in self._shared_state

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The options of accumulation by name, under Accelerate's name. A value that you set here counts."""
        return vars(self.plugin)

    @property
    def num_steps(self) -> int:
        """The micro-batches of one update."""
        return self.plugin.num_steps or 1

    @property
    def adjust_scheduler(self) -> bool:
        """Whether schedulers count micro-batches in `_step_count`."""
        return self.plugin.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader ends the window."""
        return self.plugin.sync_with_dataloader

    @property
    def active_dataloader(self) -> Any:
        """The loader that is being read (the innermost of several), or `None`."""
        return self._readers[-1] if self._readers else None

    @property
    def dataloader_references(self) -> list[Any]:
        """The loaders that are being read, outermost first."""
        return [None, *self._readers]

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being read."""
        return bool(self._readers)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last of its loader."""
        return bool(self._readers) and self._readers[-1].end_of_dataloader

    @property
    def others_read_on(self) -> bool:
        """Whether the current batch is the last of its loader on this rank, but not on all ranks."""
        return bool(self._readers) and getattr(self._readers[-1], "others_read_on", False)

    @property
    def remainder(self) -> int:
        """The real samples in the last round of the loader over all ranks; -1 if unknown."""
        return self._readers[-1].remainder if self._readers else -1

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Whether a script has reduced gradients for torch_xla itself: `backward` does it here, on any device."""
        return False

    def __repr__(self) -> str:
        """Return the state, one fact per line."""
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation plugin: {self.plugin.to_kwargs()}\n"
        )

    def add_dataloader(self, dataloader: ActiveLoader) -> None:
        """Take note that a loader is being read, inside those that are being read already."""
        self._readers.append(dataloader)

    def remove_dataloader(self, dataloader: ActiveLoader) -> None:
        """Take note that a loader is no longer read."""
        # By identity, at any index: a loader whose loop was left is closed late. Only once, since two loops may read
        # it at the same time.
        for index in reversed(range(len(self._readers))):
            if self._readers[index] is dataloader:
                del self._readers[index]
                break

    @staticmethod
    def reset() -> None:
        """Forget everything; for tests and forked processes."""
        GradientState._shared_state.clear()

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        # Its name in Accelerate, for loops that count their micro-batches themselves.
        self.sync_gradients = sync_gradients

    # Their names in Accelerate.
    _add_dataloader, _remove_dataloader, _reset_state = add_dataloader, remove_dataloader, reset
