"""The window of an update: its micro-batches, what they count, and what ranks tell each other with its gradients."""

from typing import Any

from trainer_lib.foundation.errors import DistributedOperationException
from trainer_lib.trainer.data.batch_rows import real_rows
from trainer_lib.trainer.data.sample_counts import SampleCounts
from trainer_lib.trainer.fit.context import FitContext
from trainer_lib.trainer.fit.windows.step_message import StepMessage


class UpdateWindow:
    """The micro-batches of one update.

    Args:
        context: What is trained.

    Attributes:
        first_sample: The samples of the run before this window.
        is_skipped: Whether an earlier rewind skips the samples of this window.
        is_filler: Whether the micro-batch in hand only repeats samples, so that all ranks have as many.
        has_samples: Whether the update has samples: of any rank, or of this one while it trains by itself.
    """

    first_sample: int

    def __init__(self, context: FitContext) -> None:
        self._run, self._loader, self._accelerator = context.run, context.loader, context.accelerator
        self._window = context.accelerator.window
        self._counts = SampleCounts(context)
        self.first_sample = 0
        self.has_samples = not self._window.is_local
        self.is_skipped = self.is_filler = False
        # Numbers on an accelerator are read an update later, when they are there: nothing waits for its backward.
        self._reads_late = context.accelerator.device.type != "cpu"
        self._message: StepMessage | None = None
        self._late: StepMessage | None = None

    def read(self, batch: Any) -> Any:
        """Return the rows of a batch that repeat no sample; of a filler batch, all of them."""
        rows = self._loader.rows
        self.is_filler = False
        if rows is not None and rows.real < rows.total:
            self.is_filler: bool = rows.real == 0
            batch = real_rows(batch, rows)
        if not self.is_filler:
            self.has_samples = True
            self._counts.read(batch)
        return batch

    def begin(self) -> None:
        """Note where the window begins, and whether an earlier rewind skips it."""
        state = self._run.state
        self.first_sample = samples = state.samples
        self.is_skipped: bool = bool(state.left_out) and any(first <= samples < end for first, end in state.left_out)

    def write_message(self) -> None:
        """Have the gradients of this update take along what this rank has to tell."""
        if self._window.is_local:
            return
        requests, at_end = self._run.control.to_floats(), float(self._loader.end_of_dataloader)
        loss = None if self._run.args.loss_spike is None else 0.0
        self._message = self._window.message = StepMessage(requests, at_end, self._counts.pending, loss)

    def read_message(self) -> None:
        """Read what all ranks told with the gradients of this update.

        Raises:
            DistributedOperationException: If the data ends on some ranks only.
        """
        if self._message is None:  # one rank
            return
        control, received = self._run.control, self._message.received
        if received is None:  # a training step of the user whose backward had nothing to learn from
            control.send_again()
        else:
            if (not self._reads_late or self._loader.end_of_dataloader) and 0 < received.at_end < 1:
                self._raise_uneven_end(float(received.at_end))
            self._counts.add(mean * self._accelerator.data_group.size for mean in received.counts)
        if self._reads_late:
            received, self._late = self._late, received
        if received is not None:
            control.receive([float(request) for request in received.requests])

    def count(self, is_last: bool) -> None:
        """Count the micro-batch in hand, which may be the last one of the window."""
        state = self._run.state
        state.micro_batches += 1
        state.samples += self._loader.samples_in_round or 0
        if is_last and (self._window.is_local or self.is_skipped):
            self._counts.gather()
            self.has_samples: bool = not self._window.is_local

    def _raise_uneven_end(self, share: float) -> None:
        if self._loader.even_batches:
            ranks = self._accelerator.num_processes
            here = "has ended" if self._loader.end_of_dataloader else "has not"
            raise DistributedOperationException(
                f"In step {self._run.state.step + 1} the training data has ended on {round(share * ranks)} of {ranks} "
                f"ranks and not on the others; on this rank, {self._accelerator.process_index}, it {here}. Give all "
                "ranks the same samples, which the loader shares out; a dataset that gives each rank its own says so "
                "by the attribute is_split_between_processes = True."
            )
