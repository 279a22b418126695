"""Bad samples of a run: skipped on request, synchronized across ranks, listed in a file and reported."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from trainer_lib.data_loader.bad_samples.sample_quarantine import Quarantine
from trainer_lib.filesystem.atomic_files import LogWrites, replace_file
from trainer_lib.foundation.errors import UnsupportedError
from trainer_lib.foundation.lengths import length_of
from trainer_lib.logging import get_logger

if TYPE_CHECKING:
    from trainer_lib.runs import RunFolder
    from trainer_lib.trainer.arguments.training_arguments import TrainingArguments
    from trainer_lib.trainer.fit.context import FitContext

_logger = get_logger(__name__)

FILE = "quarantine.jsonl"


class BadSamples:
    """The samples of a run that cannot be read.

    With `on_bad_sample="raise"` there are none: what they raise ends the run.

    Args:
        context: What is trained.
    """

    def __init__(self, context: "FitContext") -> None:
        self._context = context
        args, group = context.run.args, context.accelerator.data_group
        self._leaves_out = args.on_bad_sample == "skip"
        dataset = context.loader.dataset
        # The processes meet at the next log, which all of them make.
        self._quarantine = Quarantine(group, _most(args, dataset), _limit(args), lambda: context.run.control.ask("log"))
        self._written, self._writes = 0, LogWrites("lines")
        if self._leaves_out:
            context.loader.skip_bad_samples(self._quarantine)

    def agree(self) -> None:
        """Have all processes know of what any of them left out. All of them have to ask.

        Raises:
            BadSampleError: If that is too much.
        """
        if not self._leaves_out:
            return
        try:
            self._quarantine.sync_across_ranks()
        finally:
            folder = self._context.folder
            if folder is not None and self._context.run.is_main_process and self._is_news:
                self._write(folder)

    def tell(self) -> None:
        """Tell what was left out, in the end."""
        samples = self._quarantine.agreed
        if samples:
            where = "" if self._context.folder is None else f" {self._context.folder.path / FILE} lists them."
            count = f"{len(samples)} samples were" if len(samples) > 1 else "1 sample was"
            listed = self._quarantine.description()
            _logger.warning("%s skipped, because they could not be read. %s%s", count, listed, where)

    def state_dict(self) -> dict[str, Any]:
        """Return what was left out, as far as the processes agreed on it."""
        return self._quarantine.state_dict() if self._leaves_out else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it up, so that the rest of the run leaves out the same."""
        if self._leaves_out and state:
            self._quarantine.load_state_dict(state)

    @property
    def _is_news(self) -> bool:
        return len(self._quarantine.agreed) != self._written

    def _write(self, folder: "RunFolder") -> None:
        entries = self._quarantine.agreed.values()
        text = "".join(json.dumps(entry._asdict() | {"pass": entry.epoch}) + "\n" for entry in entries)
        file = folder.here / FILE
        if self._writes.attempt(file, lambda: replace_file(file, lambda path: _write_text(path, text))):
            folder.upload()
            self._written = len(entries)


def check_can_leave_out(args: "TrainingArguments", loader: DataLoader[Any], option: str) -> None:
    """Raise, before anything is read, if bad samples of a loader cannot be left out and are to be.

    Raises:
        UnsupportedError: Of an iterable dataset.
    """
    if args.on_bad_sample == "skip" and isinstance(loader.dataset, IterableDataset):
        raise UnsupportedError(
            f'on_bad_sample="skip" needs samples with an index, and {option} is iterable: an iterator that raises '
            'has ended. Catch the error in its __iter__, or give on_bad_sample="raise".'
        )


def leave_out_while_evaluating(args: "TrainingArguments", loader: Any, group: Any) -> None:
    """Leave out bad samples of a set that is evaluated, if that is wanted."""
    if args.on_bad_sample == "skip":
        loader.skip_bad_samples(Quarantine(group, _most(args, loader.dataset), _limit(args)))


def _most(args: "TrainingArguments", dataset: Any) -> int:
    if isinstance(args.max_bad_samples, int):
        return args.max_bad_samples
    return int((length_of(dataset) or 0) * args.max_bad_samples)


def _limit(args: "TrainingArguments") -> str:
    return f"max_bad_samples={args.max_bad_samples}"


def _write_text(path: Any, text: str) -> None:
    path.write_text(text)
