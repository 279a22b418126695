"""Restore the state of the process after a run, so that contestants do not affect each other."""

import io
import logging
import os
import warnings
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import torch


class Terminal(io.TextIOBase):
    """A terminal that nobody looks at: what is shown there is made all the same."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        """It is one."""
        return True

    def write(self, text: str, /) -> int:
        """Show nothing."""
        return len(text)


@contextmanager
def isolated() -> Generator[None]:
    """Restore the environment, warnings, logging, output, threads and generators on leaving."""
    environment, generator = dict(os.environ), torch.get_rng_state()
    threads, level = torch.get_num_threads(), logging.root.manager.disable
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # set-up is repeated for each run, and so would be what it has to say
    try:
        with warnings.catch_warnings(), redirect_stdout(Terminal()), redirect_stderr(Terminal()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        torch.set_num_threads(threads)
        torch.set_rng_state(generator)
        os.environ.clear()
        os.environ.update(environment)
